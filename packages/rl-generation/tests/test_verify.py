import dataclasses
import math

import pytest
import torch

from rl_generation import LogpError, ModelError, Sampling, TransformersEngine, verify_logp

PROMPTS = [[1, 5, 6], [1, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 5, 6], [9]]
SAMPLINGS = [
    Sampling(max_new_tokens=12, temperature=0.0),
    Sampling(max_new_tokens=12, seed=0),
    Sampling(max_new_tokens=12, temperature=2.5, seed=0),
    Sampling(max_new_tokens=12, temperature=0.7, top_k=7, seed=0),
    Sampling(max_new_tokens=12, top_p=0.8, seed=0),
    Sampling(max_new_tokens=12, temperature=1.3, top_k=9, top_p=0.9, seed=0),
]


def engine(model, **options):
    return TransformersEngine(model, stop_token_ids=[2], pad_token_id=0, **options)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_logp_equals_a_plain_float32_forward(tiny, family, sampling):
    served = engine(tiny(family))
    rollouts = served.generate(PROMPTS, sampling)
    agreement = verify_logp(served, PROMPTS, rollouts, sampling=sampling)
    assert agreement.max_abs_difference <= 1e-5
    assert agreement.token_mult_prob_error <= 1.0001
    assert agreement.outside_support == 0
    assert agreement.tokens == sum(len(rollout.tokens) for rollout in rollouts)


def test_a_known_error_is_found_in_size_and_place(tiny):
    served, sampling = engine(tiny("llama")), SAMPLINGS[1]
    rollouts = served.generate(PROMPTS, sampling)
    logp = list(rollouts[2].logp)
    logp[1] += 0.5
    rollouts[2] = dataclasses.replace(rollouts[2], logp=tuple(logp))
    agreement = verify_logp(served, PROMPTS, rollouts, sampling=sampling, rows_per_forward=2)
    assert agreement.worst == (2, 1)
    assert agreement.max_abs_difference == pytest.approx(0.5, abs=1e-5)
    assert agreement.mean_abs_difference == pytest.approx(0.5 / agreement.tokens, abs=1e-5)
    assert agreement.token_mult_prob_error == pytest.approx(1 + (math.exp(0.5) - 1) / agreement.tokens, abs=1e-5)


def test_a_wrong_temperature_is_found(tiny):
    served = engine(tiny("llama"))
    rollouts = served.generate(PROMPTS, SAMPLINGS[1])
    assert verify_logp(served, PROMPTS, rollouts, sampling=SAMPLINGS[2]).max_abs_difference > 0.1


def test_tokens_outside_the_support_are_counted_and_not_averaged(tiny):
    served = engine(tiny("llama", initializer_range=0.02))
    rollouts = served.generate(PROMPTS, SAMPLINGS[1])
    narrow = Sampling(max_new_tokens=12, top_k=30)
    agreement = verify_logp(served, PROMPTS, rollouts, sampling=narrow)
    assert agreement.outside_support > 0
    assert agreement.outside_support + agreement.tokens == sum(len(rollout.tokens) for rollout in rollouts)
    assert math.isfinite(agreement.max_abs_difference)


def test_a_bfloat16_model_is_compared_with_float32_and_left_as_it_is(tiny):
    model = tiny("llama").bfloat16()
    served, sampling = engine(model), SAMPLINGS[1]
    agreement = verify_logp(served, PROMPTS, served.generate(PROMPTS, sampling), sampling=sampling)
    assert 1e-4 < agreement.max_abs_difference < 0.5
    assert model.dtype is torch.bfloat16


def test_another_models_rollouts_disagree(tiny):
    sampling = SAMPLINGS[1]
    rollouts = engine(tiny("llama", seed=1)).generate(PROMPTS, sampling)
    assert verify_logp(tiny("llama"), PROMPTS, rollouts, sampling=sampling).token_mult_prob_error > 1.05


def test_what_cannot_be_compared_is_refused(tiny):
    model = tiny("llama")
    served, sampling = engine(model), SAMPLINGS[1]
    rollouts = served.generate(PROMPTS, sampling)
    with pytest.raises(ValueError, match="got 4, 5"):
        verify_logp(served, PROMPTS[:4], rollouts, sampling=sampling)
    with pytest.raises(ValueError, match="at least one"):
        verify_logp(served, [], [], sampling=sampling)
    with pytest.raises(ValueError, match=r"rollout 0 has .*'sampled'; temperature=0.0 gives one each of 'raw'"):
        verify_logp(served, PROMPTS, rollouts, sampling=SAMPLINGS[0])
    served.commit_version(1)
    with pytest.raises(ModelError, match=r"rollout 0 was made by weights of version 0.* version 1"):
        verify_logp(served, PROMPTS, rollouts, sampling=sampling)
    with pytest.raises(ModelError, match="training mode"):
        verify_logp(model.train(), PROMPTS, rollouts, sampling=sampling)


def test_broken_weights_are_an_error_and_not_a_number(tiny):
    model, sampling = tiny("llama"), SAMPLINGS[1]
    rollouts = engine(model).generate(PROMPTS, sampling)
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(LogpError, match="rollout 0: the plain forward gives NaN at token 0"):
        verify_logp(model, PROMPTS, rollouts, sampling=sampling)
