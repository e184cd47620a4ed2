"""`RemoteEngine` over a real `vllm serve`, in a process of its own."""

import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

for needed in ("vllm", "httpx"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from transformers import AutoTokenizer

from rl_generation import EngineDeadError, EngineOptionError, RemoteEngine, Sampling, TransformersEngine, verify_logp

pytestmark = pytest.mark.slow  # vLLM's server takes a minute to start

PATIENCE_S = 300.0
PROMPTS = tiny.prompts(4)


@pytest.fixture(scope="module")
def serve(checkpoints):
    """Starts `vllm serve` on a port, once its engine could be made there."""
    started = []

    def start(port, *flags):
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", checkpoints("llama"), "--dtype=float32"]
        command += ["--served-model-name=tiny", "--host=127.0.0.1", f"--port={port}", "--max-model-len=256"]
        command += ["--enforce-eager", f"--kv-cache-memory-bytes={64 << 20}", *flags]
        started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return f"http://127.0.0.1:{port}"

    yield start
    for process in started:
        process.terminate()
    for process in started:
        process.wait(60)


def engine_at(url, **options):
    """An engine, as soon as the server is up."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return RemoteEngine(url, **options)
        except EngineDeadError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def test_a_vllm_with_processed_logp_answers_as_the_embedded_engine_does(serve, checkpoints, free_port):
    tokenizer = AutoTokenizer.from_pretrained(checkpoints("llama"))
    url = serve(free_port, "--logprobs-mode=processed_logprobs")
    with engine_at(url, tokenizer=tokenizer, vocab_size=tiny.VOCAB_SIZE, version=5) as engine:
        model = tiny.policy("llama", 0)
        embedded = TransformersEngine(model, stop_token_ids=[tiny.EOS], pad_token_id=0, tokenizer=tokenizer)
        greedy = Sampling(max_new_tokens=24, temperature=0.0)
        there, here = engine.generate(PROMPTS, greedy), embedded.generate(PROMPTS, greedy)
        assert [r.tokens for r in there] == [r.tokens for r in here]
        assert [r.logp for r in there] == [pytest.approx(r.logp, abs=1e-4) for r in here]
        seeded = Sampling(max_new_tokens=24, n=3, temperature=0.8, top_p=0.9, seed=5)
        first, again = engine.generate(PROMPTS, seeded), engine.generate(PROMPTS, seeded)
        assert [r.tokens for r in first] == [r.tokens for r in again]
        assert {r.version for r in first} == {5}
        assert verify_logp(engine, model).max_abs_difference < 1e-3
        with pytest.raises(EngineOptionError, match="start it with --logprobs-mode raw_logprobs"):
            RemoteEngine(url, vocab_size=tiny.VOCAB_SIZE, logp_of="raw")


def test_a_vllm_as_it_comes_is_refused_for_its_raw_logp_unless_they_are_asked_for(serve, free_port):
    url = serve(free_port)
    with engine_at(url, vocab_size=tiny.VOCAB_SIZE, logp_of="raw") as engine:
        assert engine.generate(PROMPTS, Sampling(max_new_tokens=4))
    with pytest.raises(EngineOptionError, match="start it with --logprobs-mode processed_logprobs"):
        RemoteEngine(url, vocab_size=tiny.VOCAB_SIZE)


@pytest.fixture
def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]
