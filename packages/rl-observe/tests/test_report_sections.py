"""The parts of the report beside the curves: steps over time, tokens, conditions, refits, machine; and comparisons.

`python test_report_sections.py FOLDER` leaves a report and a comparison there to look at.
"""

import json
import math
import random
import re
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_observe import RunDirectory, RunDirectoryError, compare_runs, token_sample, write_report

sys.path.insert(0, str(Path(__file__).parent))
from test_report import ATTACK, Elements, charts_on, synthetic_run


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def spans(steps=40, *, collectors=0):
    at = 3.0
    for step in range(1, steps + 1):
        start = at
        for name, seconds in (("generate", 0.4), ("reward", 0.05), ("train", 0.5), ("refit", 0.06)):
            yield {"name": name, "lane": "trainer", "start_s": at, "end_s": at + seconds, "stage": "grpo", "step": step}
            at += seconds
        yield {"name": "step", "lane": "trainer", "start_s": start, "end_s": at, "stage": "grpo", "step": step}
        for number in range(collectors):
            begin = start + 0.1 * number
            yield {"name": "generate", "lane": f"collector-{number}", "start_s": begin, "end_s": begin + 0.9}


def sample(text="Sort 41: 14", *, prompt=9, logp=-0.1, reward=1.0, trained=None):
    tokens = list(text.encode())
    response = [index >= prompt for index in range(len(tokens))]
    return {
        "when": "after",
        "stage": "grpo",
        "prompt": text[:prompt],
        "expected": "14",
        "response": text[prompt:],
        "reward": reward,
        "truncated": False,
        "tokens": token_sample(
            tokens,
            logp=[logp * (index % 7 + 1) if chosen else 0.0 for index, chosen in enumerate(response)],
            response=response,
            turns=[0 if chosen else -1 for chosen in response],
            decode=lambda each: bytes(each).decode(errors="replace"),
            trained=trained,
        ),
    }


def refits(count=12, *, digest="9f2a" * 16):
    generator = random.Random(1)
    for version in range(1, count + 1):
        seconds = {"prepare": 0.001, "transfer": 0.01 + 0.003 * generator.random(), "verify": 0.004}
        row = {
            "stage": "grpo",
            "step": version,
            "version": version,
            "bytes": 1_612_800,
            "tensors": 26,
            "digest": digest,
        }
        yield {**row, "seconds": seconds, "verified": "every byte" if digest else "nothing"}


EVENTS = [
    {
        "time": "2026-11-22T09:30:12.123+00:00",
        "stage": "grpo",
        "step": 14,
        "name": "engine_died",
        "message": "engine 1 answers no more",
        "reaction": "restarted; 12 prompts asked again",
    },
    {"time": "2026-11-22T09:31:00+00:00", "step": None, "name": "disk_low", "message": "2 GB", "reaction": "none"},
]


def full_run(path, *, collectors=0):
    run = synthetic_run(path)
    run.spans.write_text(lines(spans(collectors=collectors)))
    run.events.write_text(lines(EVENTS))
    run.refits.write_text(lines(refits()))
    text = "Sort 41: 14\nbecause 1 < 4, clearly"
    run.samples.write_text(lines([sample(text), sample(logp=-2.5, reward=0.0), sample(trained=[False] * 11)]))
    run.origins.write_text(json.dumps({"seed": "recipe.yaml:3", "run_dir": 'override "run_dir=x"', "cpu": "default"}))
    versions = json.loads(run.versions.read_text())
    machine = {
        "cpu": "A Processor 3000",
        "memory_bytes": 8_000_000_000,
        "gpus": ["NVIDIA H200, 143771 MiB"],
        "gpu_driver": "570.1",
        "git_diff_stat": " src/a.py | 2 +-\n 1 file changed",
        "packages": {"numpy": "2.3.0"},
    }
    run.versions.write_text(json.dumps({**versions, **machine}))
    return run


def words_of(run):
    return Elements(write_report(run).read_text()).text


