"""The report, made from a synthetic run. `python test_report.py FOLDER` leaves one there to look at."""

import base64
import hashlib
import html
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_observe import RunDirectory, RunDirectoryError, write_report
from rl_observe.report import summary_html

ATTACK = "</pre></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"

RECIPE = """\
task: sort_digits
stages:
  - sft: {max_num_steps: 100, batch_size: 128, learning_rate: 2.0e-3}
  - grpo: {max_num_steps: 120, num_prompts: 32, num_generations_per_prompt: 8, learning_rate: 3.0e-4}
"""


def synthetic_run(path: Path, *, stages: tuple[str, ...] = ("sft", "grpo"), steps: int = 120) -> RunDirectory:
    """What a run of the quickstart leaves, with curves of about its shape."""
    run = RunDirectory.create(path)
    generator = random.Random(0)
    makers = {"sft": _sft_rows, "grpo": _grpo_rows, "dpo": _dpo_rows}
    clock_s = 0.0
    with run.metrics.open("w") as lines:
        for stage in stages:
            for step, row in enumerate(makers[stage](steps, generator), start=1):
                clock_s += sum(value for name, value in row.items() if name.startswith("phase_s/"))
                lines.write(json.dumps({"stage": stage, "step": step, "time_s": round(clock_s, 3), **row}) + "\n")
    run.recipe.write_text(RECIPE)
    run.samples.write_text("".join(json.dumps(sample) + "\n" for sample in _samples(generator)))
    run.versions.write_text(
        json.dumps(
            {
                "collected_at": "2026-11-21T09:30:00+00:00",
                "python": "3.11.7",
                "platform": "Linux-6.1-x86_64",
                "cpu_count": 2,
                "torch": "2.13.0+cpu",
                "transformers": "5.19.0",
                "rl-launcher": "0.1.0",
                "git_commit": "4f1c0de9a7b35c2e8d6f4f1c0de9a7b35c2e8d6f",
                "git_dirty": False,
            }
        )
    )
    run.summary.write_text(
        json.dumps(
            {
                "run_dir": str(path),
                "task": "rl_launcher.quickstart.sort_digits:dataset",
                "algorithm": stages[-1],
                "held_out_sampled_before": 0.33,
                "held_out_sampled_after": 0.909,
                "held_out_greedy_before": 0.718,
                "held_out_greedy_after": 0.961,
                "held_out_size": 1000,
                "steps": steps * len(stages),
                "wall_s": clock_s + 4.2,
                "tokens": 326_000,
                "interrupted": False,
                "phase_share": {"generate": 0.35, "train": 0.6, "other": 0.05},
                "refit": {"count": steps, "tensors": 26, "bytes": 1_612_800, "digest": "9f2a" * 16, "version": steps},
            }
        )
    )
    return run


def _sft_rows(steps: int, generator: random.Random) -> Iterator[dict[str, float | None]]:
    for step in range(1, steps + 1):
        row = {
            "loss": 0.55 + 3.1 * math.exp(-step / (steps / 6)) + generator.gauss(0, 0.03),
            "grad_norm": 0.5 + 2.4 * math.exp(-step / (steps / 5)) + generator.gauss(0, 0.05),
            "learning_rate": 2e-3 * min(1.0, step / 20),
            "tokens_per_s": 14_200 + generator.gauss(0, 400),
            "phase_s/train": 0.068 + generator.random() * 0.01,
            "phase_s/other": 0.0008,
        }
        if step == steps:
            row["phase_s/evaluate"] = 1.1
        yield row


