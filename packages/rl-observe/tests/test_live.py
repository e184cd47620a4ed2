"""The live view: what is worth a line, what is on the panel, and that the last line of stdout is the caller's."""

import io
import json
import math
import os
import pty
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rl_observe import LiveView, StageTotal
from rl_observe.glossary import format_clock, format_duration, format_value
from rl_observe.live import resampled

RUN = """\
import json
from rl_observe import LiveView, StageTotal
with LiveView("sort digits", [StageTotal("sft", 20), StageTotal("grpo", 30)]) as view:
    for step in range(1, 21):
        view.update("sft", step, {"loss": 1 / step, "phase_s/train": 0.07})
    view.message("warm start done [not markup]")
    for step in range(1, 31):
        values = {"reward": step / 30, "tokens_per_s": 5200.0, "phase_s/generate": 0.03, "phase_s/train": 0.01}
        if step == 17:
            values["held_out_sampled"] = 0.625
        view.update("grpo", step, values | {"version": step, "refit_bytes": 1_612_800, "refit_s": 0.002})
print(json.dumps({"done": True}))
"""


class Shown:
    """A live view whose clock only `update` moves, and what it has drawn."""

    def __init__(self, *stages, width=100):
        self.now_s = 0.0
        self.console = Console(file=io.StringIO(), width=width, record=True, force_terminal=False)
        self.view = LiveView("sort digits", stages, console=self.console, clock=lambda: self.now_s)

    def update(self, stage, step, values, *, now_s, skipped=0):
        self.now_s = now_s
        self.view.update(stage, step, values, skipped=skipped)

    def panel(self, *, now_s):
        self.now_s = now_s
        self.console.export_text()  # forgets the lines printed so far
        self.console.print(self.view.panel())
        return self.console.export_text()


def plain_lines(stages, updates, width=60):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    # Every five seconds there is a line more, and a machine may stand still for so long: the clock does, too.
    with LiveView("title", stages, console=console, clock=lambda: 0.0) as view:
        for stage, step, values in updates:
            view.update(stage, step, values)
    return console.file.getvalue().splitlines()


def test_plain_lines_are_the_first_the_last_every_tenth_and_every_evaluation():
    updates = [
        ("grpo", step, {"reward": 0.5} | ({"held_out_greedy": 0.75} if step == 47 else {})) for step in range(1, 101)
    ]
    lines = plain_lines([StageTotal("grpo", 100)], updates)
    steps = [int(match[1]) for line in lines[1:] if (match := re.search(r"(\d+)/100", line))]
    assert steps == [1, 10, 20, 30, 40, 47, 50, 60, 70, 80, 90, 100]
    assert lines[steps.index(47) + 1].endswith("held-out greedy 0.750")


def test_a_slow_stage_gets_a_line_every_five_seconds():
    shown = Shown(StageTotal("grpo", 10_000))
    for step in range(1, 100):
        shown.update("grpo", step, {"reward": 0.5}, now_s=float(step))
    lines = shown.console.export_text().splitlines()
    assert [int(re.search(r"(\d+)/10000", line)[1]) for line in lines] == [1, *range(6, 100, 5)]


def test_plain_lines_are_aligned_and_longer_than_the_terminal_if_need_be():
    values = {"reward": 0.5, "groups_with_signal": 0.75, "entropy": 0.125, "grad_norm": 1.5, "tokens_per_s": 5200.0}
    updates = [("grpo", step, {**values, "grad_norm": step / 7}) for step in (1, 50, 100)]
    lines = plain_lines([StageTotal("grpo", 100)], updates, width=40)[1:]
    assert len(lines) == 3
    assert len({line.index("tokens/s") for line in lines}) == 1
    assert lines[0].startswith("   0:00  grpo    1/100  reward 0.500      groups with signal 0.750      entropy 0.125 ")


def test_a_metric_that_is_not_finite_or_not_there_is_a_dash():
    lines = plain_lines(
        [StageTotal("grpo", 2)], [("grpo", 1, {"reward": 0.5, "loss": math.nan}), ("grpo", 2, {"reward": 0.5})]
    )
    assert [re.search(r"loss (\S+)", line)[1] for line in lines[1:]] == ["-", "-"]


