"""Claims about verifiers that compare text: where the final answer is, when it is right, and that nothing raises."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.environments.answers import (
    TAIL,
    boxed,
    code_block,
    final_answer,
    hashed,
    last_letter,
    last_number,
    marked,
    tagged,
)
from rl_algorithms.environments.matching import exact_match, multiple_choice, normalise, normalised_match, regex_match

SOLID = st.text(min_size=1).filter(str.strip)
# Text that looks as though somebody wished the extraction ill.
NASTY = st.lists(
    st.sampled_from(["\\boxed{", "}", "{", "####", "<answer>", "</answer>", "```", "\n", "A", "4", ".", "\\"])
).map("".join)


@pytest.mark.parametrize(
    ("find", "text", "found"),
    [
        (boxed, r"\boxed{1} then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (boxed, r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (boxed, r"\boxed{1} and then \boxed{2", None),
        (boxed, "none", None),
        (hashed, "so\n#### 3\nno\n####  72 \nend", "72"),
        (tagged, "<answer>1</answer> no: <answer> 2 </answer>", "2"),
        (tagged, "<answer>1</answer> no: <answer>2", None),
        (marked, r"<answer>\boxed{4}</answer>", "4"),
        (marked, r"\boxed{4}, that is, #### 5", "5"),
        (marked, "five", None),
        (final_answer, " five ", "five"),
        (final_answer, r"five \boxed{", None),
        (last_number, "of 1,200 apples -3.5 are red", "-3.5"),
        (last_number, "1e-3 or 3 / 4", "3/4"),
        (last_number, "none", None),
        (last_letter, "It is (B), not the other. NASA", "B"),
        (last_letter, "It is Z.", None),
        (code_block, "so:\n```python\nx = 1\n```\nor\n```\ny\n```", "y\n"),
        (code_block, "```python\nx = 1\n```\nbetter:\n```python\ny", None),
        (code_block, "x = 1", None),
    ],
)
def test_the_last_mark_counts(find, text, found):
    assert find(text) == found


@given(st.one_of(st.text(), NASTY))
def test_extraction_is_total_and_never_empty(text):
    for find in (boxed, hashed, tagged, marked, final_answer, last_number, last_letter):
        assert find(text) is None or find(text)
    code_block(text)


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "####", "<answer>", "1,", "-", "A ", "```", "1.1", "1 / "])
def test_extraction_looks_at_the_tail_alone(piece):
    flood = piece * (20 * TAIL)
    for find in (boxed, hashed, tagged, marked, final_answer, last_number, last_letter):
        assert find(flood) == find(flood[-TAIL:])


@given(SOLID)
def test_the_gold_answer_is_right(gold):
    for verify in (exact_match, normalised_match):
        assert verify([gold], [gold]) == [1.0]


@given(st.one_of(st.text(), NASTY), st.one_of(st.text(), NASTY, st.none(), st.integers(), st.lists(st.integers())))
def test_no_text_makes_a_verifier_raise(text, gold):
    for verify in (exact_match, normalised_match):
        (score,) = verify([text], [gold])
        assert score is None or score in {0.0, 1.0} or score.failed
    multiple_choice([text], [gold], [["a", "b"]])
    multiple_choice([text], ["A"], [gold])


@given(st.text())
def test_normalising_twice_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text)


def test_exact_is_exact_and_normalised_is_not():
    answers = ["4", " 4\n", r"\boxed{4}", "4.", "5", "four: #### 4"]
    assert exact_match(answers, ["4"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 1.0]
    texts = ["The Answer.", "the  answer", "an answer", "\uff34he answer"]
    assert normalised_match(texts, ["THE ANSWER"] * 4) == [1.0, 1.0, 0.0, 1.0]
    assert normalised_match(["+", "-"], ["-", "-"]) == [0.0, 1.0]


def test_rows_without_a_gold_answer_do_not_apply_and_empty_ones_are_failures():
    none, empty = exact_match(["4", "4"], [None, " "])
    assert none is None
    assert "gold answer is empty" in empty.failed


CITIES = ["Rome", "Paris", "Oslo"]


@pytest.mark.parametrize("gold", ["B", 1, "Paris", "(B)"])
@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("B", 1.0),
        ("(b) no, B.", 1.0),
        ("paris.", 1.0),
        (r"I say \boxed{B}", 1.0),
        ("B) Paris", 1.0),
        ("(B) Oslo", 0.0),
        ("C", 0.0),
        ("Oslo", 0.0),
        ("D", 0.0),
        ("", 0.0),
    ],
)
def test_a_choice_is_a_letter_or_its_text(gold, answer, reward):
    assert multiple_choice([answer], [gold], [CITIES]) == [reward]


@given(st.lists(SOLID, min_size=2, max_size=26, unique_by=normalise), st.data())
def test_the_gold_choice_is_right(choices, data):
    gold = data.draw(st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(choices)]))
    assert multiple_choice([gold], [gold], [choices]) == [1.0]


def test_a_gold_choice_that_is_none_of_them_is_the_rows_fault():
    for gold, choices in [("Z", CITIES), (3, CITIES), ("Bonn", CITIES), ("A", "Rome"), ("A", ["Rome"])]:
        (score,) = multiple_choice(["A"], [gold], [choices])
        assert score.failed


@pytest.fixture
def patient(monkeypatch):
    """Verifiers that are functions wait longer than a user would."""
    from rl_algorithms.environments import matching
    from rl_algorithms.environments.workers import Workers

    workers = Workers(timeout_s=60.0)
    monkeypatch.setattr(matching, "WORKERS", workers)
    yield workers
    workers.close()


@pytest.mark.usefixtures("patient")
def test_patterns_match_the_whole_final_answer():
    scores = regex_match(["#### ab", "xab", "ab", "ab"], ["a.", "a.", None, "("])
    assert scores[:3] == [1.0, 0.0, None]
    assert "no regular expression" in scores[3].failed


def test_a_pattern_that_takes_for_ever_is_stopped_and_others_go_on(monkeypatch):
    from rl_algorithms.environments import matching
    from rl_algorithms.environments.workers import Workers

    workers = Workers(timeout_s=10.0)  # the other one is judged by another process within it
    monkeypatch.setattr(matching, "WORKERS", workers)
    hopeless, fine = regex_match(["a" * 60 + "!", "ab"], ["(a+)+b", "a."])
    assert (hopeless, hopeless.metrics) == (0.0, {"timed_out": 1.0})
    assert (fine, fine.metrics) == (1.0, {"timed_out": 0.0})
    workers.close()


def test_a_worker_does_not_see_secrets_and_ends_with_its_owner(monkeypatch):
    from rl_algorithms.environments.workers import Workers

    monkeypatch.setenv("TOKEN", "hunter2")
    workers = Workers(timeout_s=60.0)
    assert workers.run([{"do": "regex", "pattern": "a", "text": "a"}]) == [{"matches": True}]
    (worker,) = workers._started
    pid = worker._process.pid
    assert b"hunter2" not in Path(f"/proc/{pid}/environ").read_bytes()
    workers.close()
    deadline = time.monotonic() + 60.0
    while worker.alive and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not worker.alive
    assert workers.run([{"do": "regex", "pattern": "a", "text": "b"}]) == [{"matches": False}]
    workers.close()


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"timeout_s": 0.0}, {"memory_bytes": -1}])
def test_workers_refuse_nonsense(options):
    from rl_algorithms.environments.workers import Workers

    with pytest.raises(ValueError, match=rf"{next(iter(options))}=.* must be > 0"):
        Workers(**options)