def test_steps_conditions_refits_and_the_machine_are_on_the_page(tmp_path):
    words = words_of(full_run(tmp_path / "run"))
    for expected in (
        "Each step of grpo",
        "16 of 40 steps, evenly chosen.",
        "What came up",
        "engine_died, disk_low",
        "grpo step 14",
        "09:30:12 UTC",
        "restarted; 12 prompts asked again",
        "12 of 12",
        "✓ every byte",
        "Seconds of each refit",
        "2 keys are set, 1 are defaults",
        'override "run_dir=x"',
        "A Processor 3000",
        "8 GB",
        "NVIDIA H200, 143771 MiB",
        "1 file changed",
        "2.3.0",
    ):
        assert expected in words, expected
    assert "Side by side" not in words
    assert "What this report lacks" not in words


def test_a_run_without_them_has_none_of_these_parts(tmp_path):
    words = words_of(synthetic_run(tmp_path / "run"))
    for title in (
        "Each step of",
        "What came up",
        "Token by token",
        "Where each key was set",
        "Changes that are in no commit",
    ):
        assert title not in words


def boxes(page, title):
    """The placed boxes of a Gantt: class, share of the axis where it begins, its width."""
    part = page[page.index(title) :]
    part = part[: part.index("</figure>")]
    found = re.findall(r'<i class="([\w-]+)" style="left:([\d.]+)%;width:([\d.]+)%"', part)
    return [(name, float(left), float(width)) for name, left, width in found]


def test_the_bars_of_a_step_are_as_long_and_as_late_as_its_phases(tmp_path):
    page = write_report(full_run(tmp_path / "run")).read_text()
    whole, generate, reward, train, refit = boxes(page, "Each step of grpo")[:5]
    assert [each[0] for each in (whole, generate, reward, train, refit)] == [
        "whole", "phase-generate", "phase-reward", "phase-train", "phase-refit",
    ]  # fmt: skip
    share = whole[2] / 1.01  # percent of the axis for a second
    assert generate[2] == pytest.approx(0.4 * share, abs=0.02)
    assert train[1] == pytest.approx(0.45 * share, abs=0.02)
    assert train[2] == pytest.approx(0.5 * share, abs=0.02)


def test_who_works_beside_the_trainer_has_a_lane(tmp_path):
    page = write_report(full_run(tmp_path / "run", collectors=2)).read_text()
    elements = Elements(page)
    assert "Side by side" in elements.words
    assert "collector-0" in elements.words
    assert "collector-1" in elements.words
    placed = boxes(page, "Side by side")
    assert len([name for name, _, _ in placed if name == "phase-generate"]) >= 3 * 8
    assert all(0 <= left <= 100 and left + width <= 100.01 for _, left, width in placed)


