"""Real vLLM: what is refused before anything starts, and what options do, with one engine after another in process."""

import gc
import json
import math
import os
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import safetensors.torch
import tiny
import torch

from rl_generation.errors import EngineOptionError, ModelError, PromptError
from rl_generation.sampling import Sampling
from rl_generation.vllm import VllmEngine, VllmOptions
from rl_generation.vllm.lora import LoraAdapter
from rl_generation.vllm.runtime import environment

GREEDY = Sampling(max_new_tokens=16, temperature=0.0, ignore_eos=True)
TOLERANCE = 1e-4
CYCLES = 5


@pytest.fixture
def path(checkpoints):
    return checkpoints("llama")


def refused(match, options, **others):
    children = set(Path("/proc/self/task").glob("*/children"))
    with pytest.raises(EngineOptionError, match=match):
        VllmEngine(options, **others)
    assert not torch.distributed.is_initialized()
    assert set(Path("/proc/self/task").glob("*/children")) <= children


# -- Refused before anything starts ----------------------------------------------------------------------------------


def test_a_key_that_vllm_does_not_know_is_refused_with_the_nearest_one(path):
    refused(
        r"unexpected keyword argument 'max_num_batched_token'; did you mean 'max_num_batched_tokens'\?",
        tiny.options(path, vllm_kwargs={"max_num_batched_token": 64}),
    )


def test_a_value_that_vllm_does_not_know_is_refused_in_its_words(path):
    refused(r"(?s)vLLM refuses these options: .*float99", tiny.options(path, dtype="float99"))


def test_models_and_tokenizers_that_are_not_there_are_refused(path, tmp_path):
    refused(r"model='.*nowhere' is no folder", tiny.options(str(tmp_path / "nowhere")))
    refused(r"is a folder without config\.json", tiny.options(str(tmp_path)))
    refused(r"model='tiny/absent' is no folder here, and the hub does not give it", tiny.options("tiny/absent"))
    refused(r"is a folder that holds no tokenizer", tiny.options(path, tokenizer=str(tmp_path)))
    refused(r"tokenizer='.*gone' is no folder", tiny.options(path, tokenizer=str(tmp_path / "gone")))


def test_data_parallel_replicas_ask_for_the_asynchronous_engine(path):
    refused(r"for data_parallel_size=2 use VllmAsyncEngine", tiny.options(path, data_parallel_size=2))


