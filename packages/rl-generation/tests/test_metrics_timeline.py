"""Claims about metrics over time: differences add up, errors reach the caller, no thread stays, the text parses."""

import json
import re
import threading
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_generation.engine import EngineMetrics
from rl_generation.errors import EngineDeadError
from rl_generation.metrics_timeline import MetricsSample, MetricsSummary, MetricsTimeline, to_prometheus
from rl_generation.requests import Sampling
from rl_generation.transformers_engine import TransformersEngine

COUNTS = st.integers(0, 10_000)
INCREASES = st.lists(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS, st.floats(0.01, 100.0)), min_size=1, max_size=8)


def reading(time_s, *, generated=0, prompt=0, cached=0, preemptions=0, **others):
    state = {"running": 0, "waiting": 0, "cache_usage": 0.0, "version": 0, "finished": {}} | others
    counts = {"generated_tokens": generated, "prompt_tokens": prompt, "cached_prompt_tokens": cached}
    return EngineMetrics(time_s=time_s, preemptions=preemptions, **counts, **state)


class Scripted:
    """An engine that shows what it was told to, and says when it showed the last."""

    def __init__(self, readings):
        self.readings = list(readings)
        self.shown = 0
        self.all_shown = threading.Event()

    def metrics(self):
        shown = self.readings[min(self.shown, len(self.readings) - 1)]
        self.shown += 1
        if self.shown >= len(self.readings):
            self.all_shown.set()
        if isinstance(shown, BaseException):
            raise shown
        return shown


def watched(readings, **options):
    """A timeline of all of these."""
    engine = Scripted(readings)
    with MetricsTimeline(engine, interval_s=0.001, stop_timeout_s=60, **options) as timeline:
        assert engine.all_shown.wait(60)
    return timeline


def watching_threads():
    return [each for each in threading.enumerate() if each.name == "rl-generation-metrics"]


def test_rates_are_differences_over_the_engines_own_time():
    first = reading(10.0, generated=100, prompt=50, cached=10, preemptions=1, finished={"stop": 2})
    state = {"running": 3, "waiting": 4, "cache_usage": 0.5, "version": 7, "finished": {"stop": 5, "length": 1}}
    sample = MetricsSample.between(first, reading(14.0, generated=300, prompt=90, cached=40, preemptions=2, **state))
    assert (sample.generated_tokens, sample.generated_tokens_per_s) == (200, 50.0)
    assert (sample.prompt_tokens, sample.prompt_tokens_per_s) == (40, 10.0)
    assert sample.prefix_cache_hit_share == 30 / 40
    assert (sample.running, sample.waiting, sample.cache_usage, sample.version) == (3, 4, 0.5, 7)
    assert (sample.preemptions, sample.finished, sample.restarted) == (1, {"stop": 3, "length": 1}, False)


def test_without_prompts_there_is_no_share_of_hits():
    assert MetricsSample.between(reading(0.0), reading(1.0, generated=5)).prefix_cache_hit_share is None


def test_counters_that_fell_began_anew():
    before = reading(1.0, generated=500, prompt=100, finished={"stop": 9})
    sample = MetricsSample.between(before, reading(2.0, generated=30, prompt=120, finished={"stop": 1}))
    assert sample.restarted
    assert (sample.generated_tokens, sample.prompt_tokens, sample.finished) == (30, 120, {"stop": 1})


def test_readings_out_of_order_are_refused():
    with pytest.raises(ValueError, match="is not later than"):
        MetricsSample.between(reading(2.0), reading(2.0))


@given(increases=INCREASES)
def test_samples_add_up_to_what_happened_between_the_ends(increases):
    readings, time_s, counts = [reading(0.0)], 0.0, [0, 0, 0, 0]
    for *more, seconds in increases:
        time_s += seconds
        counts = [a + b for a, b in zip(counts, more, strict=True)]
        generated, prompt, cached, preemptions = counts
        readings.append(reading(time_s, generated=generated, prompt=prompt, cached=cached, preemptions=preemptions))
    samples = [MetricsSample.between(a, b) for a, b in pairwise(readings)]
    summary = MetricsSummary.of(samples)
    assert (summary.generated_tokens, summary.prompt_tokens, summary.preemptions) == (counts[0], counts[1], counts[3])
    assert summary.generated_tokens_per_s == pytest.approx(counts[0] / time_s)
    assert summary.samples == len(increases)
    assert summary.restarts == 0


