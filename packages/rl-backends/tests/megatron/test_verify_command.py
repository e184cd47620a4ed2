"""`rl-backends verify` and `explain` of the Megatron backend: what holds, what does not, what is refused."""

import inspect
import json
import os
import subprocess
import sys
from importlib import metadata

import pytest

from rl_backends import OptimizerConfig
from rl_backends.__main__ import main
from rl_backends.commands import megatron_layout
from rl_backends.commands import verify as command
from rl_backends.commands.flags import field_docs
from rl_backends.megatron.architecture import read_architecture
from rl_backends.megatron.config import MegatronConfig

CHECKS = [
    "log-probabilities",
    "gradients",
    "gradient norm",
    "weights after 3 steps",
    "saved and loaded again",
    "there and back",
]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LAYOUTS = {
    "PP2, 2 chunks": (
        "Llama",
        {"num_hidden_layers": 4},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    ),
    "tensor, padded vocabulary": ("Llama", {}, {"tensor_model_parallel_size": 2}),
    "pipeline, tied": (
        "Qwen2",
        {"tie_word_embeddings": True},
        {"pipeline_model_parallel_size": 2, "precision": "bfloat16"},
    ),
    "experts, shared state": (
        "Qwen3Moe",
        EXPERTS,
        {"expert_model_parallel_size": 2, "use_distributed_optimizer": True},
    ),
}