def test_a_file_gets_no_escape_codes_even_if_colour_is_forced_and_its_last_line_is_the_callers():
    answer = subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        check=True,
        timeout=240,
        env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": "40"},
    )
    lines = answer.stdout.decode().splitlines()
    assert b"\x1b" not in answer.stdout
    assert json.loads(lines[-1]) == {"done": True}
    assert lines[0] == "sort digits"
    assert "warm start done [not markup]" in lines
    assert any("held-out sampled 0.625" in line for line in lines)


def test_on_a_terminal_the_panel_is_drawn_and_the_last_line_is_the_callers():
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", "PYTHONIOENCODING": "utf-8"}
    process = subprocess.Popen([sys.executable, "-c", RUN], stdout=theirs, env=environment)
    os.close(theirs)
    output = b""
    while chunk := _read(ours):
        output += chunk
    assert process.wait(timeout=240) == 0
    os.close(ours)
    text = output.decode()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.splitlines()[-1])
    assert json.loads(last) == {"done": True}
    assert "\x1b[?25h" in text, "the cursor is shown again"
    for words in ("sort digits", "30/30", "warm start done [not markup]", "version 30", "generate"):
        assert words in text


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux reports the end of a pseudo-terminal as an error
        return b""


def test_the_panel_shows_progress_reward_held_out_speed_time_and_refit():
    shown = Shown(StageTotal("sft", 100), StageTotal("grpo", 120))
    shown.update("sft", 100, {"loss": 0.5, "held_out_sampled": 0.33}, now_s=8.0)
    for step in range(1, 61):
        values = {"reward": step / 60, "tokens_per_s": 5200.0, "phase_s/generate": 0.03, "phase_s/train": 0.01}
        shown.update("grpo", step, values, now_s=8.0 + step / 4)
    shown.update(
        "grpo", 60, {"held_out_sampled": 0.75, "version": 60, "refit_bytes": 1e6, "refit_s": 0.002}, now_s=23.0
    )
    text = shown.panel(now_s=24.0)
    for words in (
        "100/100",
        "60/120",
        "ETA 0:14",  # 60 steps at 15 s / 60, less the second since the last update
        "sampled 0.330 → 0.750",
        "5.2 k tokens/s · 250 ms a step",
        "generate 75 %",
        "train 25 %",
        "version 60 · 1 MB · 2 ms",
        "1.000",
    ):
        assert words in text


def test_the_panel_shows_memory_the_mark_of_a_verified_refit_and_what_occurred():
    shown = Shown(StageTotal("grpo", 4))
    memory = {"memory_rss_bytes": 1.5e9, "memory_gpu_bytes": 4e10, "memory_gpu_peak_bytes": 6e10}
    shown.update("grpo", 1, {"reward": 0.5, "refit_bytes": 1e6, "refit_verified": 1.0, **memory}, now_s=1.0)
    assert "events" not in shown.panel(now_s=1.0)
    for step in (2, 3):
        shown.view.event("engine_died", step, "engine 1 [bold]does not respond\nand more")
    text = shown.panel(now_s=2.0)
    for words in (
        "1.5 GB process · 40 GB GPU, at most 60 GB",
        "1 MB · ✓ verified",
        "engine_died × 2  last at step 3: engine 1 [bold]does not respond",
    ):
        assert words in text
    shown.update("grpo", 2, {"refit_verified": 0.0}, now_s=2.0)
    assert "not verified" in shown.panel(now_s=2.0)


def test_an_event_is_a_line_of_its_own_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), width=60, force_terminal=False)
    with LiveView("title", [StageTotal("grpo", 2)], console=console) as view:
        view.event("engine_died", 7, "[1] does not respond; restarted")
        view.event("disk_full", None, "12 MB free")
    lines = console.file.getvalue().splitlines()
    assert lines[1].endswith("engine_died at step 7: [1] does not respond; restarted")
    assert lines[2].endswith("disk_full: 12 MB free")