def test_a_summary_tells_peaks_and_averages_over_time():
    states = [
        reading(0.0),
        reading(1.0, running=8, waiting=2, cache_usage=0.9, finished={"stop": 1}),
        reading(4.0, running=2, cache_usage=0.3, finished={"stop": 2, "abort": 1}),
    ]
    summary = MetricsSummary.of([MetricsSample.between(a, b) for a, b in pairwise(states)])
    assert summary.mean_running == (8 * 1 + 2 * 3) / 4
    assert (summary.max_running, summary.max_waiting, summary.max_cache_usage) == (8, 2, 0.9)
    assert summary.finished == {"stop": 2, "abort": 1}


def test_a_timeline_reads_until_its_block_is_left_and_leaves_no_thread():
    timeline = watched([reading(float(t), generated=10 * t) for t in range(5)])
    assert [sample.generated_tokens_per_s for sample in timeline.samples] == [10.0] * 4
    assert timeline.summary().generated_tokens == 40
    assert not watching_threads()


def test_a_block_shorter_than_the_interval_has_a_sample():
    engine = Scripted([reading(0.0), reading(0.5, generated=7)])
    with MetricsTimeline(engine, interval_s=3600.0, stop_timeout_s=60) as timeline:
        pass
    assert [sample.generated_tokens for sample in timeline.samples] == [7]
    assert not watching_threads()


def test_readings_at_the_same_moment_are_one():
    timeline = watched([reading(0.0), reading(1.0, generated=1), reading(1.0, generated=2), reading(2.0, generated=5)])
    assert [sample.generated_tokens for sample in timeline.samples] == [2, 3]


def test_an_engine_that_dies_ends_the_block_with_its_error():
    with pytest.raises(EngineDeadError, match="killed"):
        watched([reading(0.0), reading(1.0), EngineDeadError("killed")])
    assert not watching_threads()


def test_an_engine_that_is_dead_is_told_at_once():
    with pytest.raises(EngineDeadError, match="killed"), MetricsTimeline(Scripted([EngineDeadError("killed")])):
        pytest.fail("the block must not begin")
    assert not watching_threads()


def test_what_the_block_raises_comes_first_and_keeps_word_of_the_other():
    engine = Scripted([reading(0.0), EngineDeadError("killed")])
    with pytest.raises(KeyError) as caught, MetricsTimeline(engine, interval_s=0.001):
        {}["prompt" if engine.all_shown.wait(60) else "nothing was read"]
    assert "killed" in caught.value.__notes__[0]


def test_a_reading_that_hangs_ends_in_an_error():
    class Stuck(Scripted):
        asked, let_go = threading.Event(), threading.Event()

        def metrics(self):
            if self.shown == 1:
                self.asked.set()
                assert self.let_go.wait(60)
            return super().metrics()

    engine = Stuck([reading(0.0), reading(1.0)])
    with (
        pytest.raises(TimeoutError, match=r"stop_timeout_s=0\.05"),
        MetricsTimeline(engine, interval_s=0.001, stop_timeout_s=0.05),
    ):
        assert engine.asked.wait(60)
    engine.let_go.set()
    for thread in watching_threads():
        thread.join(60)
    assert not watching_threads()


def test_a_timeline_is_entered_once():
    timeline = watched([reading(0.0), reading(1.0)])
    with pytest.raises(RuntimeError, match="entered once"):
        timeline.__enter__()


def test_nothing_to_sum_up_is_said():
    with pytest.raises(ValueError, match="nothing to sum up"):
        MetricsTimeline(Scripted([reading(0.0)])).summary()


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_must_be_a_time(interval_s):
    with pytest.raises(ValueError, match="interval_s must be a positive number of seconds"):
        MetricsTimeline(Scripted([reading(0.0)]), interval_s=interval_s)


