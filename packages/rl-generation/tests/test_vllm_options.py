"""What a vLLM engine would be made with, and how its answers are read, where there is no vLLM."""

import asyncio
import itertools
import json
import math
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pytest

from rl_generation.checkpoints import stop_token_ids_of
from rl_generation.errors import EngineOptionError, LogpError, ModelError, PromptError
from rl_generation.model_flags import flags_for
from rl_generation.requests import Limits, Request, Sampling
from rl_generation.rollout import VersionSpan
from rl_generation.vllm import LoraAdapter, VllmOptions, preparing
from rl_generation.vllm.options import check_lora, engine_arguments, nearest
from rl_generation.vllm.preparing import (
    Prepared,
    check_interface,
    check_runtime,
    has_tokenizer,
    load_format_of,
    main_guard_hint,
    read_config,
    stop_tokens,
)
from rl_generation.vllm.running import RunningLLM, Statistics, version_of
from rl_generation.vllm.samples import (
    Sample,
    check_for_vllm,
    check_timeout,
    logp_hint,
    logp_of_tokens,
    rollout_of,
    spans_of,
)


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text, **_):
        return list(text.encode())

    def decode(self, tokens, **_):
        return bytes(tokens).decode(errors="replace")


LIMITS = Limits(vocab_size=260, max_length=64, tokenizer=Bytes())


def asked(prompt=(1,), **sampling):
    return Request(prompt=prompt, sampling=Sampling(max_new_tokens=1, **sampling), prompt_index=3)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return tmp_path


def arguments(options, **others):
    return engine_arguments(
        options, **{"logp_of": "sampled", "load_format": "auto", "skip_tokenizer_init": True} | others
    )


# -- Options ---------------------------------------------------------------------------------------------------------


def test_options_reach_vllm_under_its_names_and_what_is_none_is_left_to_it():
    options = VllmOptions(
        model="m",
        tensor_parallel_size=4,
        vllm_kwargs={"quantization": "fp8", "speculative_config": {"method": "ngram"}, "block_size": 32},
    )
    given = arguments(options)
    assert given["tensor_parallel_size"] == 4
    assert (given["quantization"], given["speculative_config"], given["block_size"]) == ("fp8", {"method": "ngram"}, 32)
    assert given["disable_log_stats"] is True  # by others than the engine's own logger
    assert not {"max_model_len", "for_training", "vllm_kwargs", "max_loras", "worker_extension_cls"} & set(given)
    lora = arguments(VllmOptions(model="m", enable_lora=True, max_loras=3))
    assert (lora["max_loras"], lora["max_lora_rank"]) == (3, 16)


def test_logp_of_decides_which_log_probabilities_vllm_returns():
    assert arguments(VllmOptions(model="m"))["logprobs_mode"] == "processed_logprobs"
    assert arguments(VllmOptions(model="m"), logp_of="raw")["logprobs_mode"] == "raw_logprobs"
    with pytest.raises(EngineOptionError, match="logp_of must be 'sampled' or 'raw'; got logp_of='both'"):
        arguments(VllmOptions(model="m"), logp_of="both")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model must name a folder"),
        (
            {"tensor_parallel_size": 0},
            "tensor_parallel_size must be an integer of at least 1; got tensor_parallel_size=0",
        ),
        ({"max_model_len": -1}, "max_model_len=-1"),
        ({"max_num_seqs": True}, "max_num_seqs=True"),
        ({"kv_cache_memory_bytes": 1.5}, "kv_cache_memory_bytes=1.5"),
        ({"gpu_memory_utilization": 1.1}, r"must be in \(0, 1\]; got gpu_memory_utilization=1.1"),
        ({"gpu_memory_utilization": math.nan}, "gpu_memory_utilization=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization=True"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False; got enforce_eager=1"),
        ({"trust_remote_code": "no"}, "trust_remote_code='no'"),
        ({"tokenizer": ""}, "or be None; got tokenizer=''"),
        ({"vllm_kwargs": "ngram"}, "vllm_kwargs must be a dictionary; got vllm_kwargs='ngram'"),
        ({"max_loras": 2}, "max_loras=2 needs enable_lora=True"),
        ({"max_lora_rank": 8}, "max_lora_rank=8 needs enable_lora=True"),
        ({"vllm_kwargs": {"max_model_len": 8}}, "vllm_kwargs repeats 'max_model_len', .* give max_model_len=8"),
        (
            {"vllm_kwargs": {"logprobs_mode": "raw_logits"}},
            "sets 'logprobs_mode', which the engine does; use the engine's logp_of=",
        ),
        ({"vllm_kwargs": {"disable_log_stats": True}}, "vllm_kwargs sets 'disable_log_stats'"),
        ({"vllm_kwargs": {"stream_interval": 4}}, "vllm_kwargs sets 'stream_interval'"),
    ],
)
def test_impossible_options_are_refused_with_their_values(changes, message):
    with pytest.raises(EngineOptionError, match=message):
        VllmOptions(**{"model": "m"} | changes)


