"""Claims about metrics of real vLLM: a timeline counts what a call returns, and Prometheus reads the text."""

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from prometheus_client.parser import text_string_to_metric_families

from rl_generation.metrics_timeline import MetricsTimeline, to_prometheus
from rl_generation.requests import Sampling
from rl_generation.vllm import VllmEngine


def test_a_timeline_beside_a_call_counts_what_the_call_returns_and_prometheus_reads_it(checkpoints):
    prompts = tiny.prompts(6)
    with (
        VllmEngine(tiny.options(checkpoints("llama"))) as engine,
        MetricsTimeline(engine, interval_s=0.01, stop_timeout_s=60) as timeline,
    ):
        rollouts = engine.generate(prompts, Sampling(max_new_tokens=16, n=2, seed=3))
        text = to_prometheus(engine.metrics(), model_name='a "tiny" \\ model')
    summary = timeline.summary()
    generated = sum(len(each.tokens) for each in rollouts)
    assert summary.generated_tokens == generated
    assert summary.prompt_tokens == 2 * sum(map(len, prompts))
    assert sum(summary.finished.values()) == len(rollouts) == 12
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["rl_generation_generated_tokens"].type == "counter"
    assert families["rl_generation_answers_running"].type == "gauge"
    (sample,) = families["rl_generation_generated_tokens"].samples
    assert (sample.value, sample.labels) == (generated, {"model_name": 'a "tiny" \\ model'})
    finished = {each.labels["finish_reason"]: each.value for each in families["rl_generation_answers_finished"].samples}
    assert {reason: count for reason, count in finished.items() if count} == summary.finished
