"""Real vLLM: what is refused before anything starts, and what options do."""

import json
import math
import os
import re
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import safetensors.torch
import tiny
import torch
from watching import taken

from rl_generation.errors import EngineDeadError, EngineOptionError, ModelError, PromptError
from rl_generation.requests import Sampling
from rl_generation.vllm import LoraAdapter, VllmEngine, VllmOptions
from rl_generation.vllm.preparing import environment, prepare

GREEDY = Sampling(max_new_tokens=16, temperature=0.0, ignore_eos=True)
LONG = list(range(10, 110))
TOLERANCE = 1e-4


@pytest.fixture
def path(checkpoints):
    return checkpoints("llama")


def refused(match, options, *, error=EngineOptionError, **others):
    before = taken()
    with pytest.raises(error, match=match):
        VllmEngine(options, **others)
    assert not torch.distributed.is_initialized()
    assert taken() <= before


# -- Refused before anything starts ----------------------------------------------------------------------------------


def test_a_key_that_vllm_does_not_know_is_refused_with_the_nearest_one(path):
    refused(
        r"unexpected keyword argument 'max_num_batched_token'; did you mean 'max_num_batched_tokens'\?",
        tiny.options(path, vllm_kwargs={"max_num_batched_token": 64}),
    )


def test_a_value_that_vllm_does_not_know_is_refused_in_its_words(path):
    refused(r"(?s)vLLM refuses these options: .*float99", tiny.options(path, dtype="float99"))


def test_models_and_tokenizers_that_are_not_there_are_refused(path, tmp_path):
    for match, options in (
        (r"nowhere is no folder, so there is no model", tiny.options(str(tmp_path / "nowhere"))),
        (r"has no config\.json, so there is no model", tiny.options(str(tmp_path))),
        (r"tiny/absent: transformers cannot load the config", tiny.options("tiny/absent")),
        (r"has no tokenizer\.json .* so there is no tokenizer", tiny.options(path, tokenizer=str(tmp_path))),
        (r"gone is no folder, so there is no tokenizer", tiny.options(path, tokenizer=str(tmp_path / "gone"))),
    ):
        refused(match, options, error=ModelError)


def test_what_is_no_options_is_refused_with_what_to_write(path):
    refused(r"options must be VllmOptions\(model='/models/llama'\); got str", "/models/llama")


def test_an_extension_that_cannot_be_imported_is_refused(path):
    for name in ("absent.Extension", "weights_worker.Absent", "Extension"):
        refused(rf"worker_extension_cls='{name}' cannot be imported", tiny.options(path, worker_extension_cls=name))


@pytest.mark.skipif(not version("vllm").startswith("0.30."), reason="later releases speculate on a CPU as well")
def test_speculation_that_would_end_the_engine_is_refused(path):
    speculates = tiny.options(path, vllm_kwargs={"speculative_config": {"method": "ngram"}})
    refused(r"speculative_config needs vLLM 0\.31 or later", speculates)


def test_more_positions_than_the_model_was_made_for_are_refused_in_a_sentence(path):
    refused(
        r"^max_model_len=600 is more than the model was made for \(max_position_embeddings=512\); give at most",
        tiny.options(path, max_model_len=600),
    )


def test_a_broken_config_is_refused_with_its_path(tmp_path):
    unread = "holds no JSON object, but list|cannot load the config: TypeError"  # by the release of transformers
    for text, fault in (("{", "is not a valid JSON file"), ("[]", unread)):
        (tmp_path / "config.json").write_text(text)
        refused(rf"{tmp_path}.* ({fault})", tiny.options(str(tmp_path)), error=ModelError)


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


# -- What options do: each engine is asked for all that it can show, since a start takes long ------------------------


UNSEEDED = Sampling(max_new_tokens=8, ignore_eos=True)
RAW = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.9, seed=3, ignore_eos=True)


def unseeded(engine):
    """The tokens of the first two answers of an engine to a request without a seed."""
    return [engine.generate([[5, 6, 7]], UNSEEDED)[0].tokens for _ in range(2)]