def test_the_nearest_known_name_is_offered_where_there_is_one():
    names = [each.name for each in fields(VllmOptions)]
    assert nearest("max_num_seq", names) == "; did you mean 'max_num_seqs'?"
    assert not nearest("zzz", names)


# -- Checkpoints -----------------------------------------------------------------------------------------------------


def test_dummy_weights_are_for_training_where_the_model_admits_them():
    for_training, plain = VllmOptions(model="m", for_training=True), VllmOptions(model="m")
    llama, mistral = flags_for("llama", version="0.32.0"), flags_for("mistral3", version="0.32.0+cpu")
    assert load_format_of(for_training, llama) == "dummy"
    assert load_format_of(plain, llama) == "auto"
    assert load_format_of(for_training, mistral) == "auto"
    assert load_format_of(for_training, flags_for("mistral3", version="0.30.0")) == "dummy"
    asked = VllmOptions(model="m", for_training=True, load_format="safetensors")
    assert load_format_of(asked, llama) == "safetensors"


def test_stop_tokens_come_from_the_generation_config_then_the_config(checkpoint):
    config = read_config(VllmOptions(model=str(checkpoint)))
    assert stop_token_ids_of(str(checkpoint), config) == (2,)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert stop_token_ids_of(str(checkpoint), config) == (7, 9)
    assert stop_token_ids_of(str(checkpoint.parent), {"text_config": {"eos_token_id": 5}}) == (5,)


def _prepared(options):
    given = {"arguments": {"load_format": "auto"}, "quirks": (), "stop_token_ids": (2,)}
    return Prepared(options=options, **given)


def test_an_engine_adds_its_tokenizers_eos_unless_stop_tokens_are_given(checkpoint):
    prepared = _prepared(VllmOptions(model=str(checkpoint)))
    limits = Limits(vocab_size=40, max_length=9, tokenizer=SimpleNamespace(eos_token_id=3))
    assert stop_tokens(None, prepared, limits) == (2, 3)
    assert stop_tokens((), prepared, limits) == ()
    assert stop_tokens([8, 8], prepared, limits) == (8,)
    with pytest.raises(PromptError, match=r"the engine's stop_token_ids must hold ids in \[0, 40\)"):
        stop_tokens([40], prepared, limits)


