"""Whole data sets: each form is read, split and refused; and tokenized without a row that one use of it cannot take."""

import pytest

from rl_algorithms.data import (
    ConversationData,
    DataError,
    PreferenceData,
    SkippedRows,
    held_out_demonstrations,
    load_dataset,
)
from rl_algorithms.data.datasets import are_conversations
from rl_algorithms.tokenized_data import tokenize

ROWS = [{"prompt": f"{number}00", "answer": str(number)} for number in range(10)]
PAIRS = [{"prompt": f"{number}00", "chosen": str(number), "rejected": "9"} for number in range(6)]
CHATS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}]} for n in range(6)
]


def test_each_form_gives_its_data_set_with_some_prompts_held_out():
    prompts = load_dataset(ROWS, form="prompts", held_out_share=0.3)
    assert (len(prompts.train), len(prompts.held_out)) == (7, 3)
    assert prompts.demonstrations == prompts.train
    chats = load_dataset(CHATS, form="conversations", held_out_share=0.5)
    assert isinstance(chats, ConversationData)
    assert (len(chats.demonstrations), len(chats.held_out_demonstrations)) == (3, 3)
    pairs = load_dataset(PAIRS, form="preferences", held_out_share=0.5, imitate_chosen=True)
    assert isinstance(pairs, PreferenceData)
    assert (len(pairs.pairs), len(pairs.held_out_pairs), len(pairs.demonstrations)) == (3, 3, 3)
    assert load_dataset(PAIRS, form="preferences").demonstrations == []


def test_held_out_rows_that_are_given_are_held_out_and_nothing_is_cut():
    dataset = load_dataset(ROWS[:8], form="prompts", held_out=ROWS[8:])
    assert [row.prompt for row in dataset.held_out] == ["800", "900"]
    assert len(dataset.train) == 8
    with pytest.raises(DataError, match=r"^held_out\[0\]: the held-out prompt '000' is also trained on"):
        load_dataset(ROWS, form="prompts", held_out=ROWS[:1])


def test_a_bad_held_out_row_is_refused_also_where_bad_rows_are_skipped():
    with pytest.raises(DataError, match=r"^held_out\[0\]: field 'prompt' is missing"):
        load_dataset(ROWS, form="prompts", held_out=[{"answer": "1"}], skipped=SkippedRows())
    skipped = SkippedRows()
    load_dataset([*ROWS, {"answer": "1"}], form="prompts", skipped=skipped)
    assert skipped.count == 1


def test_conversations_are_recognised_by_their_first_readable_row():
    assert are_conversations(CHATS)
    assert are_conversations([{"nothing": 1}, *CHATS])
    assert are_conversations(ROWS) is False
    assert are_conversations([{"nothing": 1}]) is None


def test_held_out_responses_are_what_imitation_is_measured_on():
    assert len(held_out_demonstrations(load_dataset(ROWS, form="prompts", held_out_share=0.2))) == 2
    assert held_out_demonstrations(load_dataset(PAIRS, form="preferences")) == []


def test_rows_are_tokenized_for_each_use_that_is_wanted(chat):
    dataset = load_dataset(ROWS, form="prompts", held_out=[{"prompt": "1234", "answer": "7"}])
    data = tokenize(dataset, chat, context_length=None, max_new_tokens=4, imitate="all")
    assert (len(data.prompts), len(data.held_out), len(data.demonstrations)) == (10, 1, 10)
    assert (len(data.held_out_demonstrations), data.pairs) == (1, None)
    only_sampled = tokenize(dataset, chat, context_length=None, max_new_tokens=4)
    assert (only_sampled.demonstrations, only_sampled.held_out_demonstrations) == ([], [])
    assert tokenize(dataset, chat, context_length=None, max_new_tokens=4, sample=False, imitate="all").prompts == []


def test_pairs_become_examples_whose_digest_changes_with_any_token(chat):
    def digest(pairs):
        dataset = load_dataset(pairs, form="preferences", held_out=PAIRS[4:])
        data = tokenize(dataset, chat, context_length=None, max_new_tokens=4)
        assert data.prompts == []  # responses are given, so none are sampled
        return data.pairs.digest()

    assert digest(PAIRS[:4]) == digest(PAIRS[:4])
    assert digest(PAIRS[:4]) != digest([*PAIRS[:3], {**PAIRS[3], "rejected": "8"}])


def test_a_prompt_that_leaves_no_room_for_a_response_is_refused_or_left_out_of_every_use(chat):
    long = {"prompt": "1" * 40, "answer": "1"}
    dataset = load_dataset([*ROWS, long], form="prompts", held_out=[{"prompt": "1234", "answer": "7"}])
    options = {"context_length": 44, "max_new_tokens": 8, "imitate": "all"}
    with pytest.raises(DataError, match=r"data\[10\]: the prompt has 40 tokens.* max_new_tokens=8 .*context of 44"):
        tokenize(dataset, chat, **options)
    before = SkippedRows(read=11)
    data = tokenize(dataset, chat, **options, skipped=before, skip_bad_rows=True)
    assert (len(data.prompts), len(data.demonstrations)) == (10, 10)  # as a demonstration it would have fitted
    assert (data.skipped.count, before.count) == (1, 0)


def test_held_out_prompts_that_nobody_scores_may_be_too_long_and_are_counted(chat):
    dataset = load_dataset(ROWS, form="prompts", held_out=[{"prompt": "1" * 40}, {"prompt": "1234"}])
    data = tokenize(dataset, chat, context_length=44, max_new_tokens=8, score=False)
    assert (len(data.held_out), data.held_out_too_long) == (1, 1)
    with pytest.raises(DataError, match=r"held_out\[0\]: the prompt has 40 tokens"):
        tokenize(dataset, chat, context_length=44, max_new_tokens=8)


def test_a_kind_of_which_no_row_is_left_is_refused_with_the_first_reason(chat):
    dataset = load_dataset(ROWS, form="prompts", held_out=[{"prompt": "1" * 40}])
    with pytest.raises(DataError, match=r"none of the 1 held-out prompts can be used; the first: held_out\[0\]"):
        tokenize(dataset, chat, context_length=44, max_new_tokens=8, skip_bad_rows=True)
