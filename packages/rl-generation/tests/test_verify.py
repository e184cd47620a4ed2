import copy
import dataclasses
import math

import pytest
import torch

from rl_generation import verify
from rl_generation.errors import LogpError, ModelError
from rl_generation.requests import Sampling, make_requests
from rl_generation.rollout import VersionSpan
from rl_generation.transformers_engine import TransformersEngine
from rl_generation.verify import compare_logp, verify_logp

PROMPTS = [[1, 5, 6], [1, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 5, 6], [9]]
SAMPLINGS = [
    Sampling(max_new_tokens=12, temperature=0.0),
    Sampling(max_new_tokens=12, seed=0),
    Sampling(max_new_tokens=12, temperature=2.5, seed=0),
    Sampling(max_new_tokens=12, temperature=0.7, top_k=7, seed=0),
    Sampling(max_new_tokens=12, top_p=0.8, n=3, seed=0),
    Sampling(max_new_tokens=12, temperature=1.3, top_k=9, top_p=0.9, min_p=0.02, seed=0),
]


def engine(model, **options):
    return TransformersEngine(model, stop_token_ids=[2], pad_token_id=0, **options)


def answers(served, sampling, prompts=PROMPTS):
    """What was asked for, and what came of it."""
    return make_requests(prompts, sampling, served.limits), served.generate(prompts, sampling)


@pytest.mark.parametrize("logp_of", ["sampled", "raw"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3"])
def test_logp_equals_a_plain_float32_forward(tiny, family, sampling, logp_of):
    served = engine(tiny(family), logp_of=logp_of)
    agreement = verify_logp(served, served.model, prompts=PROMPTS, sampling=sampling)
    assert agreement.max_abs_difference <= 1e-5
    assert agreement.token_mult_prob_error <= 1.0001
    assert agreement.outside_support == 0
    assert agreement.tokens >= len(PROMPTS) * sampling.n


def test_each_prompt_may_be_sampled_in_its_own_way(tiny):
    served = engine(tiny("llama"))
    agreement = verify_logp(served, served.model, prompts=PROMPTS, sampling=SAMPLINGS[: len(PROMPTS)])
    assert agreement.max_abs_difference <= 1e-5


def test_an_engine_and_a_model_are_enough(tiny):
    served = engine(tiny("llama"))
    agreement = verify_logp(served, served.model)
    assert agreement.tokens > 16
    assert agreement.max_abs_difference <= 1e-5


def test_the_default_prompts_leave_room_for_the_answers_asked_for(tiny):
    served = engine(tiny("llama"))
    sampling = Sampling(max_new_tokens=60, ignore_eos=True, seed=0)
    agreement = verify_logp(served, served.model, sampling=sampling)
    assert agreement.tokens == 60 * len(agreement.coverage.spans)
    assert max(end for _, end in agreement.coverage.spans) == 64


LONG = {"max_position_embeddings": 400}
ROPE = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 100}


def test_the_default_reaches_every_place_that_the_configuration_names(tiny):
    served = engine(tiny("mistral", **{**LONG, "sliding_window": 64}))
    agreement = verify_logp(served, served.model)
    assert agreement.max_abs_difference <= 1e-5
    assert agreement.coverage.explain() == (
        "covered: positions 0-400 of 400; sliding window 64 passed twice; a prompt of 259 tokens asked again; "
        f"requests alone and among {agreement.coverage.crowd}"
    )
    assert agreement.coverage.explain() in agreement.explain()
    short = verify_logp(served, served.model, max_positions=60)
    assert "positions 0-60 of 400; sliding window 64 never passed" in short.explain()


def test_responses_begin_and_end_on_both_sides_of_a_place(tiny):
    served = engine(tiny("mistral", **{**LONG, "sliding_window": 64}))
    spans = verify_logp(served, served.model).coverage.spans
    for place in (16, 64, 128):
        assert any(start < place < end for start, end in spans)
        assert any(place < start <= place + 1 for start, _ in spans)
    assert any(end - start == 160 for start, end in spans)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        pytest.param({"sliding_window": 64}, {"sliding_window": None}, id="without its window", marks=pytest.mark.slow),
        pytest.param({"sliding_window": 64}, {"sliding_window": 65}, id="with a window of one more"),
        pytest.param({"rope_scaling": ROPE, "head_dim": 8}, {}, id="without its rope scaling"),
    ],
)
def test_an_engine_that_is_wrong_from_some_length_on_fails_by_default(tiny, right, wrong):
    policy = tiny("mistral", **{**LONG, "sliding_window": None, **right})
    served = engine(tiny("mistral", **{**LONG, "sliding_window": None, **wrong}))
    served.model.load_state_dict(policy.state_dict())
    agreement = verify_logp(served, policy)
    assert agreement.max_abs_difference > 1e-3
    assert verify_logp(engine(copy.deepcopy(policy)), policy).max_abs_difference <= 1e-4


class Delegate:
    """An engine that does everything through `inner`."""

    version = property(lambda self: self.inner.version)
    logp_of = property(lambda self: self.inner.logp_of)
    limits = property(lambda self: self.inner.limits)

    def submit(self, prompt, sampling, *, seed):
        return self.inner.submit(prompt, sampling, seed=seed)

    def explain(self):
        return self.inner.explain()

    def metrics(self):
        return self.inner.metrics()

    def close(self):
        self.inner.close()