def test_models_and_tokenizers_that_are_not_there_are_refused_by_name(checkpoint, tmp_path):
    for name in ("./absent", str(tmp_path / "absent")):
        with pytest.raises(ModelError, match=f"{name} is no folder, so there is no model"):
            read_config(VllmOptions(model=name))
    with pytest.raises(ModelError, match="a/b/c: transformers cannot load the config"):
        read_config(VllmOptions(model="a/b/c"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        read_config(VllmOptions(model=str(empty)))
    with pytest.raises(ModelError, match=r"has no tokenizer\.json .* so there is no tokenizer"):
        has_tokenizer(VllmOptions(model=str(checkpoint), tokenizer=str(empty)))
    assert not has_tokenizer(VllmOptions(model=str(checkpoint)))
    (checkpoint / "tokenizer.json").write_text("{}")
    assert has_tokenizer(VllmOptions(model=str(checkpoint)))
    assert not has_tokenizer(VllmOptions(model=str(checkpoint), vllm_kwargs={"skip_tokenizer_init": True}))


# -- The runtime -----------------------------------------------------------------------------------------------------


def test_a_missing_or_old_vllm_is_refused_with_what_to_install_and_a_new_one_is_warned_of(monkeypatch):
    monkeypatch.setattr(preparing, "installed_version", lambda: None)
    with pytest.raises(EngineOptionError, match=r"vLLM is not installed .* `pip install rl-generation\[vllm\]`"):
        check_runtime()
    monkeypatch.setattr(preparing, "installed_version", lambda: "0.9.2")
    with pytest.raises(EngineOptionError, match=r"vLLM 0\.9\.2 is installed, and this package needs 0\.30 or later"):
        check_runtime()
    monkeypatch.setattr(preparing, "installed_version", lambda: "0.33.1")
    with pytest.warns(UserWarning, match=r"vLLM 0\.33\.1 is later than 0\.32, the last release .* tested with"):
        assert check_runtime() == "0.33.1"
    for tested in ("0.30.0", "0.32.0+cpu"):
        monkeypatch.setattr(preparing, "installed_version", lambda version=tested: version)
        assert check_runtime() == tested


def test_a_vllm_that_has_lost_what_the_engine_calls_is_refused_by_name():
    class Changed:
        pass

    for name in preparing._CALLED:
        if name != "pause_generation":
            setattr(Changed, name, lambda self: None)
    with pytest.raises(EngineOptionError, match=r"has no AsyncLLM\.pause_generation, which this engine calls"):
        check_interface(Changed)
    Changed.pause_generation = lambda self: None
    check_interface(Changed)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "which vLLM .* does not have any more; unset NRL_VLLM_USE_V1"),
        ("__import__('os')", "NRL_VLLM_USE_V1 must be 0 or 1"),
        ("", "NRL_VLLM_USE_V1 must be 0 or 1, or not set .*; got ''"),
    ],
)
def test_the_runtime_variable_is_read_and_never_evaluated(monkeypatch, value, message):
    monkeypatch.setenv("NRL_VLLM_USE_V1", value)
    with pytest.raises(EngineOptionError, match=message):
        check_runtime()


def test_importing_the_door_to_vllm_imports_neither_vllm_nor_ray_nor_transformers():
    program = "import sys, rl_generation.vllm; print({'vllm', 'ray', 'transformers'} & set(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout.strip() == "set()"


# -- What vLLM generated ---------------------------------------------------------------------------------------------


def flat(tokens, logp):
    return SimpleNamespace(token_ids=list(tokens), logprobs=list(logp), start_indices=range(len(tokens)))


def completion(tokens=(5, 6, 7), logp=(-1.0, -2.0, -3.0), **changes):
    spans = [SimpleNamespace(version="3", start=0, end=2), SimpleNamespace(version="4", start=2, end=3)]
    ended = {"finish_reason": "length", "stop_reason": None, "weight_versions": spans}
    return SimpleNamespace(token_ids=list(tokens), logprobs=flat(tokens, logp), **ended | changes)


def sample(tokens=(), logp=()):
    asked = {"prompt": (1,), "params": None, "timeout_s": 1.0}
    return Sample(prompt_index=4, index=2, tokens=list(tokens), logp=list(logp), **asked)


def rollout(said, *, version, seams=(), logp_of="sampled"):
    ended = sample(said.token_ids, logp_of_tokens(sample(), said))
    ended.versions = spans_of(said, len(said.token_ids), version, seams=seams)
    return rollout_of(ended, SimpleNamespace(outputs=[said]), logp_of=logp_of)


def test_an_answer_keeps_tokens_logp_ends_and_versions():
    answer = rollout(completion(), logp_of="raw", version=9)
    assert (answer.tokens, answer.logp, answer.logp_of) == ((5, 6, 7), (-1.0, -2.0, -3.0), "raw")
    assert answer.versions == (VersionSpan(version=3, start=0, end=2), VersionSpan(version=4, start=2, end=3))
    assert (answer.prompt_index, answer.sample_index, answer.version) == (4, 2, 3)


@pytest.mark.parametrize(("given", "expected"), [(None, 7), (6, 6), ("\n\n", "\n\n")])
def test_vllms_silence_about_its_eos_token_becomes_the_token(given, expected):
    assert rollout(completion(finish_reason="stop", stop_reason=given), version=0).stop_reason == expected


def test_an_answer_aborted_before_its_first_token_has_the_version_of_now():
    nothing = completion((), (), finish_reason="abort", weight_versions=[])
    assert rollout(nothing, version=9).versions == (VersionSpan(version=9, start=0, end=0),)


