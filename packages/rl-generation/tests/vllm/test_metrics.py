"""Claims about metrics of real vLLM: they count what a call returns, and Prometheus reads the text."""

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from prometheus_client.parser import text_string_to_metric_families

from rl_generation.engine import to_prometheus
from rl_generation.requests import Sampling
from rl_generation.vllm import VllmEngine


def test_metrics_count_what_a_call_returns_and_prometheus_reads_them(checkpoints):
    prompts = tiny.prompts(6)
    with VllmEngine(tiny.options(checkpoints("llama"))) as engine:
        rollouts = engine.generate(prompts, Sampling(max_new_tokens=16, n=2, seed=3))
        metrics = engine.metrics()
    generated = sum(len(each.tokens) for each in rollouts)
    assert metrics.generated_tokens == generated
    assert metrics.prompt_tokens == 2 * sum(map(len, prompts))
    assert sum(metrics.finished.values()) == len(rollouts) == 12
    text = to_prometheus(metrics, model_name='a "tiny" \\ model')
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["rl_generation_generated_tokens"].type == "counter"
    assert families["rl_generation_answers_running"].type == "gauge"
    (sample,) = families["rl_generation_generated_tokens"].samples
    assert (sample.value, sample.labels) == (generated, {"model_name": 'a "tiny" \\ model'})
    finished = {each.labels["finish_reason"]: each.value for each in families["rl_generation_answers_finished"].samples}
    assert {reason: count for reason, count in finished.items() if count} == metrics.finished
