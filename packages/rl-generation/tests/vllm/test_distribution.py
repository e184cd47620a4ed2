"""Every token's logp is that of a plain forward in fp32, whatever the request asks for: five families, two engines.

Under "raw" that is the softmax of the model whatever was cut, and under "sampled" the distribution drawn from.

The embedded engine and vLLM serve the same checkpoint.
"""

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

import families

from rl_generation import Sampling, TransformersEngine
from rl_generation.verify import verify_logp
from rl_generation.vllm import VllmEngine, VllmOptions

TOLERANCE = 1e-4
ENGINES = ["embedded", "vllm"]
LETTERS = tuple("aeiot ")  # each is in one token of ten or so
ASKED = {
    "the model's own distribution": Sampling(max_new_tokens=24, n=2, seed=1),
    "tempered": Sampling(max_new_tokens=24, n=2, seed=2, temperature=0.7),
    "tempered and cut to a nucleus, with stop strings": Sampling(
        max_new_tokens=24, n=8, seed=3, temperature=0.7, top_p=0.9, stop=LETTERS
    ),
    "cut to the likeliest": Sampling(max_new_tokens=24, n=2, seed=4, temperature=1.3, top_k=7, ignore_eos=True),
    "cut by min-p": Sampling(max_new_tokens=24, n=2, seed=5, min_p=0.05),
    "cut by all three": Sampling(max_new_tokens=24, n=2, seed=6, top_k=50, top_p=0.8, min_p=0.01),
    "greedy": Sampling(max_new_tokens=24, temperature=0.0),
}
PROMPTS = families.prompts(len(ASKED))


def options(path):
    return VllmOptions(
        model=path,
        dtype="float32",
        enforce_eager=True,
        max_model_len=families.MAX_LENGTH,
        max_num_seqs=64,
        kv_cache_memory_bytes=32 << 20,
    )


SERVED = [*((family, "sampled") for family in families.FAMILIES), ("llama", "raw"), ("gemma3", "raw")]
QUICK = [("qwen3", "sampled"), ("gemma3", "raw")]
SERVED_OR_SLOW = [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in SERVED]


@pytest.fixture(scope="module", params=SERVED_OR_SLOW, ids="-".join)
def served(request, tmp_path_factory):
    """A policy and the engines of it, by name."""
    family, logp_of = request.param
    policy = families.policy(family)
    embedded = TransformersEngine(
        policy, stop_token_ids=[families.EOS], pad_token_id=0, tokenizer=families.tokenizer(), logp_of=logp_of
    )
    path = families.save(policy, tmp_path_factory.mktemp(family))
    with VllmEngine(options(path), logp_of=logp_of) as vllm:
        yield policy, {"embedded": embedded, "vllm": vllm}


@pytest.mark.parametrize("name", ENGINES)
def test_logp_is_that_of_a_plain_forward_with_every_way_to_sample_in_one_batch(served, name):
    policy, engines = served
    agreement = verify_logp(engines[name], policy, prompts=PROMPTS, sampling=list(ASKED.values()))
    assert len({each.prompt_index for each in agreement.differences}) == len(ASKED)
    assert agreement.outside_support == 0, agreement.explain()
    assert agreement.max_abs_difference <= TOLERANCE, agreement.explain()


def test_both_engines_give_the_same_greedy_tokens(served):
    _, engines = served
    prompts = families.prompts(8, seed=1)
    sampling = Sampling(max_new_tokens=32, temperature=0.0, stop=("a", "e"))
    ours, theirs = (engines[name].generate(prompts, sampling) for name in ENGINES)
    assert [each.tokens for each in ours] == [each.tokens for each in theirs]
    assert [(each.finish_reason, each.stop_reason) for each in ours] == [
        (each.finish_reason, each.stop_reason) for each in theirs
    ]
    assert len({each.tokens for each in ours}) == len(prompts)  # the answers do depend on their prompts
    for one, other in zip(ours, theirs, strict=True):
        assert one.logp == pytest.approx(other.logp, abs=TOLERANCE)