def test_weights_that_made_none_of_the_tokens_of_an_aborted_answer_have_no_span():
    spans = [SimpleNamespace(version="3", start=0, end=3), SimpleNamespace(version="4", start=3, end=3)]
    aborted = completion(finish_reason="abort", weight_versions=spans)
    assert rollout(aborted, version=9).versions == (VersionSpan(version=3, start=0, end=3),)


@pytest.mark.parametrize(
    ("seams", "expected"),
    [
        ((), [(9, 0, 3)]),
        ([(7, 2)], [(7, 0, 2), (9, 2, 3)]),
        ([(6, 1), (7, 2), (8, 2)], [(6, 0, 1), (7, 1, 2), (9, 2, 3)]),  # nothing was made by 8
        ([(6, 0), (7, 3)], [(7, 0, 3)]),
    ],
)
def test_a_vllm_that_does_not_say_versions_has_those_that_were_noted_at_commits(seams, expected):
    silent = completion()
    del silent.weight_versions  # as before 0.32
    spans = rollout(silent, version=9, seams=seams).versions
    assert [(span.version, span.start, span.end) for span in spans] == expected


def test_a_commit_under_an_engine_that_goes_on_is_refused_where_vllm_does_not_say_versions(monkeypatch):
    counts = itertools.count()
    growing = SimpleNamespace(external_req_id="a", detokenizer=SimpleNamespace(num_output_tokens=lambda: next(counts)))
    still = SimpleNamespace(external_req_id="b", detokenizer=SimpleNamespace(num_output_tokens=lambda: 4))
    engine = RunningLLM.__new__(RunningLLM)
    engine.version, engine.seams = 7, {}
    states = {"b-1": still}
    engine.llm = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
    asyncio.run(engine._note_seams())
    assert engine.seams == {"b": [(7, 4)]}
    monkeypatch.setattr("rl_generation.vllm.running.SETTLED_S", 0.05)
    states["a-1"] = growing
    with pytest.raises(ModelError, match=r"committed while the engine generates, .* pause\(\) the engine first"):
        asyncio.run(engine._note_seams())


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "answer 2 to prompt 4 has 0 log-probabilities for 3 tokens"),
        (flat((5, 6), (-1.0, -2.0)), "has 2 log-probabilities for 3 tokens"),
        (flat((5, 6, 7), (-1.0, math.nan, -2.0)), "has log-probability nan for token 6 at position 11"),
        (flat((5, 6, 7), (-1.0, -2.0, -math.inf)), "has log-probability -inf for token 7 at position 12"),
        (flat((5, 9, 7), (-1.0, -2.0, -3.0)), "has 2 log-probabilities for 3 tokens"),  # of another token
        ([{5: SimpleNamespace(logprob=-1.0)}, {9: SimpleNamespace(logprob=-1.0)}, {}], "has 1 log-probabilities"),
    ],
)
def test_a_log_probability_that_is_missing_or_not_finite_is_an_error_and_never_a_zero(found, message):
    with pytest.raises(LogpError, match=message):
        logp_of_tokens(sample(range(10)), SimpleNamespace(token_ids=(5, 6, 7), logprobs=found))


def test_dictionaries_of_log_probabilities_are_read_too():
    found = [{9: SimpleNamespace(logprob=-9.0), token: SimpleNamespace(logprob=-float(token))} for token in (5, 6)]
    assert logp_of_tokens(sample(), SimpleNamespace(token_ids=(5, 6), logprobs=found)) == (-5.0, -6.0)


def test_an_answer_that_vllm_gave_up_is_an_error():
    with pytest.raises(ModelError, match="ended answer 2 to prompt 4 with finish_reason='error' after 3 tokens"):
        rollout(completion(finish_reason="error"), version=0)


def test_a_label_that_is_no_number_of_steps_is_refused():
    assert version_of("12") == 12
    for label in ("default", "-1", "1.0", ""):
        with pytest.raises(ModelError, match=f"labelled '{label}'"):
            version_of(label)


def test_speculative_decoding_is_named_where_a_log_probability_is_broken():
    assert not logp_hint(VllmOptions(model="m"))
    speculates = VllmOptions(model="m", vllm_kwargs={"speculative_config": {"method": "ngram"}})
    assert "it is speculative decoding" in logp_hint(speculates)


@pytest.mark.parametrize("timeout_s", [0, -1, math.inf, math.nan])
def test_a_time_that_is_no_limit_is_refused(timeout_s):
    with pytest.raises(EngineOptionError, match=f"timeout_s must be a positive, finite .* got timeout_s={timeout_s}"):
        check_timeout(timeout_s)


