"""Claims about the choice of a backend: what a run says of it, and what it needs."""

import importlib.metadata
import importlib.util

import pytest
from typer.testing import CliRunner

from rl_backends.megatron.installed import require_megatron
from rl_launcher.cli import app

MEGATRON = "policy.megatron_cfg.enabled=true"
needs_megatron = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed; tests-integration has it"
)


def invoke(command, *arguments):
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


def test_without_megatron_core_a_run_is_refused_before_any_model_is_loaded(recipe, tmp_path, monkeypatch):
    original = importlib.metadata.version

    def version(name):
        if name == "megatron-core":
            raise importlib.metadata.PackageNotFoundError(name)
        return original(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    require_megatron.cache_clear()
    (tmp_path / "model.py").write_text("raise SystemExit('the model was loaded')")
    code, output = invoke("run", recipe, MEGATRON)
    assert code == 2
    assert "policy.megatron_cfg.enabled=true: the Megatron backend cannot be used: megatron-core is not" in output
    assert 'pip install "rl-backends[megatron]"' in output
    assert not (tmp_path / "run").exists()


def test_a_run_says_which_settings_have_no_effect(recipe):
    stages = ["sft.max_num_steps=1", "grpo=null"]
    code, output = invoke("run", recipe, *stages, "policy.megatron_cfg.precision=bfloat16")
    assert code == 0, output
    assert "dtensor trains the policy" in output
    assert "of no effect: megatron_cfg.precision='bfloat16'" in output


def test_a_run_as_by_default_says_nothing_of_it(recipe):
    code, output = invoke("run", recipe, "sft.max_num_steps=1", "grpo=null")
    assert code == 0, output
    assert "trains the policy" not in output


@needs_megatron
def test_explain_says_that_megatron_takes_precedence_over_what_and_where_conversions_lie(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(tmp_path / "conversions"))
    overrides = [MEGATRON, "policy.dtensor_cfg.cpu_offload=true"]
    code, output = invoke("explain", recipe, *overrides)
    assert code == 0, output
    for text in (
        "megatron trains the policy: megatron_cfg.enabled is true, and takes precedence over dtensor_cfg.enabled",
        "of no effect: dtensor_cfg.cpu_offload=True",
        f"would write a Megatron-LM checkpoint to {tmp_path / 'conversions'} (NRL_MEGATRON_CHECKPOINT_DIR says so)",
        "MegatronBackend of Qwen3ForCausalLM (",
    ):
        assert text in output


@needs_megatron
@pytest.mark.filterwarnings("ignore:Warning. tp_group is None, using default tp group:DeprecationWarning")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_on_megatron_ends_with_an_engine_of_its_weights(recipe, tmp_path, precision):
    code, output = invoke("run", recipe, MEGATRON, f"policy.megatron_cfg.precision={precision}")
    assert code == 0, output
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
