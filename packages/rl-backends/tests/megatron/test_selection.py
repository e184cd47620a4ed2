"""Claims about which backend trains: by two switches, said in words, and without loading what does not train."""

import subprocess
import sys
import textwrap
import types
from itertools import combinations

import pytest

from rl_backends import DTensorBackend, DTensorConfig, LoraConfig
from rl_backends.megatron.config import MegatronConfig
from rl_backends.selection import select_backend


def configs(*, dtensor=None, megatron=None):
    return types.SimpleNamespace(
        dtensor_cfg=DTensorConfig(**(dtensor or {})), megatron_cfg=MegatronConfig(**(megatron or {}))
    )


def test_dtensor_trains_where_nothing_was_said():
    selection = select_backend(configs())
    assert selection.backend == "dtensor"
    assert selection.config == DTensorConfig()
    assert selection.reason == "dtensor_cfg.enabled is true, and megatron_cfg.enabled is false"
    assert selection.is_plain


def test_megatron_takes_precedence_where_both_are_enabled_and_says_so():
    chosen = configs(megatron={"enabled": True, "tensor_model_parallel_size": 2})
    selection = select_backend(chosen)
    assert selection.backend == "megatron"
    assert selection.config is chosen.megatron_cfg
    assert selection.reason == (
        "megatron_cfg.enabled is true, and takes precedence over dtensor_cfg.enabled, which is true too"
    )
    assert not selection.is_plain


def test_megatron_alone_is_not_said_to_take_anything_from_a_backend_that_is_off():
    selection = select_backend(configs(dtensor={"enabled": False}, megatron={"enabled": True}))
    assert selection.backend == "megatron"
    assert selection.reason == "megatron_cfg.enabled is true, and dtensor_cfg.enabled is false"


def test_megatron_that_would_train_all_weights_in_the_place_of_adapters_is_refused():
    adapters = {"lora_cfg": LoraConfig(rank=4)}
    with pytest.raises(ValueError, match=r"megatron_cfg.enabled=true and dtensor_cfg.lora_cfg: Megatron would train"):
        select_backend(configs(dtensor=adapters, megatron={"enabled": True}))


def test_a_teacher_is_made_as_the_policy_is_but_without_its_adapters():
    selection = select_backend(configs(dtensor={"lora_cfg": LoraConfig(rank=4), "micro_batch_size": 3}))
    assert selection.adapters == LoraConfig(rank=4)
    assert selection.without_adapters().config == DTensorConfig(micro_batch_size=3)
    assert select_backend(configs()).adapters is None


def test_neither_is_an_error_that_names_both():
    with pytest.raises(ValueError, match=r"dtensor_cfg.enabled and megatron_cfg.enabled are both false.*one of them"):
        select_backend(configs(dtensor={"enabled": False}))


def test_settings_of_the_backend_that_does_not_train_are_named():
    """`device=cuda` under the wrong section would otherwise train on the CPU without a word."""
    selection = select_backend(configs(dtensor={"device": "cuda", "compile": True}, megatron={"enabled": True}))
    assert selection.unused == ("dtensor_cfg.device='cuda'", "dtensor_cfg.compile=True")
    assert selection.reason.endswith("; of no effect: dtensor_cfg.device='cuda', dtensor_cfg.compile=True")
    selection = select_backend(configs(megatron={"use_distributed_optimizer": True}))
    assert selection.backend == "dtensor"
    assert selection.unused == ("megatron_cfg.use_distributed_optimizer=True",)
    assert not selection.is_plain


DTENSOR_COMBINATIONS = {
    "compile=True: stages are not compiled": {"compile": True, "pipeline_parallel_size": 2},
    "cannot be combined with share_prefixes": {
        "context_parallel_size": 2,
        "sequence_packing": True,
        "share_prefixes": True,
    },
    "peak_flops_per_s=0": {"peak_flops_per_s": 0.0},
    "micro_batch_size=0": {"micro_batch_size": 0},
}
MEGATRON_COMBINATIONS = {
    "sequence_parallel=True needs": {"sequence_parallel": True},
    "overlap_param_gather=True needs": {"overlap_param_gather": True},
    "pipeline_model_parallel_size=0": {"pipeline_model_parallel_size": 0},
    "timeout_s=-1.0": {"timeout_s": -1.0},
}


@pytest.mark.parametrize(
    ("config", "cases"),
    [(DTensorConfig, DTENSOR_COMBINATIONS), (MegatronConfig, MEGATRON_COMBINATIONS)],
    ids=["dtensor", "megatron"],
)
def test_all_that_is_wrong_is_in_one_error(config, cases):
    for (first, one), (second, other) in combinations(cases.items(), 2):
        with pytest.raises(ValueError, match=first) as raised:
            config(**one, **other)
        assert second in str(raised.value)
    with pytest.raises(ValueError, match="must be") as raised:
        config(**{name: value for options in cases.values() for name, value in options.items()})
    assert all(text in str(raised.value) for text in cases)


def test_the_chosen_backend_is_made_over_a_model_and_over_a_folder(world, tmp_path):
    selection = select_backend(configs())
    backend = selection.make(world.make_model("Llama"), seed=3)
    assert isinstance(backend, DTensorBackend)
    assert backend.config is selection.config
    backend.save_pretrained(tmp_path / "model")
    backend.close()
    again = selection.from_pretrained(str(tmp_path / "model"), seed=3)
    assert isinstance(again, DTensorBackend)
    again.close()


def run_code(code):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600, check=False
    )


def test_choosing_loads_neither_backend_nor_megatron():
    finished = run_code("""
        import sys, types
        from rl_backends.dtensor.config import DTensorConfig
        from rl_backends.megatron.config import MegatronConfig
        from rl_backends.selection import select_backend
        for enabled in (True, False):
            megatron = MegatronConfig(enabled=enabled)
            select_backend(types.SimpleNamespace(dtensor_cfg=DTensorConfig(), megatron_cfg=megatron))
        loaded = {"megatron", "transformers", "rl_backends.dtensor.backend", "rl_backends.megatron.backend"}
        assert not loaded & set(sys.modules), loaded & set(sys.modules)
    """)
    assert finished.returncode == 0, finished.stderr


def test_without_megatron_core_choosing_works_making_says_what_to_install_and_dtensor_trains():
    finished = run_code("""
        import sys, types
        class Absent:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "megatron":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        sys.meta_path.insert(0, Absent())
        import importlib.metadata as metadata
        original = metadata.distribution
        def distribution(name):
            if name.replace("_", "-") == "megatron-core":
                raise metadata.PackageNotFoundError(name)
            return original(name)
        metadata.distribution = distribution

        import transformers
        from rl_backends.dtensor.config import DTensorConfig
        from rl_backends.errors import MissingDependencyError
        from rl_backends.megatron.config import MegatronConfig
        from rl_backends.selection import select_backend
        def select(enabled):
            return select_backend(
                types.SimpleNamespace(dtensor_cfg=DTensorConfig(), megatron_cfg=MegatronConfig(enabled=enabled)))
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=4, eos_token_id=2))
        selection = select(True)
        assert selection.backend == "megatron"
        asked = lambda: selection.make(model), lambda: selection.from_pretrained("nowhere"), selection.require_installed
        for ask in asked:
            try:
                ask()
            except MissingDependencyError as error:
                assert "megatron-core" in str(error) and "rl-backends[megatron]" in str(error), error
            else:
                raise AssertionError("Megatron was made without megatron-core")
        select(False).make(model).close()
    """)
    assert finished.returncode == 0, finished.stderr
