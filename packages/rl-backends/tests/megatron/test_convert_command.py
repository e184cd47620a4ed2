"""`rl-backends convert` and `export`: there and back again, bit for bit, and what they say."""

import json
import os
import subprocess
import sys

import conversions
import pytest
import torch

from rl_backends.__main__ import main


@pytest.mark.parametrize(
    ("family", "dtype"), [("Llama", torch.float32), ("Qwen2", torch.bfloat16), ("Qwen3Moe", torch.float16)]
)
def test_a_model_goes_there_and_back_bit_for_bit(world, tmp_path, on_ranks, family, dtype):
    from safetensors.torch import load_file

    model, directory = conversions.save(world, tmp_path / "model", family, dtype), tmp_path / "conversions"
    convert = ["convert", str(model), "--dir", str(directory)]
    assert on_ranks(lambda rank: main(convert), ranks=1) == [0]
    conversion = conversions.only(directory)
    export = ["export", str(conversion), "--to", str(tmp_path / "back")]
    assert on_ranks(lambda rank: main(export), ranks=1) == [0]
    there, back = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert there.keys() == back.keys()
    for name, tensor in there.items():
        assert tensor.dtype == back[name].dtype
        assert torch.equal(tensor.view(torch.uint8), back[name].view(torch.uint8)), name


@pytest.mark.slow
def test_the_command_ends_by_itself_and_tells_where_it_is(world, tmp_path):
    """As a process of its own, with pipes: whatever outlived it would hold them, and this would not end."""
    model = conversions.save(world, tmp_path / "model")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), *sys.path])),
        "NRL_MEGATRON_CHECKPOINT_DIR": str(tmp_path / "conversions"),
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [sys.executable, "-m", "rl_backends", "convert", str(model), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    conversion = conversions.only(tmp_path / "conversions")
    told, figures = ended.stdout.splitlines()
    assert told.startswith(f"{conversion}: {model} (LlamaForCausalLM) as a Megatron checkpoint in float32, 0.1")
    assert json.loads(figures)["folder"] == str(conversion)
    assert f"converting {model} to {conversion}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_cannot_be_converted_or_exported_is_refused_in_words(world, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["convert", str(tmp_path / "nowhere")]) == 2
    assert "a model is converted by one process" in capsys.readouterr().err
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "back")]) == 2
    assert "--model is needed for a checkpoint" in capsys.readouterr().err
    (tmp_path / "conversion.json").write_text("{}")
    assert main(["export", str(tmp_path), "--to", str(tmp_path / "back")]) == 1
    assert "conversion.json is damaged" in capsys.readouterr().err


def test_a_conversion_is_not_exported_as_a_model_with_another_vocabulary(world, tmp_path, on_ranks):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"
    other = conversions.save(world, tmp_path / "other", vocab_size=70)

    def there_and_back(rank):
        assert main(["convert", str(model), "--dir", str(directory)]) == 0
        conversion = str(conversions.only(directory))
        return main(["export", conversion, "--model", str(other), "--to", str(tmp_path / "back")])

    assert on_ranks(there_and_back, ranks=1) == [1]
    assert not (tmp_path / "back").exists()