def _grpo_rows(steps: int, generator: random.Random) -> Iterator[dict[str, float | None]]:
    for step in range(1, steps + 1):
        learnt = 1 - math.exp(-step / (steps / 3.2))
        row: dict[str, float | None] = {
            "reward": min(1.0, 0.3 + 0.65 * learnt + generator.gauss(0, 0.022)),
            "groups_with_signal": 0.85 - 0.46 * learnt + generator.gauss(0, 0.03),
            "response_tokens": 7.1 + generator.gauss(0, 0.06),
            "truncated": abs(generator.gauss(0, 0.01)),
            "tokens_per_s": 5200 + generator.gauss(0, 250),
            "clip_fraction": 0.03 + generator.gauss(0, 0.006),
            "kl_engine": generator.gauss(0, 4e-8),
            "token_mult_prob_error": 1 + 10 ** generator.gauss(-6, 0.15),
            "entropy": 0.09 + 0.5 * (1 - learnt) + generator.gauss(0, 0.012),
            "loss": generator.gauss(-0.01, 0.006),
            "grad_norm": 0.35 + generator.gauss(0, 0.05),
            "learning_rate": 3e-4 * min(1.0, step / 10) * (1 - 0.8 * step / steps),
            "version": step,
            "refit_bytes": 1_612_800,
            "refit_s": 0.0021 + generator.random() * 0.0006,
            "phase_s/generate": 0.107 + generator.random() * 0.02,
            "phase_s/reward": 0.004,
            "phase_s/train": 0.15 * (0.55 + 0.45 * (1 - learnt)) + generator.random() * 0.01,
            "phase_s/refit": 0.0034,
            "phase_s/other": 0.004,
        }
        if step == 7:
            row |= {"loss": None, "grad_norm": None}
        if step % max(1, steps // 6) == 0:
            row |= {"held_out_sampled": 0.31 + 0.63 * learnt, "held_out_greedy": 0.72 + 0.26 * learnt}
            row["phase_s/evaluate"] = 0.22
        yield row


def _dpo_rows(steps: int, generator: random.Random) -> Iterator[dict[str, float | None]]:
    for step in range(1, steps + 1):
        learnt = 1 - math.exp(-step / (steps / 3))
        row = {
            "loss": 0.69 - 0.45 * learnt + generator.gauss(0, 0.02),
            "nll": 0.4 - 0.1 * learnt,
            "margin": 2.5 * learnt + generator.gauss(0, 0.1),
            "pair_accuracy": min(1.0, 0.72 + 0.24 * learnt + generator.gauss(0, 0.02)),
            "chosen_logratio": 0.5 * learnt + generator.gauss(0, 0.03),
            "rejected_logratio": -2.2 * learnt + generator.gauss(0, 0.08),
            "phase_s/train": 0.2,
            "phase_s/reference": 2.1 if step == 1 else 0.0,
        }
        if step % max(1, steps // 4) == 0:
            row |= {"held_out_margin": 2.3 * learnt, "held_out_pair_accuracy": 0.74 + 0.21 * learnt}
        yield row


def _samples(generator: random.Random) -> Iterator[dict[str, object]]:
    for index in range(10):
        digits = "".join(generator.choice("0123456789") for _ in range(generator.randint(4, 8)))
        right = "".join(sorted(digits))
        wrong = right[:2] + right[3:] + ("" if index % 2 else right[2])
        for when, response in (
            ("before", right if index % 4 == 0 else wrong),
            ("after", wrong if index == 7 else right),
        ):
            yield {
                "when": when,
                "stage": "grpo",
                "prompt": f"Sort {digits}",
                "expected": right,
                "response": response,
                "reward": float(response == right),
                "truncated": index == 7 and when == "after",
            }


def page_of(run: RunDirectory) -> str:
    return write_report(run).read_text()


class Elements(HTMLParser):
    """The elements of a page, and what is written between them; it also proves that all are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    @property
    def text(self) -> str:
        """The words with the white space between them as a browser shows it."""
        return " ".join(self.words.split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.words += data

    def named(self, name):
        return [attributes for tag, attributes in self.tags if tag == name]


def charts_on(page: str) -> dict[str, dict]:
    """The data of each chart by its title, as the page's script reads it."""
    found = re.findall(
        r'<figure class="chart(?: wide)?">\s*<figcaption><h4>(.*?)</h4>.*?"application/json">(.*?)</script>',
        page,
        re.DOTALL,
    )
    return {html.unescape(title): json.loads(data) for title, data in found}


def test_the_page_says_what_came_of_the_run(tmp_path):
    page = Elements(page_of(synthetic_run(tmp_path / "run")))
    for words in (
        "GRPO raised the share of right responses on 1000 held-out problems from 33.0 % to 90.9 %.",
        "The run took 240 steps and ",
        "+57.9 points · 1000 problems · ± 1.8 at 95 %",  # 1.96 sqrt(0.909 · 0.091 / 1000) = 0.0178
        "before: 71.8 %",
        "sort digits · run report",
        "2026-11-21, 09:30 UTC · run · rl_launcher.quickstart.sort_digits:dataset · torch 2.13.0+cpu · 2 cores",
        "Reward, grpo",
        "3 of 10 right before, 9 of 10 right after training.",
        "cut off at the token limit",
        "Where the time went",
        "Groups with signal",
        "Trainer / engine agreement",
        "1.61 MB",
        "9f2a" * 16,
        "num_generations_per_prompt: 8",
        "4f1c0de9a7b35c2e8d6f4f1c0de9a7b35c2e8d6f",
        "Made by rl-observe.",
    ):
        assert words in page.text, words
    assert "What this report lacks" not in page.words


def test_the_page_is_whole_in_itself(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    elements = Elements(page)
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in elements.tags}
    assert not any("src" in attributes for _, attributes in elements.tags)
    library = resources.files("rl_observe.report").joinpath("vendor/uplot/uPlot.iife.min.js").read_text()
    assert not re.search(r"https?:|url\(|@import|@font-face", page.replace(library, ""))  # its banner names its home
    assert len(page) < 400_000


def test_the_bar_at_the_top_leads_to_every_section_of_the_page(tmp_path):
    elements = Elements(page_of(synthetic_run(tmp_path / "run")))
    links = [link["href"] for link in elements.named("a")]
    assert links == [f"#{section['id']}" for section in elements.named("section")]
    assert links == ["#story", "#samples", "#time", "#curves", "#refit", "#repeat"]


def test_the_only_script_that_runs_is_the_pages_own_and_its_policy_names_it_by_hash(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(meta["content"] for meta in Elements(page).named("meta") if "http-equiv" in meta)
    assert len(scripts) == 1
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert {script.get("type") for script in Elements(page).named("script")} == {None, "application/json"}


def test_the_chart_library_keeps_its_license_on_the_page(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    assert "The MIT License (MIT)" in page
    assert "Leon Sorokin" in page


def test_nothing_that_a_run_holds_becomes_markup(tmp_path):
    run = synthetic_run(tmp_path / "run")
    tame = Elements(page_of(run))
    sample = {"when": "after", "stage": ATTACK, "prompt": ATTACK, "expected": ATTACK, "response": ATTACK, "reward": 0.0}
    run.samples.write_text(json.dumps(sample) + "\n" + json.dumps({**sample, "when": "before"}) + "\n")
    run.recipe.write_text(ATTACK)
    run.summary.write_text(json.dumps({"task": ATTACK, "algorithm": ATTACK, "refit": {"digest": ATTACK}}))
    run.versions.write_text(json.dumps({"collected_at": ATTACK, "torch": ATTACK, ATTACK: ATTACK}))
    with run.metrics.open("a") as lines:
        for step in (1, 2):
            row = {"stage": ATTACK, "step": step, "reward": 0.5, ATTACK: step, f"phase_s/{ATTACK}": 1.0}
            lines.write(json.dumps(row) + "\n")
    page = page_of(run)
    wild = Elements(page)
    assert wild.words.count(ATTACK) > 10
    assert {tag for tag, _ in wild.tags} <= {tag for tag, _ in tame.tags}
    assert len([script for script in wild.named("script") if "type" not in script]) == 1
    assert not any(name.startswith("on") for _, attributes in wild.tags for name in attributes)
    assert ATTACK in [curve["label"] for chart in charts_on(page).values() for curve in chart["series"]]
    assert ATTACK in Elements(summary_html(run)).words


def test_right_and_wrong_are_said_in_words(tmp_path):
    words = Elements(page_of(synthetic_run(tmp_path / "run"))).words
    assert words.count("✓ right") == 3 + 9
    assert words.count("✗ wrong") == 7 + 1


def test_the_kinds_of_outcomes_are_bars_as_long_as_their_counts(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    bars = re.findall(r'<span class="kind-([\w-]+)" style="flex-grow:(\d+)"', page)
    assert bars == [("right", "3"), ("wrong", "7"), ("right", "9"), ("cut-off", "1")]


def test_every_chart_says_in_words_what_it_shows(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    plots = [div["aria-label"] for div in Elements(page).named("div") if div.get("class") == "plot"]
    assert len(plots) == page.count('type="application/json"') > 10
    assert any(
        re.match(r"Reward, grpo\. .*held-out, sampled: 33\.0 % at step 0, \d\d\.\d % at step 120\.", text)
        for text in plots
    )


def test_without_javascript_each_chart_still_gives_its_first_and_last_values(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    remark, headline, *_ = re.findall(r"<noscript>(.*?)</noscript>", page, re.DOTALL)
    assert "The charts need JavaScript" in remark
    assert "<li>held-out, sampled: 33.0 % → " in headline
    assert re.search(r'<h4>Entropy</h4><span class="change">0\.\d+ → 0\.\d+</span>', page)


def report_of(tmp_path, name, values):
    run = RunDirectory.create(tmp_path / name)
    rows = [{"stage": "grpo", "step": step, "reward": step / 9, **values(step)} for step in range(1, 9)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(run).read_text()


def test_a_metric_that_never_changes_is_a_line_of_text_and_not_a_chart(tmp_path):
    titles = {"Staleness", "Failed", "Turns", "Learning rate"}
    rest = {"staleness": 0.0, "staleness_max": 0.0, "failed": 0.0, "turns": 1.0, "learning_rate": 1e-3}
    page = report_of(tmp_path, "rest", lambda step: rest)
    assert not titles & charts_on(page).keys()
    unchanged = "staleness 0, turns 1, failed 0.0 %, oldest token 0, learning rate 1·10⁻³."
    assert f"Unchanged from the first step to the last: {unchanged}" in Elements(page).text
    moved = report_of(tmp_path, "moved", lambda step: {name: step * (value + 1) for name, value in rest.items()})
    assert titles <= charts_on(moved).keys()
    assert "Unchanged" not in moved


def test_counters_that_only_follow_the_step_get_no_chart(tmp_path):
    page = report_of(tmp_path, "run", lambda step: {"steps_taken": step, "version": step, "loss": step / 2})
    assert charts_on(page).keys() == {"Reward, grpo", "Loss"}


def test_schedule_speed_and_memory_are_folded(tmp_path):
    page = report_of(tmp_path, "run", lambda step: {"learning_rate": step, "memory_rss_bytes": step, "loss": step / 2})
    folded = page[page.index("<summary>Schedule, speed and memory") :]
    assert charts_on(folded).keys() == {"Learning rate", "Memory"}


def test_the_ends_of_an_interval_are_a_band_of_the_headline_chart_and_no_chart_of_their_own(tmp_path):
    ends = {"held_out_sampled": 0.5, "held_out_sampled/low": 0.4, "held_out_sampled/high": 0.6}
    charts = charts_on(report_of(tmp_path, "run", lambda step: ends if step % 4 == 0 else {}))
    assert charts.keys() == {"Reward, grpo"}
    band = [(one["x"], one["y"]) for one in charts["Reward, grpo"]["series"] if one["role"] == "interval"]
    assert band == [([4, 8], [0.4, 0.4]), ([4, 8], [0.6, 0.6])]


def test_rewards_that_a_run_has_named_are_charted_under_their_names(tmp_path):
    page = report_of(tmp_path, "run", lambda step: {"reward/right": step / 9, "environment/right": step / 3})
    for text in ("Reward, right", "weighted as it counts", "Environment, right", "What the environment logs"):
        assert text in page


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("recipe", "Resolved recipe"),
        ("metrics", "Stage by stage"),
        ("samples", "Before and after"),
        ("summary", "digest of the last"),
        ("versions", "Machine and versions"),
    ],
)
def test_a_missing_file_makes_a_smaller_report_that_says_so(tmp_path, missing, part):
    run = synthetic_run(tmp_path / "run")
    assert part in Elements(page_of(run)).words
    path: Path = getattr(run, missing)
    path.unlink()
    words = Elements(page_of(run)).words
    assert f"{path.name} is missing" in words
    assert part not in words
    path.write_bytes(b"\xff{")
    assert f"{path.name} could not be read" in Elements(page_of(run)).words


def test_an_empty_directory_still_gives_a_page(tmp_path):
    words = Elements(page_of(RunDirectory.create(tmp_path / "run"))).words
    assert words.count("is missing") == 5
    assert "This run ended early." in words


def test_an_interrupted_run_is_reported_from_its_log(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.summary.unlink()
    log = run.metrics.read_text()
    run.metrics.write_text(log[: int(0.8 * len(log))])
    words = Elements(page_of(run)).text
    assert "This run ended early." in words
    assert "1 line of metrics.jsonl could not be read" in words
    # Evaluated at steps 20, 40 and 60 of grpo, and never before it: 0.31 + 0.63 (1 - exp(-60 · 3.2 / 120)) = 0.813.
    assert re.search(r"share of right responses on held-out problems came to 8\d\.\d %", words)
    assert "before:" not in words


def test_an_evaluation_at_step_zero_is_the_figure_of_before(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    rows = [
        {"stage": "grpo", "step": step, "held_out_sampled": value} for step, value in ((0, 0.25), (5, None), (9, 0.5))
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = Elements(page_of(run)).text
    assert "Training raised the mean reward on held-out problems from 25.0 % to 50.0 %." in words


@pytest.mark.parametrize("stages", [("sft",), ("dpo",), ("sft", "dpo"), ("sft", "grpo", "dpo")])
def test_every_combination_of_stages_has_its_story(tmp_path, stages):
    words = Elements(page_of(synthetic_run(tmp_path / "run", stages=stages))).words
    story = {"sft": "Loss, sft", "grpo": "Reward, grpo", "dpo": "Margin, dpo"}
    assert (story["grpo"] if "grpo" in stages else story[stages[-1]]) in words
    assert ("Pair accuracy" in words) == ("dpo" in stages)


def test_a_long_run_makes_no_heavy_page(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run", stages=("grpo",), steps=3000))
    assert len(page) < 600_000
    assert "3000" in page


def test_the_same_files_give_the_same_page(tmp_path):
    run = synthetic_run(tmp_path / "run")
    assert page_of(run) == page_of(run)
    assert {path.name for path in run.path.iterdir()} == {
        *("recipe.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "versions.json", "report.html")
    }


def test_a_report_that_cannot_be_written_says_so(tmp_path):
    run = synthetic_run(tmp_path / "run")
    run.report.mkdir()
    with pytest.raises(RunDirectoryError, match=r"report\.html cannot be written"):
        write_report(run)
    assert not list(run.path.glob("*.unfinished"))


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([])
names = st.sampled_from(
    [
        "reward",
        "loss",
        "held_out_sampled",
        "token_mult_prob_error",
        "margin",
        "time_s",
        "phase_s/train",
        "phase_s/x",
        "new",
    ]
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40, deadline=None
)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, 5) | values, st.dictionaries(names, values)), max_size=8
    ),
    summary=st.dictionaries(
        st.sampled_from(
            ["task", "steps", "wall_s", "held_out_sampled_after", "held_out_sampled_before", "held_out_size", "refit"]
        ),
        values,
    ),
    samples=st.lists(
        st.dictionaries(st.sampled_from(["when", "prompt", "response", "reward", "expected"]), values), max_size=3
    ),
)
def test_no_content_of_the_files_raises(tmp_path, rows, summary, samples):
    run = RunDirectory(tmp_path)
    lines = [json.dumps({"stage": stage, "step": step, **metrics}) for stage, step, metrics in rows]
    run.metrics.write_text("\n".join(lines))
    run.summary.write_text(json.dumps(summary))
    run.samples.write_text("\n".join(json.dumps({"when": "after", **sample}) for sample in samples))
    page = page_of(run)
    Elements(page)
    assert charts_on(page) is not None
    Elements(summary_html(run))


def test_the_summary_for_a_notebook_needs_no_script_and_no_style_sheet(tmp_path):
    summary = summary_html(synthetic_run(tmp_path / "run"))
    elements = Elements(summary)
    assert not {"script", "style", "link", "img", "iframe"} & {tag for tag, _ in elements.tags}
    assert "GRPO raised the share of right responses on 1000 held-out problems from 33.0 % to 90.9 %." in elements.text
    assert "Optimizer steps240sft 120 · grpo 120" in elements.text
    line = elements.named("polyline")[0]["points"].split()
    assert len(line) == 120
    assert all(0 <= float(place.split(",")[0]) <= 600 and 0 <= float(place.split(",")[1]) <= 100 for place in line)


def test_the_summary_of_an_empty_run_says_what_is_missing(tmp_path):
    words = Elements(summary_html(RunDirectory.create(tmp_path / "run"))).text
    assert "This run ended early." in words
    assert "metrics.jsonl is missing" in words


if __name__ == "__main__":
    print(write_report(synthetic_run(Path(sys.argv[1]))))
