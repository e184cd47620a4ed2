"""Claims about metrics as Prometheus' text: every figure is there, and the text parses."""

import re

from hypothesis import given
from hypothesis import strategies as st

from rl_generation.engine import EngineMetrics, to_prometheus


def reading(time_s, *, generated=0, prompt=0, cached=0, preemptions=0, **others):
    state = {"running": 0, "waiting": 0, "cache_usage": 0.0, "version": 0, "finished": {}} | others
    counts = {"generated_tokens": generated, "prompt_tokens": prompt, "cached_prompt_tokens": cached}
    return EngineMetrics(time_s=time_s, preemptions=preemptions, **counts, **state)


def parsed(text):
    """Family → its type, and (name, labels) → value, of Prometheus' text; fails on what the format forbids."""
    types, values = {}, {}
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        header = re.fullmatch(r"# TYPE ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)", line)
        if header:
            assert header[1] not in types
            types[header[1]] = header[2]
            continue
        name, labels, value = re.fullmatch(r"([a-z_]+)\{((?:[a-z_]+=\"(?:[^\"\\]|\\.)*\",?)*)\} (\S+)", line).groups()
        assert name in types
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
