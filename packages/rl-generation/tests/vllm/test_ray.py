"""Real vLLM of a real Ray actor, in processes below it."""

import os
import sys
from importlib.util import find_spec

import pytest

for name in ("vllm", "ray"):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from watching import living

from rl_generation.requests import Sampling

INHERITED = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "HF_HUB_OFFLINE")
GREEDY = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)


class EngineActor:
    """What a launcher would put on a device: an engine, and nothing that Ray must know."""

    def start(self, options):
        from rl_generation.vllm import VllmEngine

        self.engine = VllmEngine(options, version=6)
        return self.engine.process_ids

    def generate(self, prompts, sampling):
        return self.engine.generate(prompts, sampling)

    def scale_and_commit(self, factor, version):
        answers = self.engine.collective_rpc("scale_norm", args=(factor,))
        self.engine.commit_version(version)
        return answers

    def close(self):
        self.engine.close()


@pytest.fixture(scope="module")
def actor():
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else it writes a token into the home folder
    import ray

    environment = {name: value for name, value in os.environ.items() if name in INHERITED or name.startswith("VLLM_")}
    paths = os.pathsep.join(path for path in sys.path if path)
    ray.init(
        "local",  # whatever else of Ray runs on this machine
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment | {"PYTHONPATH": paths}},
    )
    handle = ray.remote(num_cpus=1)(EngineActor).remote()
    yield lambda method, *args, **others: ray.get(getattr(handle, method).remote(*args, **others), timeout=500)
    ray.shutdown()


@pytest.mark.slow  # in every change engines in actors answer and are refitted in tests-integration/with_ray
def test_an_engine_in_an_actor_answers_takes_new_weights_and_ends(actor, checkpoints):
    path, model = checkpoints("qwen3"), tiny.policy("qwen3", 0)
    prompts = tiny.prompts(3)
    options = tiny.options(path, worker_extension_cls="weights_worker.WeightsWorker")
    processes = actor("start", options)
    assert processes
    for version, factor in ((6, 1.0), (7, 1.5)):
        if factor != 1.0:
            actor("scale_and_commit", factor, version)
            model.model.norm.weight.mul_(factor)
        for prompt, rollout in zip(prompts, actor("generate", prompts, GREEDY), strict=True):
            logits = tiny.logits(model, prompt, rollout.tokens)
            assert list(rollout.tokens) == logits.argmax(-1).tolist()
            assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=1e-4)
            assert rollout.version == version
    actor("close")
    assert not living(processes)
