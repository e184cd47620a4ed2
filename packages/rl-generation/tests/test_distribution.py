import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_generation import Sampling
from rl_generation.distribution import SamplingTensors, choose, draw, exact_dtype, raw_logp, sampled_logits, take_best

# Of chi-square with 9 degrees of freedom: one fair sample in 10,000 lies above.
CHI_SQUARE_9 = 33.72


def uniforms(count, dtype=torch.float64, seed=0):
    return torch.rand(count, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def tensors(*samplings, vocab_size=23):
    return SamplingTensors.of(samplings, vocab_size=vocab_size, device=torch.device("cpu"))


def cut(logits, **settings):
    sampling = Sampling(max_new_tokens=1, **settings)
    return sampled_logits(logits, tensors(*[sampling] * len(logits), vocab_size=logits.shape[1]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_20000_draws_follow_the_softmax(dtype):
    logits = torch.linspace(-2, 2, 10)
    tokens, _ = draw(logits.expand(20_000, -1), uniforms(20_000, dtype))
    expected = 20_000 * logits.double().softmax(0)
    observed = tokens.bincount(minlength=10)
    assert ((observed - expected) ** 2 / expected).sum() < CHI_SQUARE_9


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.floats(0.05, 20), st.integers(0, 30), st.floats(0.01, 1.0), st.floats(0, 1.0))
def test_logp_is_that_of_the_distribution_drawn_from(seed, temperature, top_k, top_p, min_p):
    logits = 4 * torch.randn(5, 23, generator=torch.Generator().manual_seed(seed))
    sampling = Sampling(max_new_tokens=1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = tensors(*[sampling] * 5)
    tokens, logp = choose(logits, uniforms(5, seed=seed), sampling)
    reference = sampled_logits(logits, sampling).double().log_softmax(-1)
    assert logp.isfinite().all()
    torch.testing.assert_close(logp, reference.gather(1, tokens[:, None])[:, 0], rtol=1e-6, atol=1e-6)


def test_temperature_divides_the_logits():
    logits = torch.tensor([[1.0, 3.0, -2.0]])
    assert cut(logits, temperature=0.5).tolist() == [[2.0, 6.0, -4.0]]


def test_top_k_keeps_the_likeliest_and_ties_with_the_last_of_them():
    logits = torch.tensor([[1.0, 5.0, 3.0, 4.0], [1.0, 5.0, 4.0, 4.0]])
    kept = cut(logits, top_k=2).isfinite()
    assert kept.tolist() == [[False, True, False, True], [False, True, True, True]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.1, 1), (0.39, 1), (0.41, 2), (0.71, 3), (0.91, 4), (1.0, 4)])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    logits = torch.tensor([[0.3, 0.1, 0.4, 0.2]]).log()
    support = cut(logits, top_p=top_p).isfinite()
    assert support[0, [2, 0, 3, 1]].tolist() == [True] * kept + [False] * (4 - kept)


def test_top_p_applies_to_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # Renormalised to 4/7 and 3/7, the first alone passes 0.5; of the whole it has 0.4 only.
    support = cut(logits, top_k=2, top_p=0.5).isfinite()
    assert support.tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_outside_the_support_is_drawn_even_by_the_extreme_uniforms(dtype):
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf]).expand(2, -1)
    largest = 1 - torch.finfo(dtype).eps / 2
    tokens, logp = draw(logits, torch.tensor([0.0, largest], dtype=dtype))
    assert tokens.tolist() == [1, 3]
    torch.testing.assert_close(logp.float(), torch.tensor([0.0, 1.0]).log_softmax(0))


@pytest.mark.parametrize("broken", [[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
def test_broken_logits_give_a_nan_logp_and_never_an_index_outside_the_vocabulary(broken):
    tokens, logp = draw(torch.tensor([broken]), uniforms(1))
    assert 0 <= tokens.item() < 2
    assert logp.isnan().all()


def test_greedy_takes_the_best_and_reports_the_raw_log_softmax():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    tokens, logp = take_best(logits)
    assert tokens.equal(logits.argmax(-1))
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1))


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert cut(logits, min_p=0.29).isfinite().tolist() == [[True, True, True, False]]
    assert cut(logits, min_p=0.31).isfinite().tolist() == [[True, True, False, False]]


def test_min_p_is_relative_at_the_temperature():
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    # At temperature 0.5 probabilities are squared: 1, 1/4 and 1/36 beside the likeliest; at 1 they are 1, 1/2, 1/6.
    assert cut(logits, temperature=0.5, min_p=0.3).isfinite().tolist() == [[True, False, False]]
    assert cut(logits, temperature=2.0, min_p=0.6).isfinite().tolist() == [[True, True, False]]


def test_min_p_keeps_the_likeliest_and_those_tied_with_it():
    assert cut(torch.tensor([[1.0, 2.0, 2.0]]), min_p=1.0).isfinite().tolist() == [[False, True, True]]


def test_top_p_applies_to_what_min_p_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    # min-p leaves 4/7 and 3/7, of which the first alone passes 0.5; of the whole it has 0.4 only.
    assert cut(logits, min_p=0.7, top_p=0.5).isfinite().tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("settings", [{"top_k": 2}, {"top_p": 0.5}])
def test_rows_without_a_cut_keep_their_logits_beside_rows_with_one(settings):
    logits = torch.tensor([0.1, 0.4, 0.3, 0.2]).log().expand(3, -1)
    one, off = Sampling(max_new_tokens=1, **settings), Sampling(max_new_tokens=1)
    mixed = sampled_logits(logits, tensors(off, one, off, vocab_size=4))
    assert mixed.isfinite().tolist() == [[True] * 4, [False, True, True, False], [True] * 4]
    assert torch.equal(mixed[[0, 2]], logits[[0, 2]])
    # Of the table above, rows that do not cut.
    table = tensors(off, one, vocab_size=4)
    rest = {name: None if (value := getattr(table, name)) is None else value[:1] for name in ("top_k", "top_p")}
    uncut = dataclasses.replace(table, **rest)
    assert torch.equal(sampled_logits(logits[:1], uncut), logits[:1])


def test_raw_logp_is_the_log_softmax():
    logits = torch.randn(6, 11, generator=torch.Generator().manual_seed(0))
    tokens = torch.arange(6)
    torch.testing.assert_close(raw_logp(logits, tokens), logits.log_softmax(-1)[tokens, tokens])


SETTINGS = st.builds(
    Sampling,
    max_new_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5, 30]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.lists(SETTINGS, min_size=1, max_size=6))
def test_a_row_draws_the_same_alone_as_among_rows_of_other_settings(seed, samplings):
    count = len(samplings)
    logits = 3 * torch.randn(count, 23, generator=torch.Generator().manual_seed(seed))
    chances = uniforms(count, seed=seed)
    tokens, logp = choose(logits, chances, tensors(*samplings))
    for row, sampling in enumerate(samplings):
        alone = choose(logits[row : row + 1], chances[row : row + 1], tensors(sampling))
        assert tokens[row] == alone[0]
        torch.testing.assert_close(logp[row].double(), alone[1][0].double(), rtol=1e-6, atol=1e-6)


def test_a_device_without_float64_gets_float32():
    assert exact_dtype(torch.device("mps")) is torch.float32
    assert exact_dtype(torch.device("cpu")) is torch.float64


def test_shapes_are_checked():
    with pytest.raises(Exception, match=r"(?i)type"):
        take_best(torch.zeros(3))
