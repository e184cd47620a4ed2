import pytest
import torch

from rl_generation import PromptError, Sampling, TransformersEngine
from rl_generation.constraints import banned_next, encode_bad_words
from rl_generation.detokenizer import Detokenizer, StopStrings


@pytest.fixture(scope="module")
def served(tiny, tokenizer):
    return TransformersEngine(
        tiny("llama"), stop_token_ids=[2], pad_token_id=0, tokenizer=tokenizer, continuous_batching="required"
    )


def free_answer(served, **settings):
    (rollout,) = served.generate([[1, 5, 6]], Sampling(max_new_tokens=24, temperature=0, ignore_eos=True, **settings))
    return rollout


def test_text_comes_as_its_characters_are_complete(tokenizer):
    tokens = tokenizer.encode("ab é cd", add_special_tokens=False)
    stream = Detokenizer(tokenizer, tokenizer.encode("x", add_special_tokens=False))
    pieces = [stream.push(token) for token in [*tokens[:2], 2, *tokens[2:]]]
    assert "".join(pieces) == "ab é cd"
    assert "" in pieces, "half of the two bytes of é, and a special token, show nothing"


def test_the_earliest_stop_string_wins_wherever_tokens_end(tokenizer):
    tokens = tokenizer.encode("xy ab cd", add_special_tokens=False)
    for stops, found in [
        (("b c", "y a"), "y a"),
        (("d", "ab c"), "ab c"),
        (("zz",), None),
        (("xy ab cd",), "xy ab cd"),
    ]:
        finder = StopStrings(stops, tokenizer, [1])
        assert next((stop for stop in map(finder.push, tokens) if stop), None) == found


def test_a_stop_string_in_the_prompt_alone_does_not_count(tokenizer):
    prompt = tokenizer.encode("abc", add_special_tokens=False)
    finder = StopStrings(("cd",), tokenizer, prompt)
    assert finder.push(tokenizer.encode("d", add_special_tokens=False)[0]) is None


def test_an_answer_ends_with_the_token_that_completes_its_stop_string(served, tokenizer):
    free = free_answer(served)
    text = [tokenizer.decode(free.tokens[: index + 1], skip_special_tokens=True) for index in range(24)]
    stop = text[-1][4:7]
    end = next(index for index, so_far in enumerate(text) if stop in so_far) + 1
    rollout = free_answer(served, stop=("never this", stop))
    assert rollout.tokens == free.tokens[:end]
    assert rollout.logp == pytest.approx(free.logp[:end], abs=1e-5)
    assert (rollout.finish_reason, rollout.stop_reason) == ("stop", stop)
    assert not rollout.truncated


def test_a_stop_string_of_one_request_does_not_touch_another(served, tokenizer):
    free = free_answer(served)
    stop = tokenizer.decode(free.tokens, skip_special_tokens=True)[:2]
    how = Sampling(max_new_tokens=24, temperature=0, ignore_eos=True)
    with_stop = Sampling(max_new_tokens=24, temperature=0, ignore_eos=True, stop=(stop,))
    ended, other = served.generate([[1, 5, 6]] * 2, [with_stop, how])
    assert len(ended.tokens) < 24
    assert other.tokens == free.tokens


def test_a_stop_token_comes_before_a_stop_string_and_a_stop_string_before_the_limit(served, tokenizer):
    free = free_answer(served)
    end = next(
        i for i, token in enumerate(free.tokens) if tokenizer.decode([token], skip_special_tokens=True).isalpha()
    )
    word = tokenizer.decode([free.tokens[end]], skip_special_tokens=True)
    sampling = {"temperature": 0, "ignore_eos": True, "stop": (word,)}
    by_token, by_string = served.generate(
        [[1, 5, 6]] * 2,
        [
            Sampling(max_new_tokens=end + 1, stop_token_ids=(free.tokens[end],), **sampling),
            Sampling(max_new_tokens=end + 1, **sampling),
        ],
    )
    assert by_token.stop_reason == free.tokens[end]
    assert (by_string.finish_reason, by_string.stop_reason) == ("stop", word)


