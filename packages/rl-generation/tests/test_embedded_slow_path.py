import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from stepwise import Steps

from rl_generation import ModelError, Sampling, TransformersEngine

PROMPTS = [[1, 5, 6], [1, 7], [3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 5, 6], [9], [1, 22, 30, 4], [1, 5, 6], [8, 8]]
SAMPLINGS = [
    Sampling(max_new_tokens=12, temperature=0.0),
    Sampling(max_new_tokens=12, temperature=0.7, top_k=20, seed=3, n=2),
]
# transformers says that kernels for mamba are missing, once, in a log.
FAMILIES = ["lfm2", "mamba", "bloom"]


def engine(model, **options):
    return TransformersEngine(model, **({"stop_token_ids": [2, 11, 12], "pad_token_id": 0} | options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_cannot_be_batched_continuously_says_so_once_and_can_be_refused(tiny, family):
    model = tiny(family)
    with pytest.warns(UserWarning, match=r"takes model\.generate instead of continuous batching"):
        served = engine(model)
    assert "batching: whole batches of prompts of one length, by model.generate, since" in served.explain()
    with pytest.raises(ModelError, match="continuous_batching='required', but"):
        engine(model, continuous_batching="required")


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_logp_are_those_of_a_plain_forward(tiny, family, sampling):
    model = tiny(family)
    served = engine(model, continuous_batching="off", max_batch_size=3)
    for rollout in served.generate(PROMPTS, sampling):
        prompt = PROMPTS[rollout.prompt_index]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *rollout.tokens]]), use_cache=False).logits
        logits = logits[0, len(prompt) - 1 : -1]
        if not sampling.greedy:
            logits = logits / sampling.temperature
            logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[:, -1:], -torch.inf)
        expected = logits.log_softmax(-1)[torch.arange(len(rollout.tokens)), list(rollout.tokens)]
        torch.testing.assert_close(torch.tensor(rollout.logp), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_its_answers_are_those_of_continuous_batching(tiny, sampling):
    model = tiny("llama")
    slow = engine(model, continuous_batching="off").generate(PROMPTS, sampling)
    fast = engine(model, continuous_batching="required").generate(PROMPTS, sampling)
    for one, other in zip(slow, fast, strict=True):
        assert (one.tokens, one.finish_reason, one.stop_reason) == (
            other.tokens,
            other.finish_reason,
            other.stop_reason,
        )
        assert one.logp == pytest.approx(other.logp, abs=1e-5)


def test_what_the_models_generation_config_asks_for_is_not_done_and_stays(tiny):
    model = tiny("llama")
    expected = engine(model, continuous_batching="off").generate(PROMPTS, SAMPLINGS[0])
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.min_new_tokens = 5
    answers = engine(model, continuous_batching="off").generate(PROMPTS, SAMPLINGS[0])
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert model.generation_config.repetition_penalty == 3.0


def test_it_steps_by_whole_batches_and_aborts_what_has_not_begun(tiny):
    served = Steps(engine(tiny("lfm2"), continuous_batching="off", version=2))
    served.add_request("a", [1, 5, 6], Sampling(max_new_tokens=6, n=2, seed=0))
    served.add_request("b", [1, 7], Sampling(max_new_tokens=6, seed=0))
    first = served.step()
    assert {(request_id, delta.sample_index) for request_id, delta in first} == {("a", 0), ("a", 1)}
    assert all(delta.tokens == delta.rollout.tokens for _, delta in first)
    served.commit_version(3)
    served.abort_request("b")
    ((request_id, delta),) = served.step()
    assert (request_id, delta.rollout.finish_reason, delta.rollout.version) == ("b", "abort", 3)
    assert {delta.rollout.version for _, delta in first} == {2}
    assert not served.has_unfinished_requests()
    assert served.metrics().finished["abort"] == 1