@pytest.mark.parametrize("width", [24, 40, 64, 100, 200])
def test_the_panel_fits_every_terminal_and_is_never_wider_than_a_hundred(width):
    shown = Shown(StageTotal("sft", 100), StageTotal("a stage with a long name", 120), width=width)
    for step in range(1, 61):
        values = {"reward": step / 60, "phase_s/generate": 0.03, "phase_s/something else": 0.02, "phase_s/train": 0.01}
        shown.update("a stage with a long name", step, values, now_s=float(step), skipped=7)
    lines = shown.panel(now_s=60.0).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= min(width, 100)


def test_the_step_bar_is_divided_as_the_time_was():
    shown = Shown(StageTotal("grpo", 1))
    shown.update("grpo", 1, {"phase_s/train": 3.0, "phase_s/generate": 1.0}, now_s=4.0)
    bar = next(row for row in shown.view.panel().renderable.renderables if "█" in row.plain)
    generate, train = (span for span in bar.spans if "█" in bar.plain[span.start : span.end])
    assert (generate.end - generate.start, train.end - train.start) == (21, 63)


def test_an_error_inside_marks_the_view_as_stopped_and_passes_on():
    shown = Shown(StageTotal("sft", 2))
    with pytest.raises(KeyboardInterrupt), shown.view:
        raise KeyboardInterrupt
    assert shown.console.file.getvalue().splitlines()[-1].endswith("stopped by KeyboardInterrupt")
    assert "stopped after 0:09" in shown.panel(now_s=9.0)


def test_remaining_time_is_the_mean_speed_of_the_stage_times_what_is_left():
    shown = Shown(StageTotal("sft", 10), StageTotal("grpo", 40))
    shown.update("sft", 10, {}, now_s=7.0)
    shown.update("grpo", 10, {}, now_s=12.0)
    sft, grpo, *_ = shown.panel(now_s=12.0).splitlines()[1:]
    assert "✔" in sft
    assert re.search(r"10/10 +0:07", sft)
    assert "▸" in grpo
    assert re.search(r"10/40 +ETA 0:15", grpo)


def test_the_panel_counts_batches_without_a_signal_apart():
    shown = Shown(StageTotal("sft", 10), StageTotal("grpo", 40))
    shown.update("grpo", 10, {}, now_s=5.0, skipped=3)
    sft, grpo, *_ = shown.panel(now_s=5.0).splitlines()[1:]
    assert re.search(r" 7/40 \(\+3 without a signal\) +ETA 0:15", grpo)
    assert "signal" not in sft
    assert sft.count("━") == grpo.count("━"), "the bars stay aligned"
    narrow = Shown(StageTotal("grpo", 40), width=50)
    narrow.update("grpo", 10, {}, now_s=5.0, skipped=3)
    assert re.search(r" 7/40 +ETA 0:15", narrow.panel(now_s=5.0))


def test_stages_are_announced_once_and_with_steps():
    with pytest.raises(ValueError, match="steps=0"):
        StageTotal("sft", 0)
    with pytest.raises(ValueError, match="must differ"):
        LiveView("title", [StageTotal("sft", 1), StageTotal("sft", 2)])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(1, 120))
def test_a_history_is_drawn_in_the_width_there_is_and_within_what_was_measured(values, width):
    drawn = resampled(values, width)
    assert len(drawn) == min(len(values), width)
    slack = 1e-6 * max(abs(value) for value in values)
    assert all(min(values) - slack <= value <= max(values) + slack for value in drawn)


def test_numbers_are_written_as_people_read_them():
    assert [format_duration(value) for value in (8e-7, 0.0021, 0.25, 43.0, 725.4, 11_240)] == [
        "1 µs", "2.1 ms", "250 ms", "43.0 s", "12 min 05 s", "3 h 07 min",
    ]  # fmt: skip
    assert [format_clock(value) for value in (0, 43.9, 725, 11_241)] == ["0:00", "0:43", "12:05", "3:07:21"]
    assert [format_value(value, "bytes") for value in (12, 1_612_800, 35.7e9)] == ["12 B", "1.61 MB", "35.7 GB"]
    assert [format_value(value, "count") for value in (837, 999.6, 5240, 1_020_000)] == [
        "837",
        "1 k",
        "5.24 k",
        "1.02 M",
    ]
    assert format_value(0.9089, "share") == "90.9 %"
    assert format_value(1.0000021, "ratio") == "1.000002"
    assert format_value(0.00031, "scientific") == "3.1e-04"
