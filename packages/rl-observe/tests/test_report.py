"""The report, made from a synthetic run. `python test_report.py FOLDER` leaves one there to look at."""

import base64
import hashlib
import json
import math
import random
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_observe import RunDirectory, RunDirectoryError, write_report

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


def test_the_page_says_what_came_of_the_run(tmp_path):
    page = Elements(page_of(synthetic_run(tmp_path / "run")))
    for words in (
        "GRPO raised the share of right answers on 1000 held-out problems from 33.0 % to 90.9 %.",
        "The whole run took 240 steps and ",
        "+57.9 points · 1000 problems · ± 1.8 at 95 %",  # 1.96 sqrt(0.909 · 0.091 / 1000) = 0.0178
        "before: 71.8 %",
        "sort digits · run report",
        "2026-11-21, 09:30 UTC · run · rl_launcher.quickstart.sort_digits:dataset · torch 2.13.0+cpu · 2 cores",
        "Reward, grpo",
        "3 of 10 right before, 9 of 10 right after training",
        "cut off at the token limit",
        "Where the time went",
        "Groups with signal",
        "Trainer / engine agreement",
        "1.61 MB",
        "9f2a" * 16,
        "num_generations_per_prompt: 8",
        "4f1c0de9a7b35c2e8d6f4f1c0de9a7b35c2e8d6f",
    ):
        assert words in page.words, words
    assert "What this report lacks" not in page.words


def test_the_page_is_whole_in_itself(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    elements = Elements(page)
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in elements.tags}
    assert not any(name in attributes for _, attributes in elements.tags for name in ("src", "href"))
    assert not re.search(r"https?:|url\(|@import|@font-face", page)
    assert len(page) < 400_000


def test_the_only_script_is_the_pages_own_and_its_policy_names_it_by_hash(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    policy = next(meta["content"] for meta in Elements(page).named("meta") if "http-equiv" in meta)
    assert len(scripts) == 1
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_nothing_that_a_run_holds_becomes_markup(tmp_path):
    attack = "</pre></script><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    run = synthetic_run(tmp_path / "run")
    tame = Elements(page_of(run))
    sample = {"when": "after", "stage": attack, "prompt": attack, "expected": attack, "response": attack, "reward": 0.0}
    run.samples.write_text(json.dumps(sample) + "\n" + json.dumps({**sample, "when": "before"}) + "\n")
    run.recipe.write_text(attack)
    run.summary.write_text(json.dumps({"task": attack, "algorithm": attack, "refit": {"digest": attack}}))
    run.versions.write_text(json.dumps({"collected_at": attack, "torch": attack, attack: attack}))
    with run.metrics.open("a") as lines:
        for step in (1, 2):
            row = {"stage": attack, "step": step, "reward": 0.5, attack: step, f"phase_s/{attack}": 1.0}
            lines.write(json.dumps(row) + "\n")
    wild = Elements(page_of(run))
    assert wild.words.count(attack) > 10
    assert {tag for tag, _ in wild.tags} <= {tag for tag, _ in tame.tags}
    assert len(wild.named("script")) == 1
    assert not any(name.startswith("on") for _, attributes in wild.tags for name in attributes)


def test_right_and_wrong_are_said_in_words(tmp_path):
    words = Elements(page_of(synthetic_run(tmp_path / "run"))).words
    assert words.count("✓ right") == 3 + 9
    assert words.count("✗ wrong") == 7 + 1


def test_every_chart_says_in_words_what_it_shows(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run"))
    charts = re.findall(r"<svg[^>]*role=\"img\"><title>(.*?)</title>", page)
    assert len(charts) == page.count("<svg") > 10
    assert any(
        re.match(r"Reward, grpo\. .*held-out, sampled: 33\.0 % at step 0, \d\d\.\d % at step 120\.", text)
        for text in charts
    )


def charts_of(tmp_path, name, values):
    run = RunDirectory.create(tmp_path / name)
    rows = [{"stage": "grpo", "step": step, "reward": step / 9, **values(step)} for step in range(1, 9)]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(run).read_text()


def test_what_a_run_does_not_have_gets_no_chart(tmp_path):
    titles = ("Staleness", "Failed rollouts", "Turns", "KL to the reference", "Effective sample size")
    rest = {"staleness": 0.0, "staleness_max": 0.0, "failed": 0.0, "turns": 1.0}
    page = charts_of(tmp_path, "rest", lambda step: rest)
    assert not [title for title in titles if title in page]
    moved = {"staleness": 0.5, "staleness_max": 2.0, "failed": 0.1, "turns": 2.0}
    page = charts_of(tmp_path, "moved", lambda step: {**moved, "kl_reference": 1e-3, "effective_sample_size": 0.9})
    assert not [title for title in titles if title not in page]


def test_rewards_that_a_run_has_named_are_charted_under_their_names(tmp_path):
    page = charts_of(tmp_path, "run", lambda step: {"reward/right": step / 9, "environment/right": step / 3})
    for text in ("Reward, right", "weighted as it counts", "Environment, right", "What the environment logs"):
        assert text in page


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("recipe", "Resolved recipe"),
        ("metrics", "Stage by stage"),
        ("samples", "Before and after"),
        ("summary", "digest of the last"),
        ("versions", "git commit"),
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
    words = Elements(page_of(run)).words
    assert "This run ended early." in words
    assert "1 line of metrics.jsonl could not be read" in words
    # Evaluated at steps 20, 40 and 60 of grpo, and never before it: 0.31 + 0.63 (1 - exp(-60 · 3.2 / 120)) = 0.813.
    assert re.search(r"share of right answers on held-out problems came to 8\d\.\d %", words)
    assert "before:" not in words


def test_an_evaluation_at_step_zero_is_the_figure_of_before(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    rows = [
        {"stage": "grpo", "step": step, "held_out_sampled": value} for step, value in ((0, 0.25), (5, None), (9, 0.5))
    ]
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = Elements(page_of(run)).words
    assert "Training raised the mean reward on held-out problems from 25.0 % to 50.0 %." in words


@pytest.mark.parametrize("stages", [("sft",), ("dpo",), ("sft", "dpo"), ("sft", "grpo", "dpo")])
def test_every_combination_of_stages_has_its_story(tmp_path, stages):
    words = Elements(page_of(synthetic_run(tmp_path / "run", stages=stages))).words
    story = {"sft": "Loss, sft", "grpo": "Reward, grpo", "dpo": "Margin, dpo"}
    assert (story["grpo"] if "grpo" in stages else story[stages[-1]]) in words
    assert ("Pair accuracy" in words) == ("dpo" in stages)


def test_a_long_run_makes_no_heavy_page(tmp_path):
    page = page_of(synthetic_run(tmp_path / "run", stages=("grpo",), steps=3000))
    assert len(page) < 1_200_000
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
        st.sampled_from(["task", "steps", "wall_s", "held_out_sampled_after", "held_out_sampled_before", "refit"]),
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
    Elements(page_of(run))


if __name__ == "__main__":
    print(write_report(synthetic_run(Path(sys.argv[1]))))