@pytest.fixture(scope="module")
def plain(checkpoints):
    """What an engine does that is made after one that did not start."""
    from vllm import LLM, EngineArgs  # noqa: F401  (importing vLLM sets variables, once)

    from rl_generation.vllm import samples

    path, limits = checkpoints("llama"), []
    with pytest.raises(EngineDeadError, match="vLLM's engine did not start, and its log says why"):
        VllmEngine(tiny.options(path, kv_cache_memory_bytes=1000))
    torch.manual_seed(1)
    variables = dict(os.environ)
    with VllmEngine(tiny.options(path)) as engine, pytest.MonkeyPatch.context() as patch:
        variables_with_it = dict(os.environ)
        drawn = unseeded(engine)
        run = samples.Samples._run

        def noted(self, sample, *how):
            limits.append(sample.timeout_s)
            return run(self, sample, *how)

        patch.setattr(samples.Samples, "_run", noted)
        greedy = engine.generate([[5]], GREEDY)[0]
        engine.generate([[5]], GREEDY, timeout_s=50.0)
        engine.submit([5], GREEDY, seed=0).result(60)
    return SimpleNamespace(
        variables=(variables, variables_with_it, dict(os.environ)),
        unseeded=drawn,
        greedy=greedy,
        limits_of_samples=limits,
    )


@pytest.fixture(scope="module")
def without_tokenizer(checkpoints):
    """What an engine does that has no tokenizer, and gives raw log-probabilities."""
    torch.manual_seed(2)
    with VllmEngine(tiny.options(checkpoints("llama", tokenizer=False)), logp_of="raw") as engine:
        drawn = unseeded(engine)
        answers = engine.generate(tiny.prompts(4), RAW)
        refusals = {}
        for name in ("stop", "bad_words"):
            with pytest.raises(PromptError) as refusal:
                engine.generate([[5]], Sampling(max_new_tokens=1, **{name: ("x",)}))
            refusals[name] = str(refusal.value)
        return SimpleNamespace(
            unseeded=drawn,
            answers=answers,
            refusals=refusals,
            stop_token_ids=engine.stop_token_ids,
            explanation=engine.explain(),
        )


@pytest.fixture(scope="module")
def with_adapters(checkpoints, tmp_path_factory):
    """What an engine answers without an adapter and with two, the second of which was written over the first."""
    folder, prompts = tmp_path_factory.mktemp("adapter"), tiny.prompts(3)
    options = tiny.options(
        checkpoints("llama"), enable_lora=True, max_lora_rank=8, seed=7, vllm_kwargs={"block_size": 32}
    )
    torch.manual_seed(1)
    with VllmEngine(options) as engine:
        drawn = unseeded(engine)
        first = lora(folder)
        old = engine.generate([LONG], GREEDY, lora=first)[0]
        without, changed = engine.generate(prompts, GREEDY), engine.generate(prompts, GREEDY, lora=first)
        cached = engine.metrics().cached_prompt_tokens
        second = lora(folder, number=2, seed=1)
        new = engine.generate([LONG], GREEDY, lora=second)[0]
        cached = engine.metrics().cached_prompt_tokens - cached
        engine.reset_prefix_cache()
        again = engine.generate([LONG], GREEDY, lora=second)[0]
        with pytest.raises(EngineOptionError, match=r"an adapter is a LoraAdapter\(.*; got 'queries'"):
            engine.generate([LONG], GREEDY, lora="queries")
    return SimpleNamespace(
        unseeded=drawn,
        prompts=prompts,
        without=without,
        changed=changed,
        old=old,
        new=new,
        again=again,
        cached_under_the_new=cached,
    )


def test_variables_are_left_as_they_were(plain):
    before, with_it, after = plain.variables
    assert before == with_it == after


def test_a_start_after_one_that_failed_works(plain):
    assert len(plain.greedy.tokens) == 16


def test_a_generate_has_no_limit_of_time_unless_somebody_sets_one(plain):
    assert plain.limits_of_samples == [math.inf, 50.0, 600.0]