def test_bad_words_are_banned_bare_and_behind_a_space_and_only_where_they_would_end(tokenizer):
    sequences = encode_bad_words(["ab", "b", "xy"], tokenizer, vocab_size=40)
    words = [tokenizer.convert_ids_to_tokens(list(sequence)) for sequence in sequences]
    assert words == [["ab"], ["Ġab"], ["b"], ["Ġb"], ["x", "y"]]
    x, y = sequences[-1]
    assert set(banned_next(sequences, [7, x])) == {sequence[-1] for sequence in sequences}
    assert y not in banned_next(sequences, [x, 7])
    assert y not in banned_next(sequences, [])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_word_is_never_generated_and_logp_are_renormalised_without_it(served, tokenizer, temperature):
    settings = {"max_new_tokens": 24, "temperature": temperature, "ignore_eos": True, "n": 8, "seed": 0}
    free = served.generate([[1, 5, 6]], Sampling(**settings))
    words = tuple({word for rollout in free if (word := tokenizer.decode(rollout.tokens[:1])).isalpha()})
    banned = {sequence[0] for sequence in encode_bad_words(words, tokenizer, vocab_size=40)}
    rollouts = served.generate([[1, 5, 6]], Sampling(bad_words=words, **settings))
    assert not banned & {token for rollout in rollouts for token in rollout.tokens}
    with torch.no_grad():
        logits = served.model(input_ids=torch.tensor([[1, 5, 6]])).logits[0, -1]
    logits[list(banned)] = -torch.inf
    for rollout in rollouts:
        assert rollout.logp[0] == pytest.approx(logits.log_softmax(-1)[rollout.tokens[0]].item(), abs=1e-5)


def test_a_bad_word_without_tokens_is_refused(served):
    with pytest.raises(PromptError, match="bad_words holds ' '"):
        served.generate([[1]], Sampling(max_new_tokens=2, bad_words=(" ",)))


def test_a_request_that_is_refused_draws_nothing_from_the_generator(served):
    state = served._generator.get_state()
    sound, refused = Sampling(max_new_tokens=2), Sampling(max_new_tokens=2, bad_words=(" ",))
    with pytest.raises(PromptError, match="bad_words"):
        served.generate([[1], [1]], [sound, refused])
    with pytest.raises(PromptError, match="bad_words"):
        served.submit([1], refused, seed=0).result(60)
    assert served._generator.get_state().equal(state)


def test_a_prompt_that_ends_within_a_character_is_not_searched(tokenizer):
    *prompt, last = tokenizer.encode("ab é", add_special_tokens=False)
    assert StopStrings(("ab",), tokenizer, prompt).push(last) is None
    assert Detokenizer(tokenizer, prompt).push(last) == "é"


def test_of_two_stop_strings_in_one_token_the_first_to_end_wins(tokenizer):
    token = tokenizer.convert_tokens_to_ids("Ġab")
    assert StopStrings((" ab", "a"), tokenizer, [3]).push(token) == "a"


def test_special_tokens_are_neither_shown_nor_decoded_again(tokenizer, monkeypatch):
    stream, decoded = Detokenizer(tokenizer, [3]), []
    decode = type(tokenizer).decode
    monkeypatch.setattr(
        type(tokenizer),
        "decode",
        lambda self, tokens, **how: decoded.append(len(tokens)) or decode(self, tokens, **how),
    )
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert [stream.push(token) for token in [first, *[2] * 50, second]] == [""] * 51 + ["é"]
    assert max(decoded) == 3


def test_the_raw_logp_is_the_models_also_where_words_are_banned(served, tokenizer):
    raw = TransformersEngine(served.model, stop_token_ids=[], pad_token_id=0, tokenizer=tokenizer, logp_of="raw")
    sampling = Sampling(max_new_tokens=8, temperature=1.3, n=4, seed=0, bad_words=("a", "b", "ab"))
    for rollout in raw.generate([[1, 5, 6]], sampling):
        with torch.no_grad():
            logits = raw.model(input_ids=torch.tensor([[1, 5, 6, *rollout.tokens]])).logits[0, 2:-1]
        expected = logits.log_softmax(-1)[range(len(rollout.tokens)), list(rollout.tokens)]
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, rtol=0, atol=1e-5)