def test_a_line_of_json_for_each_sample(tmp_path):
    timeline = watched([reading(0.0), reading(2.0, generated=10, finished={"stop": 1}), reading(3.0, generated=10)])
    timeline.to_jsonl(tmp_path / "metrics.jsonl")
    first, second = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (first["generated_tokens_per_s"], first["finished"]) == (5.0, {"stop": 1})
    assert (second["start_s"], second["end_s"], second["prefix_cache_hit_share"]) == (2.0, 3.0, None)


def test_a_timeline_beside_a_call_counts_what_the_call_returns(tiny):
    engine = TransformersEngine(tiny("llama"), stop_token_ids=[2], pad_token_id=0, max_batch_size=4)
    with MetricsTimeline(engine, interval_s=0.001, stop_timeout_s=60) as timeline:
        rollouts = engine.generate([[5, 6, 7], [8, 9]], Sampling(max_new_tokens=12, n=4, seed=3))
    summary = timeline.summary()
    assert summary.generated_tokens == sum(len(each.tokens) for each in rollouts)
    assert sum(summary.finished.values()) == len(rollouts) == 8
    assert summary.prompt_tokens == 4 * (3 + 2)
    assert 0 < summary.prefix_cache_hit_share < 1
    assert (summary.restarts, timeline.samples[-1].running) == (0, 0)


def parsed(text):
    """Family → its type, and (name, labels) → value, of Prometheus' text; fails on what the format forbids."""
    types, values, seen = {}, {}, set()
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        header = re.fullmatch(r"# (HELP|TYPE) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line)
        if header:
            assert header.group(1, 2) not in seen
            seen.add(header.group(1, 2))
            if header[1] == "TYPE":
                types[header[2]] = header[3]
            continue
        name, labels, value = re.fullmatch(r"([a-z_]+)\{((?:[a-z_]+=\"(?:[^\"\\]|\\.)*\",?)*)\} (\S+)", line).groups()
        assert ("HELP", name) in seen
        found = re.findall(r"([a-z_]+)=\"((?:[^\"\\]|\\.)*)\"", labels)
        values[name, tuple((key, unescaped(text)) for key, text in found)] = float(value)
    return types, values


def unescaped(text):
    return re.sub(r"\\(.)", lambda found: {"n": "\n"}.get(found[1], found[1]), text)


def test_prometheus_gets_every_figure_with_its_type():
    state = {"running": 3, "waiting": 4, "cache_usage": 0.25, "version": 9, "finished": {"stop": 5, "killed": 1}}
    metrics = reading(1.0, generated=100, prompt=50, cached=10, preemptions=2, **state)
    types, values = parsed(to_prometheus(metrics, model_name="tiny"))
    label = (("model_name", "tiny"),)
    assert values == {
        ("rl_generation_answers_running", label): 3,
        ("rl_generation_answers_waiting", label): 4,
        ("rl_generation_cache_usage_ratio", label): 0.25,
        ("rl_generation_weight_version", label): 9,
        ("rl_generation_prompt_tokens_total", label): 50,
        ("rl_generation_cached_prompt_tokens_total", label): 10,
        ("rl_generation_generated_tokens_total", label): 100,
        ("rl_generation_preemptions_total", label): 2,
        ("rl_generation_answers_finished_total", (*label, ("finish_reason", "stop"))): 5,
        ("rl_generation_answers_finished_total", (*label, ("finish_reason", "length"))): 0,
        ("rl_generation_answers_finished_total", (*label, ("finish_reason", "abort"))): 0,
        ("rl_generation_answers_finished_total", (*label, ("finish_reason", "killed"))): 1,
    }
    assert all(types[name] == ("counter" if name.endswith("_total") else "gauge") for name, _ in values)


@given(model_name=st.text(alphabet=st.one_of(st.sampled_from('\\"\n{},= n'), st.characters(codec="utf-8"))))
def test_any_model_name_survives_prometheus(model_name):
    _, values = parsed(to_prometheus(reading(1.0), model_name=model_name))
    assert {labels[0] for _, labels in values} == {("model_name", model_name)}