@pytest.fixture
def verify(world, tmp_path, capsys, monkeypatch, on_ranks):
    """`verify(family, *flags)`: exit code and figures; ranks are forked, and `broken()` is called on each before."""

    def run(family, *flags, broken=lambda: None, **config):
        def one(task):
            broken()
            return command.result_of_rank(task)

        def run_ranks(task, *, deadline_s):
            return on_ranks(lambda _: one(task), ranks=task["ranks"])

        monkeypatch.setattr("rl_backends.commands.verify.run_ranks", run_ranks)
        world.make_model(family, **config).config.save_pretrained(tmp_path)
        given = ["verify", str(tmp_path / "config.json"), "--backend", "megatron", "--ranks", "2", "--json", *flags]
        code = main(given)
        return code, json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.mark.parametrize(
    ("family", "config", "flags"),
    [
        ("Llama", {}, ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--no-shrink"]),
        ("Qwen2", {"tie_word_embeddings": True}, ["--pipeline-model-parallel-size", "2"]),
        ("Mistral", {"sliding_window": 4096}, ["--context-parallel-size", "2", "--micro-batch-size", "1"]),
        (
            "Qwen3Moe",
            EXPERTS,
            ["--expert-model-parallel-size", "2", "--use-distributed-optimizer", "--sequence-packing"],
        ),
    ],
)
def test_the_backend_is_proved_against_transformers(verify, family, config, flags):
    code, figures = verify(family, *flags, **config)
    assert [check["name"] for check in figures["checks"]] == CHECKS
    assert all(check["difference"] <= 1e-5 for check in figures["checks"]), figures["checks"]
    assert [check["difference"] for check in figures["checks"][-2:]] == [0.0, 0.0]
    assert code == 0
    assert figures["holds"]


def test_a_rotary_base_that_is_nearly_right_is_found(verify):
    """As if 10,000 were read as 10,500."""
    from rl_backends.megatron import rope

    def broken():
        right = rope._base
        rope._base = lambda hf_config: right(hf_config) * 1.05

    code, figures = verify("Llama", "--tensor-model-parallel-size", "2", broken=broken)
    assert code == 1
    wrong = {check["name"]: check["difference"] for check in figures["checks"] if not check["holds"]}
    assert {"log-probabilities", "gradients"} <= wrong.keys() <= set(CHECKS[:4])
    assert wrong["log-probabilities"] > 1e-4


def test_gradients_that_one_rank_keeps_to_itself_are_found(verify):
    def broken():
        from megatron.core import distributed

        distributed.finalize_model_grads = lambda *_: None

    code, figures = verify("Llama", broken=broken)
    assert code == 1
    held = {check["name"] for check in figures["checks"] if check["holds"]}
    assert held == {"log-probabilities", "there and back"}  # what is saved is one rank's


@pytest.mark.slow
def test_the_command_proves_it_with_processes_of_its_own(world, tmp_path):
    world.make_model("Qwen3").config.save_pretrained(tmp_path)
    flags = ["--backend", "megatron", "--ranks", "2", "--tensor-model-parallel-size", "2", "--no-shrink", "--json"]
    command = [sys.executable, "-m", "rl_backends", "verify", str(tmp_path / "config.json"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["holds"]
    assert "the backend is exact" in done.stdout


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_every_field_of_the_backend_has_a_flag_with_its_docstring(capsys, command):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--backend", "megatron", "--help"])
    told = " ".join(capsys.readouterr().out.split())
    never = {"enabled", "lora_cfg", "peak_flops_per_s", "timeout_s"}
    never |= {"checkpoint_dir"} if command == "verify" else set()
    own = {"device"} if command == "verify" else set()  # a flag of the command itself
    for name, doc in field_docs(MegatronConfig).items():
        if name in own:
            continue
        flag = f"--{name.replace('_', '-')}"
        assert (flag in told) == (name not in never), name
        assert name in never or doc[:40] in told
    assert "--data-parallel-replicate-size" not in told


@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_bytes_are_those_that_ranks_hold(world, on_ranks, layout):
    family, overrides, sizes = LAYOUTS[layout]
    model = world.make_model(family, vocab_size=67, **overrides)
    config = MegatronConfig(**sizes)

    def held(rank):
        from rl_backends.megatron.backend import MegatronBackend
        from rl_backends.megatron.optimizer import masters_of

        backend = MegatronBackend(world.make_model(family, vocab_size=67, **overrides), config)
        backend.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
        parameters = list(backend.model.parameters())
        found = {
            "numbers": sum(each.numel() for each in parameters),
            "weights": sum(each.numel() * each.element_size() for each in parameters),
            "gradients": sum(each.main_grad.numel() * each.main_grad.element_size() for each in parameters),
            "optimizer": sum(
                master.tensor.numel() * (8 + 4 * master.is_copy) for master in masters_of(backend._optimizers)
            ),
            "layers": [
                layer.layer_number - 1 for chunk in backend._distributed.chunks for layer in chunk.decoder.layers
            ],
        }
        backend.close()
        return found

    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stages = megatron_layout.stages_of(read_architecture(model.config), shapes, config, ranks=2)
    optimizer_bytes = []
    for rank, found in enumerate(on_ranks(held, ranks=2)):
        (stage,) = [stage for stage in stages if rank in stage.ranks]
        assert stage.numbers == found["numbers"]
        assert stage.weight_bytes == found["weights"]
        assert stage.gradient_bytes == found["gradients"]
        assert list(stage.layers) == found["layers"]
        optimizer_bytes.append(found["optimizer"] / stage.optimizer_bytes)
    # a count of steps for each parameter, and ranges of unequal length, are left out
    assert sum(optimizer_bytes) / 2 == pytest.approx(1.0, abs=0.01)


def test_explain_tells_layout_memory_and_where_conversions_lie(world, tmp_path, capsys, monkeypatch):
    model, directory = tmp_path / "model", tmp_path / "conversions"
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", str(directory))
    world.make_model("Llama", vocab_size=67).save_pretrained(model)
    flags = [
        "--backend",
        "megatron",
        "--ranks",
        "8",
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
        "--precision",
        "bfloat16",
        "--json",
    ]
    assert main(["explain", str(model), *flags, "--use-distributed-optimizer", "--device-memory-gib", "1"]) == 0
    told = capsys.readouterr().out
    document = json.loads(told.splitlines()[-1])
    assert "tp    2  share each matrix multiplication\n" in told
    assert "dp    2  have rows of their own, and sum gradients\n" in told
    assert "ranks 4 to 7: layers 1 to 1, the last norm and the head" in told
    assert f"a Megatron-LM checkpoint to {directory} (NRL_MEGATRON_CHECKPOINT_DIR says so)" in told
    assert not directory.exists()
    assert document["memory"]["fullest_rank_bytes"] == max(stage["bytes"] for stage in document["stages"])
    fullest = max(document["stages"], key=lambda stage: stage["bytes"])
    assert fullest["optimizer_bytes"] == 12 * -(-fullest["numbers"] // 2)
    assert main(["explain", str(model), *flags, "--device-memory-gib", "0.000001"]) == 1
    assert "it does not fit" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_every_reason_against_a_layout_is_told_at_once(world, tmp_path, capsys, command):
    world.make_model("Llama", attention_bias=True).config.save_pretrained(tmp_path)
    flags = [
        "--backend",
        "megatron",
        "--ranks",
        "6",
        "--tensor-model-parallel-size",
        "4",
        "--pipeline-model-parallel-size",
        "3",
    ]
    assert main([command, str(tmp_path / "config.json"), *flags]) == 2
    said = capsys.readouterr().err
    assert "attention_bias=True" in said
    assert "6 ranks cannot be cut into groups of 12" in said
    world.make_model("Llama").config.save_pretrained(tmp_path)
    assert main([command, str(tmp_path / "config.json"), *flags]) == 2
    said = capsys.readouterr().err
    assert "num_hidden_layers=2 of the model cannot be shared out evenly to 3 stages" in said
    assert "num_key_value_heads=2 of the model is no multiple of tensor_model_parallel_size=4" in said
    assert "6 ranks cannot be cut into groups of 12" in said
    assert main([command, str(tmp_path / "config.json"), "--backend", "megatron", "--sequence-parallel"]) == 2
    assert "sequence_parallel=True needs tensor_model_parallel_size > 1" in capsys.readouterr().err


@pytest.mark.parametrize("flag", [["--data-parallel-replicate-size", "2"], ["--backend", "megaton"]])
def test_a_flag_of_the_other_backend_and_an_unknown_backend_are_misuse(capsys, flag):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "llama", "--backend", "megatron", *flag])
    assert "Traceback" not in capsys.readouterr().err


def test_explain_needs_no_megatron_and_says_that_training_does(world, tmp_path, capsys, monkeypatch):
    world.make_model("Llama").config.save_pretrained(tmp_path)
    monkeypatch.setattr("rl_backends.dry_run.explanation.version", without_megatron)
    assert main(["explain", str(tmp_path / "config.json"), "--backend", "megatron"]) == 0
    told = capsys.readouterr().out
    assert 'megatron-core is not installed, and training needs it: pip install "rl-backends[megatron]"' in told
    assert "one rank: nothing is shared out" in told


def test_verify_without_megatron_says_what_to_install(world, tmp_path):
    hidden = f"import importlib.metadata as metadata\n{inspect.getsource(without_megatron)}\n"
    (tmp_path / "sitecustomize.py").write_text(f"{hidden}found = metadata.version\nmetadata.version = without_megatron")
    world.make_model("Llama").config.save_pretrained(tmp_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "rl_backends", "verify", str(tmp_path / "config.json"), "--backend", "megatron"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 2, done.stderr
    assert "the Megatron backend cannot be used: megatron-core is not installed" in done.stderr
    assert 'Install: pip install "rl-backends[megatron]"' in done.stderr
    assert "Traceback" not in done.stderr


found = metadata.version


def without_megatron(name):
    if name == "megatron-core":
        raise metadata.PackageNotFoundError(name)
    return found(name)
