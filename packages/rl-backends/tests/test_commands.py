"""`rl-backends` from the command line: what it prints, what it ends with, and how it refuses."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from rl_backends import DTensorBackend, DTensorConfig, KernelsConfig, OptimizerConfig
from rl_backends.__main__ import main
from rl_backends.commands.flags import config_of, field_docs
from rl_backends.commands.verify import Plain, compare


@pytest.fixture
def no_ranks():
    """A command is a process of its own, in which there is no process group yet."""
    if dist.is_initialized():
        dist.destroy_process_group()


def refused(capsys, *argv):
    """Exit code, and what was said."""
    try:
        code = main(argv)
    except SystemExit as ended:  # as argparse ends
        code = ended.code
    return code, capsys.readouterr().err


def test_every_field_of_the_backend_has_a_flag_with_its_docstring(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["explain", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    for name, doc in field_docs(DTensorConfig).items():
        if name not in {"enabled", "lora_cfg", "kernels"}:  # --lora-rank, and a flag for each choice of kernels
            assert f"--{name.replace('_', '-')}" in told
            assert doc[:40] in told
    for name in field_docs(KernelsConfig):
        assert f"--kernels-{name.replace('_', '-')}" in told


def test_explain_tells_mesh_memory_and_plan_and_ends_with_all_figures(world, tmp_path, capsys, no_ranks):
    world.make_model("Qwen3").config.save_pretrained(tmp_path)
    flags = [
        "--ranks",
        "4",
        "--tensor-parallel-size",
        "2",
        "--precision",
        "bfloat16",
        "--device",
        "cuda",
        "--length",
        "16",
    ]
    given = ["explain", str(tmp_path / "config.json"), *flags, "--micro-batch-size", "2", "--device-memory-gib", "1"]
    assert main([*given, "--json"]) == 0
    told = capsys.readouterr().out
    document = json.loads(told.splitlines()[-1])
    assert "Qwen3ForCausalLM" in told
    assert "lm_head.weight" in told
    assert "it fits" in told
    assert {axis["axis"]: axis["ranks"] for axis in document["mesh"] if axis["ranks"] > 1} == {"dp": 2, "tp": 2}
    assert document["batch"] == {
        "rows": 8,
        "tokens": 128,
        "layout": "padded",
        "microbatches": 2,
        "micro_batch_size": 2,
        "micro_batch_tokens": None,
    }
    assert document["memory"]["peak_bytes"] == max(phase["num_bytes"] for phase in document["memory"]["phases"])
    assert {"all_gather", "reduce_scatter"} <= {
        e["kind"] for e in document["memory"]["collectives"] if e["axes"] == "dp"
    }
    assert document["flops"]["model"] > 0
    assert not dist.is_initialized()
    too_small = [*given[:-1], "0.000001"]
    assert main(too_small) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["explain", "llama", "--precison", "float32"], "did you mean --precision?"),
        (["explain", "llama", "--precision", "bfloat"], "did you mean 'bfloat16'?"),
        (["explian", "llama"], "explian"),
        (["explain", "llama", "--sequence-parallel"], "sequence_parallel=True needs tensor_parallel_size > 1"),
        (["explain", "lama"], "lama"),
        (["verify", "llama", "--ranks", "0"], "--ranks must be at least 1"),
    ],
)
def test_misuse_is_refused_in_words_with_code_2(capsys, no_ranks, monkeypatch, argv, told):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, said = refused(capsys, *argv)
    assert code == 2
    assert told in said
    assert "Traceback" not in said


def test_flags_go_before_what_a_command_prefers():
    import argparse

    arguments = argparse.Namespace(micro_batch_size=3)
    assert config_of(DTensorConfig, arguments, micro_batch_size=2).micro_batch_size == 3
    assert config_of(DTensorConfig, argparse.Namespace(), micro_batch_size=2).micro_batch_size == 2


@pytest.mark.slow
def test_verify_proves_a_fused_model_over_two_ranks(world, tmp_path):
    world.make_model("Phi3").config.save_pretrained(tmp_path)
    flags = ["--no-shrink", "--ranks", "2", "--tensor-parallel-size", "2", "--sequence-packing", "--json"]
    command = [sys.executable, "-m", "rl_backends", "verify", str(tmp_path / "config.json"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["holds"]
    assert [check["name"] for check in figures["checks"]] == [
        "log-probabilities",
        "gradients",
        "gradient norm",
        "weights after 3 steps",
        "saved and loaded again",
    ]
    assert all(check["difference"] <= 1e-5 for check in figures["checks"])
    assert "the backend is exact" in done.stdout


def test_verify_finds_a_wrong_gradient_a_missing_part_and_other_weights_in_the_folder(world, tmp_path):
    model = world.make_model("Llama")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    gradients = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
    truth = Plain(logp=torch.full((2, 3), -1.0), gradients=gradients, grad_norm=1.0, weights=weights)
    wrong = dict(gradients) | {"lm_head.weight": gradients["lm_head.weight"] * 1.01}
    kept = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    found = {"logp": truth.logp, "grad_norm": torch.tensor([1.0])}
    for kind, tensors in (("gradients", wrong), ("weights", kept)):
        found[kind] = [(name, (0,) * tensor.ndim, tensor) for name, tensor in tensors.items()]
    model.save_pretrained(tmp_path / "saved")
    checks = {check.name: check for check in compare(tmp_path, truth, [found], tolerance=1e-5)}
    assert {name for name, check in checks.items() if check.holds} == {"log-probabilities", "gradient norm"}
    assert checks["gradients"].where == "lm_head.weight"
    assert checks["gradients"].difference == pytest.approx(0.01, rel=1e-4)
    assert checks["weights after 3 steps"].where == "model.norm.weight"
    assert checks["saved and loaded again"].where == "model.norm.weight"


def test_export_makes_a_folder_of_a_checkpoint(world, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    model = world.make_model("Llama")
    model.save_pretrained(tmp_path / "source")
    backend = DTensorBackend(model, DTensorConfig())
    backend.start_training(OptimizerConfig(lr=1e-2), num_steps=1)
    examples = world.make_examples()
    backend.forward_backward(examples, lambda logp, rows: world.token_loss(logp, rows, num_tokens=1))
    backend.optim_step()
    backend.save_checkpoint(tmp_path / "checkpoint").wait()
    source, target = str(tmp_path / "source"), tmp_path / "exported"
    given = ["export", str(tmp_path / "checkpoint"), "--model", source, "--to", str(target), "--json"]
    assert main(given) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["version"] == 1
    exported = AutoModelForCausalLM.from_pretrained(target)
    torch.testing.assert_close(
        dict(exported.named_parameters()), dict(backend.model.named_parameters()), rtol=0, atol=0
    )
    assert main(given) == 1  # it is there already
    assert "never overwritten" in capsys.readouterr().err
    world.make_model("Llama", intermediate_size=64).save_pretrained(tmp_path / "other")
    code, said = refused(capsys, *given[:3], str(tmp_path / "other"), "--to", str(tmp_path / "new"))
    assert code == 1
    assert "a checkpoint of another model" in said
    assert not (tmp_path / "new").exists()