def test_an_engine_that_keeps_a_prefix_of_old_weights_fails_by_default(tiny):
    """As one with a prefix cache that a refit did not reset."""
    policy = tiny("llama", **LONG)

    class Stale(Delegate):
        """Answers what it was asked before with the logp of the weights of that time."""

        def __init__(self, inner):
            self.inner, self.seen = inner, {}

        def generate(self, prompts, sampling):
            rollouts = self.inner.generate(prompts, sampling)
            for place, rollout in enumerate(rollouts):
                key = (tuple(prompts[rollout.prompt_index])[:128], rollout.tokens[:1])
                first = self.seen.setdefault(key, rollout.logp[0])
                if len(prompts[rollout.prompt_index]) > 128:
                    rollouts[place] = dataclasses.replace(rollout, logp=(first, *rollout.logp[1:]))
            return rollouts

    stale = Stale(engine(copy.deepcopy(policy)))
    assert verify_logp(stale, policy).max_abs_difference <= 1e-4
    with torch.no_grad():
        for model in (policy, stale.inner.model):
            model.model.norm.weight.mul_(1.02)
    assert verify_logp(stale, policy).max_abs_difference > 1e-3


def test_a_sampling_for_each_prompt_goes_with_prompts(tiny):
    served = engine(tiny("llama"))
    with pytest.raises(ValueError, match="goes with prompts"):
        verify_logp(served, served.model, sampling=SAMPLINGS)


def test_a_known_error_is_found_in_size_and_place(tiny, monkeypatch):
    served = engine(tiny("llama"))
    requests, rollouts = answers(served, SAMPLINGS[1])
    logp = list(rollouts[2].logp)
    logp[1] += 0.5
    rollouts[2] = dataclasses.replace(rollouts[2], logp=tuple(logp))
    monkeypatch.setattr(verify, "ROWS_PER_FORWARD", 2)
    agreement = compare_logp(served.model, requests, rollouts)
    (worst,) = agreement.worst(1)
    assert (worst.prompt_index, worst.step, worst.token) == (2, 1, rollouts[2].tokens[1])
    assert agreement.max_abs_difference == pytest.approx(0.5, abs=1e-5)
    assert agreement.mean_abs_difference == pytest.approx(0.5 / agreement.tokens, abs=1e-5)
    assert agreement.token_mult_prob_error == pytest.approx(1 + (math.exp(0.5) - 1) / agreement.tokens, abs=1e-5)


def test_a_wrong_temperature_is_found(tiny):
    served = engine(tiny("llama"))
    _, rollouts = answers(served, SAMPLINGS[1])
    others = make_requests(PROMPTS, SAMPLINGS[2], served.limits)
    assert compare_logp(served.model, others, rollouts).max_abs_difference > 0.1


def test_tokens_outside_the_support_are_counted_and_not_averaged(tiny):
    served = engine(tiny("llama", initializer_range=0.02))
    _, rollouts = answers(served, SAMPLINGS[1])
    narrow = make_requests(PROMPTS, Sampling(max_new_tokens=12, top_k=30), served.limits)
    agreement = compare_logp(served.model, narrow, rollouts)
    assert agreement.outside_support > 0
    assert agreement.outside_support + agreement.tokens == sum(len(rollout.tokens) for rollout in rollouts)
    assert math.isfinite(agreement.max_abs_difference)


def test_a_bfloat16_model_is_compared_with_float32_and_left_as_it_is(tiny):
    served = engine(tiny("llama").bfloat16())
    agreement = verify_logp(served, served.model, prompts=PROMPTS, sampling=SAMPLINGS[1])
    assert 1e-4 < agreement.max_abs_difference < 0.5
    assert served.model.dtype is torch.bfloat16


def test_another_models_rollouts_disagree(tiny):
    agreement = verify_logp(engine(tiny("llama", seed=1)), tiny("llama"), prompts=PROMPTS, sampling=SAMPLINGS[1])
    assert agreement.token_mult_prob_error > 1.05


def test_what_cannot_be_compared_is_refused(tiny):
    served = engine(tiny("llama"))
    requests, rollouts = answers(served, SAMPLINGS[1])
    with pytest.raises(ValueError, match=r"rollout 0 of prompt 4 answers none of the requests given; .*\[0, 1, 2, 3\]"):
        compare_logp(served.model, requests[:4], rollouts)
    with pytest.raises(ValueError, match="nothing to compare: 0 rollouts"):
        compare_logp(served.model, [], [])
    with pytest.raises(ModelError, match="got 'a folder'"):
        compare_logp("a folder", requests, rollouts)
    length = len(rollouts[0].tokens)
    spans = (VersionSpan(version=0, start=0, end=1), VersionSpan(version=1, start=1, end=length))
    with pytest.raises(ValueError, match=r"versions \[0, 1\]"):
        compare_logp(served.model, requests, [dataclasses.replace(rollouts[0], versions=spans)])
    words = make_requests(PROMPTS, SAMPLINGS[1], served.limits)
    words[0] = dataclasses.replace(words[0], sampling=Sampling(max_new_tokens=1, bad_words=("no",)))
    with pytest.raises(ValueError, match=r"bad_words=\('no',\)"):
        compare_logp(served.model, words, rollouts)
    with pytest.raises(ModelError, match="training mode"):
        compare_logp(served.model.train(), requests, rollouts)


def test_broken_weights_are_an_error_and_not_a_number(tiny):
    served = engine(tiny("llama"))
    requests, rollouts = answers(served, SAMPLINGS[1])
    with torch.no_grad():
        served.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(LogpError, match="the plain forward gives NaN at token 0 of sample 0 of prompt 0"):
        compare_logp(served.model, requests, rollouts)
