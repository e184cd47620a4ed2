"""A run whose engine is real vLLM in `rl-launcher serve`: it samples over HTTP, and each step is refitted there."""

import json
import re
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

RECIPE = """
run_dir: {folder}/run
cpu_threads: 1
policy:
  model_name: rl_launcher.quickstart.tiny_model:build
  generation:
    max_new_tokens: 9
    backend: vllm
    vllm_cfg: {{precision: float32, max_model_len: 64, kv_cache_memory_bytes: 33554432}}
data: {{source: "rl_launcher.quickstart.sort_digits:dataset"}}
env: {{reward: "{folder}/reward.py:score"}}
evaluation: {{max_prompts: 20, samples: 2}}
grpo:
  max_num_steps: 4
  steps_per_generation: 2
  num_prompts: 8
  optimizer: {{lr: 3.0e-4}}
"""

REWARD = """
def score(completions, answer):
    return [len(set(completion)) / 9 for completion in completions]  # in which random answers differ
"""


def test_a_served_vllm_has_the_weights_of_each_step_and_its_logp_are_the_trainers(tmp_path: Path) -> None:
    recipe, token = tmp_path / "recipe.yaml", tmp_path / "token"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    (tmp_path / "reward.py").write_text(REWARD)
    token.write_text("a token")
    token.chmod(0o600)
    rl_launcher = [sys.executable, "-m", "rl_launcher"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = {"address": f"tcp://127.0.0.1:{listener.getsockname()[1]}", "token_file": str(token)}
    asked = [f"policy.generation.remote={json.dumps(remote)}"]
    log = tmp_path / "server.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            [*rl_launcher, "serve", str(recipe), *asked, "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    assert server.stdout is not None
    try:
        while not (found := re.fullmatch(r"engine: (\S+)\n", line := server.stdout.readline())):
            assert line, log.read_text()  # vLLM prints to stdout, too
        done = subprocess.run(
            [*rl_launcher, "run", str(recipe), *asked], check=False, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text()
    finally:
        server.terminate()
        try:
            server.wait(60)
        finally:
            server.kill()
            server.stdout.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "token_mult_prob_error" in row]
    assert [row["step"] for row in steps] == [2, 4]
    assert all(row["token_mult_prob_error"] < 1.0001 for row in steps), "the engine holds what the trainer has"
    refits = [json.loads(line) for line in (tmp_path / "run" / "refits.jsonl").read_text().splitlines()]
    assert [(refit["version"], refit["versions"]) for refit in refits] == [(2, {found[1]: 2}), (4, {found[1]: 4})]
