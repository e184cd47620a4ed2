"""Claims about the verifier of mathematics: what is equal, and that no text can hurt it."""

import sys
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("math_verify", reason="needs math-verify: pip install 'rl-algorithms[math]'")

from rl_algorithms.contracts import Conversation
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.environments.math import MathVerifier, math_match
from rl_algorithms.environments.workers import Workers


@pytest.fixture(scope="module")
def verifier():
    workers = Workers(timeout_s=60.0)
    yield MathVerifier(workers=workers)
    workers.close()


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        ("1/2", r"so \boxed{0.5}", True),
        (r"\frac{1}{3}", "<answer>1/3</answer>", True),
        ("reasoning #### 1,200", r"\boxed{1200}", True),
        ("42", "The answer is 42.", True),
        ("42", "first 42, no, 41", False),
        ("x^2+2x+1", r"\boxed{(x+1)^2}", True),
        (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}", True),
        ("(0,1)", "$(0,1)$", True),
        ("7", r"\boxed{7} or \boxed{8}", False),
        ("7", r"\boxed{7} or \boxed{", False),
        ("London", r"\boxed{London}", True),
        ("London", r"\boxed{Paris}", False),
    ],
)
def test_equal_is_what_is_mathematically_equal(verifier, gold, answer, right):
    assert verifier.verify(gold, answer) is right


@given(gold=st.text(min_size=1).filter(str.strip))
def test_the_gold_answer_is_right_and_costs_no_process(gold):
    assert MathVerifier().verify(gold, gold)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    answer=st.one_of(
        st.text(max_size=40),
        st.lists(
            st.sampled_from(["\\frac", "{", "}", "\\boxed{", "^", "_", "(", ")", "1", "x", "=", ",", "\\", "$"])
        ).map("".join),
    )
)
def test_no_text_makes_it_raise(verifier, answer):
    (score,) = verifier([answer], ["7"])
    assert score in {0.0, 1.0}
    assert set(score.metrics) == {"unparsed", "timed_out"}


@pytest.mark.parametrize("bomb", ["9" * 19_000, r"\boxed{\frac}", "\0\ud800"])
def test_what_breaks_a_parser_is_wrong_and_no_error(verifier, bomb):
    assert verifier([bomb], ["7"]) == [0.0]
    assert verifier.verify("7", "7.0")


def test_what_takes_for_ever_is_counted_and_the_next_answer_is_judged():
    workers = Workers(timeout_s=0.0001)
    late, at_sight = MathVerifier(workers=workers)([r"\boxed{2^{99999999999}}", "7"], ["7", "7"])
    assert (late, late.metrics) == (0.0, {"unparsed": 0.0, "timed_out": 1.0})
    assert at_sight == 1.0
    workers.close()


def test_it_works_in_any_thread(verifier):
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(verifier.verify("1/2", "0.5")))
    thread.start()
    thread.join()
    assert verdicts == [True]


def test_a_batch_is_judged_by_several_processes_in_order():
    workers = Workers(num_workers=2, timeout_s=60.0)
    answers = [rf"\boxed{{{number}/2}}" for number in range(6)]
    assert MathVerifier(workers=workers)(answers, ["1.5"] * 6) == [0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    workers.close()


def test_a_mark_may_be_required():
    workers = Workers(timeout_s=60.0)
    strict = MathVerifier(require_mark=True, workers=workers)
    bare, boxed = strict(["it is 42", r"it is \boxed{42}"], ["42", "42"])
    assert (bare, bare.metrics["unparsed"]) == (0.0, 1.0)
    assert boxed == 1.0
    assert not workers._started  # neither needed mathematics


def test_rows_without_a_gold_answer_do_not_apply():
    none, empty = math_match(["4", "4"], [None, ""])
    assert none is None
    assert empty.failed == "the row's gold answer is empty"


def test_it_is_a_reward_function(verifier):
    environment = RewardFunctionEnvironment(reward=verifier)
    conversation = Conversation(
        messages=({"role": "user", "content": "?"},), answer=r"\boxed{2/4}", row={"answer": "0.5"}
    )
    (item,) = environment.step([conversation])
    assert (item.reward, item.metrics) == (1.0, {"unparsed": 0.0, "timed_out": 0.0})


def test_its_absence_is_said_with_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'rl-algorithms\[math\]'"):
        MathVerifier()
    assert "sympy" not in sys.modules or sys.modules["sympy"]