def test_answers_without_a_seed_hang_on_the_engines_seed_alone(plain, without_tokenizer, with_adapters):
    assert plain.unseeded == without_tokenizer.unseeded != with_adapters.unseeded  # whatever seed the host has
    assert plain.unseeded[0] != plain.unseeded[1]


def test_without_a_tokenizer_token_ids_serve_and_strings_are_refused_and_raw_logp_is_of_the_logits(without_tokenizer):
    assert without_tokenizer.stop_token_ids == (tiny.EOS,)
    for name, refusal in without_tokenizer.refusals.items():
        assert f"prompt 0 asks for {name}=('x',), which is text" in refusal
    assert "no stop strings" in without_tokenizer.explanation
    model = tiny.policy("llama", 0)
    for prompt, rollout in zip(tiny.prompts(4), without_tokenizer.answers, strict=True):
        expected = tiny.logits(model, prompt, rollout.tokens).log_softmax(-1)
        assert rollout.logp == pytest.approx(tiny.chosen(expected, rollout.tokens), abs=TOLERANCE)
        assert rollout.logp_of == "raw"


def test_dummy_weights_are_not_sampled_from_until_a_version_is_committed_and_another_dtype_is_warned_of(path):
    options = tiny.options(path, for_training=True, dtype="auto", vllm_kwargs={"block_size": 32})
    with pytest.warns(UserWarning, match=r"serves in bfloat16 a checkpoint whose weights are float32.*dtype='float32'"):
        engine = VllmEngine(options, version=4)
    with engine:
        assert engine.version == 4
        explanation = engine.explain()
        assert re.search(r"^dtype +bfloat16$", explanation, re.MULTILINE)
        for part in (
            "the first refit feeds it",
            "none: no refit has been committed",
            "tensor 1, pipeline 1",
            "block_size",
        ):
            assert part in explanation
        with pytest.raises(ModelError, match=r"for_training=True or load_format.* no refit has been committed"):
            engine.generate([[5]], GREEDY)
        engine.commit_version(4)
        assert engine.generate([[5]], GREEDY)[0].version == 4


def test_dummy_weights_by_name_are_not_sampled_from_either(path):
    for options, unfed in (({"load_format": "dummy"}, True), ({"for_training": True}, True), ({}, False)):
        assert prepare(tiny.options(path, **options), logp_of="sampled").unfed == unfed


def test_an_adapter_of_a_new_number_has_new_answers_though_its_folder_is_the_same(with_adapters):
    old, new, again = with_adapters.old, with_adapters.new, with_adapters.again
    assert with_adapters.cached_under_the_new == 0
    assert (new.tokens, new.logp) == (again.tokens, pytest.approx(again.logp, abs=TOLERANCE))
    assert new.logp != pytest.approx(old.logp, abs=1e-2)


def test_an_adapter_changes_the_answers_of_the_calls_that_name_it(with_adapters):
    merged = tiny.policy("llama", 0)
    down, up = lora_weights()
    for layer in merged.model.layers:
        layer.self_attn.q_proj.weight += 2.0 * up @ down
    without, changed = with_adapters.without, with_adapters.changed
    for model, answers in ((tiny.policy("llama", 0), without), (merged, changed)):
        for prompt, rollout in zip(with_adapters.prompts, answers, strict=True):
            expected = tiny.logits(model, prompt, rollout.tokens).log_softmax(-1)
            assert rollout.logp == pytest.approx(tiny.chosen(expected, rollout.tokens), abs=TOLERANCE)
    assert [each.tokens for each in without] != [each.tokens for each in changed]


def lora_weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 64, generator=generator) * 0.3, torch.randn(64, 8, generator=generator) * 0.3


def lora(folder, *, number=1, seed=0):
    """Rank 8, scaled by 2, of every query projection, as peft saves it."""
    down, up = lora_weights(seed)
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(layer, part): t.clone() for layer in (0, 1) for part, t in (("A", down), ("B", up))}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return LoraAdapter(name="queries", number=number, path=str(folder))


# -- Nothing is left -------------------------------------------------------------------------------------------------


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