def test_workers_that_vllm_could_not_bind_are_refused_with_what_to_set(path, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND")
    refused(
        r"64 workers .* need as many NUMA nodes .* VLLM_CPU_OMP_THREADS_BIND=nobind",
        tiny.options(path, tensor_parallel_size=64),
    )


@pytest.mark.parametrize(("value", "message"), [("0", "does not have any more; unset"), ("yes", "must be 0 or 1")])
def test_a_runtime_that_vllm_does_not_have_is_refused(path, monkeypatch, value, message):
    monkeypatch.setenv("NRL_VLLM_USE_V1", value)
    refused(f"NRL_VLLM_USE_V1.*{message}", tiny.options(path))


def test_stop_tokens_outside_the_vocabulary_are_refused_and_the_engine_ends(path):
    with pytest.raises(PromptError, match=r"the engine's stop_token_ids must hold ids in \[0, 260\)"):
        VllmEngine(tiny.options(path), stop_token_ids=[260])
    assert not torch.distributed.is_initialized()


def test_a_trainers_process_group_is_not_taken_over(path, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(
            EngineOptionError, match=r"backend 'gloo', world size 1\).* make the engine with own_process=True"
        ):
            VllmEngine(tiny.options(path))
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


# -- What options do -------------------------------------------------------------------------------------------------


def test_without_a_tokenizer_token_ids_serve_and_strings_are_refused_and_raw_logp_is_of_the_logits(checkpoints):
    prompts = tiny.prompts(4)
    sampling = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.9, seed=3, ignore_eos=True)
    with VllmEngine(tiny.options(checkpoints("llama", tokenizer=False)), logp_of="raw") as engine:
        assert engine.stop_token_ids == (tiny.EOS,)
        answers = engine.generate(prompts, sampling)
        for name in ("stop", "bad_words"):
            with pytest.raises(PromptError, match=rf"prompt 0 asks for {name}=\('x',\), which are text"):
                engine.generate([[5]], Sampling(max_new_tokens=1, **{name: ("x",)}))
        assert "no stop strings" in engine.explain()
    model = tiny.policy("llama", 0)
    for prompt, rollout in zip(prompts, answers, strict=True):
        expected = tiny.logits(model, prompt, rollout.tokens).log_softmax(-1)
        assert rollout.logp == pytest.approx(tiny.chosen(expected, rollout.tokens), abs=TOLERANCE)
        assert rollout.logp_of == "raw"


def test_dummy_weights_are_not_sampled_from_until_a_version_is_committed(path):
    with VllmEngine(tiny.options(path, for_training=True), version=4) as engine:
        assert engine.version == 4
        assert "none: no refit has been committed" in engine.explain()
        with pytest.raises(ModelError, match=r"made with for_training=True.* no refit has been committed"):
            engine.generate([[5]], GREEDY)
        with pytest.raises(ModelError, match="no refit has been committed"):
            engine.add_request("a", [5], GREEDY)
        engine.commit_version(4)
        assert engine.generate([[5]], GREEDY)[0].version == 4


def test_an_adapter_changes_the_answers_of_the_calls_that_name_it(path, tmp_path):
    adapter, merged = lora(tmp_path), tiny.policy("llama", 0)
    down, up = lora_weights()
    for layer in merged.model.layers:
        layer.self_attn.q_proj.weight += 2.0 * up @ down
    prompts = tiny.prompts(3)
    with VllmEngine(tiny.options(path, enable_lora=True, max_lora_rank=8)) as engine:
        engine.add_lora(adapter)
        plain, changed = engine.generate(prompts, GREEDY), engine.generate(prompts, GREEDY, lora=adapter)
        engine.remove_lora(adapter)
    for model, answers in ((tiny.policy("llama", 0), plain), (merged, changed)):
        for prompt, rollout in zip(prompts, answers, strict=True):
            expected = tiny.logits(model, prompt, rollout.tokens).log_softmax(-1)
            assert rollout.logp == pytest.approx(tiny.chosen(expected, rollout.tokens), abs=TOLERANCE)
    assert [each.tokens for each in plain] != [each.tokens for each in changed]


def lora_weights():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 64, generator=generator) * 0.3, torch.randn(64, 8, generator=generator) * 0.3


def lora(folder):
    """Rank 8, scaled by 2, of every query projection, as peft saves it."""
    down, up = lora_weights()
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(layer, part): t.clone() for layer in (0, 1) for part, t in (("A", down), ("B", up))}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoraAdapter(name="queries", number=1, path=str(folder))


# -- Nothing is left -------------------------------------------------------------------------------------------------


def left():
    """Open files, threads, child processes and shared memory of this process."""
    gc.collect()
    children = [each for task in Path("/proc/self/task").iterdir() for each in (task / "children").read_text().split()]
    files = [each.name for each in Path("/proc/self/fd").iterdir()]
    return len(files), threading.active_count(), sorted(children), tiny.orphaned_shared_memory()


def test_five_engines_one_after_another_leave_nothing(path):
    seen = []
    for cycle in range(CYCLES):
        with VllmEngine(tiny.options(path), version=cycle) as engine:
            (rollout,) = engine.generate([[5, 6]], GREEDY)
        assert rollout.version == cycle
        assert not torch.distributed.is_initialized()
        seen.append(left())
    assert seen[1:] == seen[:1] * (CYCLES - 1)
    assert math.isfinite(sum(rollout.logp))


def test_variables_are_set_while_an_engine_is_made_and_put_back(monkeypatch):
    monkeypatch.setenv("KEPT", "1")
    before = dict(os.environ)
    with environment({"KEPT": "2", "NEW": "3"}):
        assert (os.environ["KEPT"], os.environ["NEW"]) == ("2", "3")
        os.environ["SOMEBODY_ELSES"] = "x"
        del os.environ["PATH"]
    assert dict(os.environ) == before


def test_options_are_what_vllm_is_made_with(path):
    options = VllmOptions(model=path, max_num_seqs=8, seed=7)
    assert (options.max_num_seqs, options.seed, options.load_format) == (8, 7, None)
