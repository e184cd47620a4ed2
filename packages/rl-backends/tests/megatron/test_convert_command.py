"""`rl-backends convert`: what it says, and that it ends."""

import json
import os
import subprocess
import sys

import conversions
import pytest

from rl_backends.__main__ import main


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


def test_what_cannot_be_converted_is_refused_in_words(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["convert", str(tmp_path / "nowhere")]) == 2
    assert "a model is converted by one process" in capsys.readouterr().err
