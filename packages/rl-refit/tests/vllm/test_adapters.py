"""Real vLLM: an adapter alone, refitted into LoRA slots, answers as the merged model does."""

import json
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
import torch
from safetensors.torch import save_file

from rl_refit import Refit, StateDictSource
from rl_refit.errors import RefitError
from rl_refit.vllm import VllmAdapterSink

RANK, SCALING = 4, 2.0
TARGETS = ("q_proj", "v_proj", "down_proj")
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


def adapted(seed):
    """A and B of every target by peft's names, and the model of seed 0 with them merged."""
    generator, merged, tensors = torch.Generator().manual_seed(seed), tiny.policy("qwen3", 0), {}
    for name, module in merged.named_modules():
        if name.endswith(TARGETS):
            down = torch.randn(RANK, module.in_features, generator=generator) * 0.2
            up = torch.randn(module.out_features, RANK, generator=generator) * 0.2
            tensors |= {f"base_model.model.{name}.lora_{part}.weight": t for part, t in (("A", down), ("B", up))}
            module.weight += SCALING * up @ down
    return tensors, merged


@pytest.fixture
def like(tmp_path):
    """A folder of peft's with another adapter of the same shapes."""
    save_file(adapted(99)[0], tmp_path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALING * RANK,
        "target_modules": [*TARGETS],
        "bias": "none",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return tmp_path


def largest_error(answers, model):
    """Between the engine's logp of each token and the model's own, over all prompts."""
    errors = []
    for prompt, (tokens, logp) in zip(tiny.PROMPTS, answers, strict=True):
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        errors.append((own - torch.tensor(logp)).abs().max().item())
    return max(errors)


def generate(llm, adapter):
    from vllm import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=ids) for ids in tiny.PROMPTS]
    return [tiny.read(each) for each in llm.generate(prompts, tiny.sampling(), use_tqdm=False, lora_request=adapter)]


def test_an_adapter_alone_answers_as_the_merged_model_does(checkpoints, like):
    with tiny.engine(checkpoints("qwen3", 0), **LORA) as llm:
        with pytest.raises(RefitError, match="holds no adapter"):
            VllmAdapterSink(llm, like=like / "nowhere")
        sink = VllmAdapterSink(llm, like=like)
        for version in (1, 2, 3):
            tensors, merged = adapted(version)
            report = Refit(StateDictSource(tensors), sink)(version=version)
            answers = generate(llm, sink.current)
            assert largest_error(answers, merged) <= 1e-5
            assert largest_error(answers, tiny.policy("qwen3", 0)) > 1e-2
        assert report.bytes == sum(tensor.nbytes for tensor in tensors.values())
        assert llm.llm_engine.list_loras() == {2, 3}
        wrong = {name: torch.zeros(2, *tensor.shape[1:]) for name, tensor in tensors.items()}
        with pytest.raises(RefitError):
            Refit(StateDictSource(wrong), sink)(version=4)
        assert generate(llm, sink.current) == answers
        sink.close()
        assert llm.llm_engine.list_loras() == set()


@pytest.mark.slow  # an engine of its own
def test_requests_of_an_async_engine_keep_the_adapter_that_they_began_with(checkpoints, like):
    from vllm import AsyncEngineArgs, TokensPrompt
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = tiny.Loop()

    async def start():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**tiny.options(checkpoints("qwen3", 0), **LORA)))

    engine = loop.run(start())
    first_token = loop.loop.create_future()

    async def answer(number, adapter, **others):
        prompt = TokensPrompt(prompt_token_ids=tiny.PROMPTS[0])
        outputs = engine.generate(prompt, tiny.sampling(**others), str(number), lora_request=adapter)
        async for output in outputs:
            if not first_token.done():
                first_token.set_result(None)
            last = output
        return tiny.read(last)

    async def begin(adapter):
        task = loop.loop.create_task(answer(1, adapter, max_tokens=300))
        await first_token
        return task

    async def result(task):
        return await task

    try:
        sink = VllmAdapterSink(engine, like=like, loop=loop.loop)
        (old, old_model), (new, new_model) = adapted(1), adapted(2)
        Refit(StateDictSource(old), sink)(version=1)
        under_way = loop.run(begin(sink.current))
        Refit(StateDictSource(new), sink)(version=2)
        assert not under_way.done()
        after = loop.run(answer(2, sink.current))
        before = loop.run(result(under_way))
        sink.close()
    finally:
        engine.shutdown()
        loop.close()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiny, "PROMPTS", tiny.PROMPTS[:1])
        assert largest_error([before], old_model) <= 2e-5
        assert largest_error([after], new_model) <= 1e-5