def test_a_script_without_its_guard_is_named_where_processes_did_not_start(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
    assert not main_guard_hint()
    script.write_text("VllmEngine(options)")
    assert "import the script that makes it, train.py: make it under `if __name__" in main_guard_hint()
    script.write_text('if __name__ == "__main__":\n    VllmEngine(options)')
    assert not main_guard_hint()


def test_a_temperature_that_vllm_refuses_is_refused_first():
    check_for_vllm(asked(temperature=2.0), LIMITS)
    with pytest.raises(PromptError, match=r"prompt 3 asks for temperature=2\.01, and vLLM goes up to 2\.0"):
        check_for_vllm(asked(temperature=2.01), LIMITS)


def test_stop_strings_behind_half_a_character_are_refused_because_vllm_would_find_them_in_the_prompt():
    whole = tuple("hällo 你".encode())
    check_for_vllm(asked(whole, stop=("x",)), LIMITS)
    check_for_vllm(asked(whole[:-1]), LIMITS)
    with pytest.raises(PromptError, match=r"prompt 3 ends inside a character, and asks for stop=\('x',\), which vLLM"):
        check_for_vllm(asked(whole[:-1], stop=("x",)), LIMITS)


def test_bad_words_that_vllm_refuses_are_refused_before_any_request_has_begun():
    check_for_vllm(asked(bad_words=[f"w{i}" for i in range(128)]), LIMITS)
    with pytest.raises(
        PromptError, match=r"prompt 3 has 129 bad_words, which make 129 sequences .* vLLM takes 128; set"
    ):
        check_for_vllm(asked(bad_words=[f"w{i}" for i in range(129)]), LIMITS)
    with pytest.raises(PromptError, match="bad_words holds ' ', which the tokenizer turns into no tokens"):
        check_for_vllm(asked(bad_words=[" "]), LIMITS)


def test_statistics_are_summed():
    statistics = Statistics()
    scheduler = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    step = SimpleNamespace(
        prompt_token_stats=SimpleNamespace(total=10, cached_tokens=4),
        num_generation_tokens=3,
        num_preempted_reqs=1,
        finished_requests=[SimpleNamespace(finish_reason="stop")],
    )
    for _ in range(2):
        statistics.record(scheduler, step)
    statistics.record(None, None)
    statistics.record(SimpleNamespace(**vars(scheduler) | {"kv_cache_usage": 0.1}), None, engine_idx=1)
    statistics.count_aborted(1)
    idle, busy = (statistics.metrics(version=5, busy=busy) for busy in (False, True))
    assert (idle.running, idle.waiting, idle.cache_usage, idle.generated_tokens) == (0, 0, 0.0, 6)
    assert (busy.running, busy.waiting, busy.cache_usage, busy.version) == (4, 4, 0.3, 5)
    assert (busy.prompt_tokens, busy.cached_prompt_tokens, busy.generated_tokens, busy.preemptions) == (20, 8, 6, 2)
    assert busy.finished == {"stop": 2, "abort": 1}


def test_an_adapter_needs_its_files_and_an_engine_that_takes_it(tmp_path):
    with pytest.raises(EngineOptionError, match=r"holds no adapter_config\.json"):
        LoraAdapter(name="a", number=1, path=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(EngineOptionError, match="got number=0 for 'a'"):
        LoraAdapter(name="a", number=0, path=str(tmp_path))
    adapter = LoraAdapter(name="a", number=1, path=str(tmp_path))
    check_lora(adapter, VllmOptions(model="m", enable_lora=True))
    with pytest.raises(EngineOptionError, match="adapter 'a' needs an engine made with enable_lora=True"):
        check_lora(adapter, VllmOptions(model="m"))


@pytest.mark.parametrize(
    "asked",
    [{"presence_penalty": 1.0}, {"logit_bias": {5: 1.0}}, {"min_new_tokens": 1}, {"regex": "a"}, {"top_logp": 2}],
)
def test_what_only_the_embedded_engine_does_is_refused_by_name(asked):
    request = Request(prompt=(5,), sampling=Sampling(max_new_tokens=2, **asked))
    with pytest.raises(PromptError, match=f"{next(iter(asked))}=.*the embedded engine alone"):
        check_for_vllm(request, Limits(vocab_size=40, max_length=64))