def test_phases_that_were_only_laid_out_are_said_to_be(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.spans.write_text(lines([{**span, "laid": span["name"] != "step"} for span in spans(3)]))
    assert "Durations are measured; within a step, phases are drawn in the order" in words_of(run)
    run.spans.write_text(lines(spans(3)))
    assert "Durations are measured" not in words_of(run)


def tokens_of(page):
    part = page[page.index("Token by token") :]
    found = re.findall(
        r'<i class="tok (off )?p(\d)" data-l="([^"]+)" data-i="(\d+)" data-t="(-?\d+)">([^<]*)</i>', part
    )
    return [(bool(off), int(shade), float(logp), int(index), text) for off, shade, logp, index, _, text in found]


def test_each_sampled_token_is_shaded_by_its_probability_and_no_other(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.samples.write_text(lines([sample("Sort 41: 14", logp=-0.5)]))
    page = write_report(run).read_text()
    tokens = tokens_of(page)
    assert [text for *_, text in tokens] == ["1", "4"]
    assert [index for *_, index, _ in tokens] == [9, 10]
    for off, shade, logp, index, _ in tokens:
        assert logp == pytest.approx(-0.5 * (index % 7 + 1), rel=1e-3)
        assert shade == int(10 * math.exp(logp))
        assert not off
    assert '<span class="ctx">Sort 41: </span>' in page
    assert "2 of 11 tokens sampled" in Elements(page).text


def test_what_was_sampled_and_is_not_trained_on_is_marked(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.samples.write_text(lines([sample(trained=[False] * 11)]))
    assert {off for off, *_ in tokens_of(write_report(run).read_text())} == {True}


def test_the_end_of_a_line_can_be_seen_and_pointed_at(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.samples.write_text(lines([sample("Sort 41: 1\n4")]))
    assert "↵\n" in [text for *_, text in tokens_of(write_report(run).read_text())]


def test_a_long_conversation_is_shown_at_both_ends(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.samples.write_text(lines([sample("Sort 41: " + "7" * 5000)]))
    page = write_report(run).read_text()
    assert "… 3809 tokens left out …" in page
    indices = [index for *_, index, _ in tokens_of(page)]
    assert (indices[0], indices[-1], len(indices)) == (9, 5008, 1191)


def test_nothing_that_these_files_hold_becomes_markup(tmp_path):
    run = full_run(tmp_path / "run", collectors=1)
    tame = Elements(write_report(run).read_text())
    run.spans.write_text(lines([{**span, "stage": ATTACK} | ({"name": ATTACK} if span["name"] == "train" else {})
                                for span in spans(3, collectors=1)]))  # fmt: skip
    run.events.write_text(lines([dict.fromkeys(("time", "stage", "name", "message", "reaction"), ATTACK)]))
    run.refits.write_text(lines([{**refit, "verified": ATTACK, "digest": ATTACK} for refit in refits(3)]))
    run.samples.write_text(lines([sample(f"Sort 41: {ATTACK}")]))
    run.origins.write_text(json.dumps({ATTACK: ATTACK}))
    run.versions.write_text(json.dumps({"gpus": [ATTACK], "git_diff_stat": ATTACK, "packages": {ATTACK: ATTACK}}))
    wild = Elements(write_report(run).read_text())
    assert {tag for tag, _ in wild.tags} <= {tag for tag, _ in tame.tags}
    assert len([script for script in wild.named("script") if "type" not in script]) == 1
    assert not any(name.startswith("on") for _, attributes in wild.tags for name in attributes)


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(
    span=st.lists(
        st.fixed_dictionaries(
            {"name": st.sampled_from(["step", "train"]), "lane": st.sampled_from(["trainer", "b"])},
            optional={"start_s": values, "end_s": values, "stage": values, "step": values, "laid": values},
        ),
        max_size=6,
    ),
    event=st.lists(st.dictionaries(st.sampled_from(["name", "step", "message", "time"]), values), max_size=3),
    refit=st.lists(st.dictionaries(st.sampled_from(["version", "bytes", "seconds", "digest"]), values), max_size=4),
    tokens=st.lists(
        st.dictionaries(st.sampled_from(["pieces", "logp", "trained", "turns"]), st.lists(values, max_size=3) | values),
        max_size=3,
    ),
    versions=st.dictionaries(st.sampled_from(["gpus", "packages", "git_diff_stat", "memory_bytes"]), values),
)
def test_no_content_of_these_files_raises(tmp_path, span, event, refit, tokens, versions):
    run = RunDirectory(tmp_path)
    run.spans.write_text(lines(span))
    run.events.write_text(lines(event))
    run.refits.write_text(lines(refit))
    run.samples.write_text(lines([{"when": "after", "prompt": "x", "tokens": each} for each in tokens]))
    run.versions.write_text(json.dumps(versions))
    Elements(write_report(run).read_text())


def three_runs(folder):
    runs = [synthetic_run(folder / name / "run", steps=steps) for name, steps in (("a", 60), ("b", 80), ("c", 60))]
    for index, run in enumerate(runs):
        recipe = {"seed": 0, "run_dir": str(run.path), "grpo": {"optimizer": {"lr": 10.0**-index}, "num_prompts": 32}}
        if index == 2:
            recipe["dpo"] = None
        run.recipe.write_text(yaml.safe_dump(recipe))
    return runs


def test_several_runs_are_compared_on_one_page_that_needs_nothing_else(tmp_path):
    page_path = compare_runs(three_runs(tmp_path), to=tmp_path / "comparison.html")
    page = page_path.read_text()
    elements = Elements(page)
    assert page_path == tmp_path / "comparison.html"
    for expected in ("3 runs", "a/run", "b/run", "c/run", "What differs between the recipes", "held_out_sampled_after"):
        assert expected in elements.words, expected
    assert not {"link", "img", "iframe"} & {tag for tag, _ in elements.tags}
    assert len(page) < 400_000
    assert not list(tmp_path.glob("*.unfinished"))


def test_curves_of_all_runs_lie_over_one_another(tmp_path):
    page = compare_runs(three_runs(tmp_path), to=tmp_path / "page.html").read_text()
    charts = charts_on(page)
    reward = charts["Reward"]["series"]
    assert [curve["label"] for curve in reward] == ["a/run", "b/run", "c/run"]
    assert [curve["role"] for curve in reward] == ["run-0", "run-1", "run-2"]
    assert [curve["x"][-1] for curve in reward] == [60, 80, 60]
    assert charts["Trainer / engine agreement"]["kind"] == "log"


def test_what_is_the_same_in_all_runs_gets_no_chart_of_its_own(tmp_path):
    runs = [synthetic_run(tmp_path / name / "run", steps=60) for name in ("a", "b")]
    rows = [{"stage": "grpo", "step": step, "loss": step / 9} for step in range(1, 9)]
    runs[1].metrics.write_text(lines(rows))
    runs[0].metrics.write_text(lines([{**row, "learning_rate": 1.0} for row in rows]))
    assert not charts_on(compare_runs(runs, to=tmp_path / "page.html").read_text())


def rows_of(page, section):
    part = page[page.index(f'id="{section}"') :]
    part = part[: part.index("</section>")]
    return {row[0]: row[1:] for row in (re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", line) for line in part.split("<tr>"))
            if row}  # fmt: skip


def test_only_what_differs_between_the_recipes_is_shown(tmp_path):
    page = compare_runs(three_runs(tmp_path), to=tmp_path / "page.html").read_text()
    rows = rows_of(page, "recipes")
    assert rows == {
        "": ["a/run", "b/run", "c/run"],
        "grpo.optimizer.lr": ["1", "0.1", "0.01"],
        "dpo": ["–", "–", "null"],
    }
    assert "2 of 4 keys of the recipes; the other 2 are the same everywhere." in page
    assert rows_of(page, "summaries")["steps"] == ["120", "160", "120"]


def test_figures_that_no_run_has_are_left_out(tmp_path):
    runs = three_runs(tmp_path)
    for index, run in enumerate(runs):
        run.summary.write_text(json.dumps({"steps": 1, "nothing": None, "something": index or None}))
    page = compare_runs(runs, to=tmp_path / "page.html").read_text()
    assert rows_of(page, "summaries").keys() == {"", "steps", "something"}


def test_a_run_that_lacks_files_is_compared_by_what_it_has(tmp_path):
    runs = three_runs(tmp_path)
    runs[1].summary.unlink()
    runs[1].recipe.write_text("a: [")
    page = compare_runs(runs, to=tmp_path / "page.html").read_text()
    words = Elements(page).words
    assert "b/run: summary.json is missing" in words
    assert "b/run: recipe.yaml could not be read (YAML)" in words
    assert rows_of(page, "summaries")["steps"] == ["120", "–", "120"]


def test_nothing_of_the_runs_becomes_markup_in_a_comparison(tmp_path):
    runs = three_runs(tmp_path)
    tame = Elements(compare_runs(runs, to=tmp_path / "page.html").read_text())
    for run in runs[:2]:
        run.recipe.write_text(yaml.safe_dump({ATTACK: str(run.path) + ATTACK}))
        run.summary.write_text(json.dumps({ATTACK: ATTACK}))
        run.metrics.write_text(lines([{"stage": ATTACK, "step": step, ATTACK: step} for step in (1, 2)]))
    wild = Elements(compare_runs(runs, to=tmp_path / "page.html").read_text())
    assert {tag for tag, _ in wild.tags} <= {tag for tag, _ in tame.tags}
    assert len([script for script in wild.named("script") if "type" not in script]) == 1


def test_one_run_or_the_same_twice_is_no_comparison(tmp_path):
    run = synthetic_run(tmp_path / "run")
    with pytest.raises(ValueError, match="1 runs cannot be compared"):
        compare_runs([run], to=tmp_path / "page.html")
    with pytest.raises(ValueError, match="compared with itself"):
        compare_runs([run, run], to=tmp_path / "page.html")
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        compare_runs([run, synthetic_run(tmp_path / "other")], to=tmp_path / "nowhere" / "page.html")


if __name__ == "__main__":
    place = Path(sys.argv[1])
    print(write_report(full_run(place / "run", collectors=2)))
    print(compare_runs(three_runs(place), to=place / "comparison.html"))
