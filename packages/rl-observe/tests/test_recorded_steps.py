"""Recorded steps: what was recorded is read back, whatever a kill leaves is complete or refused, and few bytes go."""

import dataclasses
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from rl_observe import RunDirectory
from rl_observe.compare import compare_records
from rl_observe.config import RecordedStepsConfig
from rl_observe.diagnose import diagnose
from rl_observe.recorded_steps import (
    LEAST_BYTES,
    RecordedStep,
    RecordedStepError,
    RecordedSteps,
    StepRollouts,
    TrainedRows,
)
from rl_observe.replay import replay
from rl_observe.report.rollouts import browsable
from rl_observe.show import rollouts_table
from rl_observe.step_recorder import StepRecorder


def make_rollouts(*, rows=8, group_size=4, prompt=3, response=5, seed=0, **changes):
    """Rollouts of random lengths: `prompt` tokens, then up to `response` more."""
    rng = np.random.default_rng(seed)
    lengths = prompt + rng.integers(1, response + 1, rows)
    lengths[0] = prompt + response
    places = np.arange(prompt + response)
    filled = places < lengths[:, None]
    sampled = filled & (places >= prompt)
    logp_old = np.where(sampled, -rng.random(filled.shape), 0.0).astype(np.float32)
    rewards = rng.integers(0, 2, rows).astype(np.float64)
    given = {
        "tokens": np.where(filled, rng.integers(3, 40, filled.shape), 0),
        "lengths": lengths,
        "response": sampled,
        "logp_old": logp_old,
        "logp": np.where(sampled, logp_old + 1e-3, np.nan).astype(np.float32),
        "advantage": np.where(sampled, rewards[:, None] - 0.5, np.nan),
        "loss": np.where(sampled, 0.25, np.nan),
        "turns": np.where(sampled, 0, -1),
        "versions": np.where(sampled, 7, -1),
        "rewards": rewards,
        "groups": np.arange(rows) // group_size,
        "truncated": np.zeros(rows, dtype=bool),
        "failed": np.zeros(rows, dtype=bool),
        "sources": [f"rows.jsonl line {row // group_size + 1}" for row in range(rows)],
        "prompts": [f"question {row // group_size}" for row in range(rows)],
        "responses": [f"answer {row}" for row in range(rows)],
    }
    return StepRollouts(**(given | changes))


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory.create(tmp_path / "run")
    directory.metrics.touch()
    return directory


def record(run, steps, config=None, **options):
    recorder = StepRecorder(run, config, **options)
    for step in steps:
        recorder.record("grpo", step, make_rollouts(seed=step), updates=[{"step": step, "loss": 0.5}])
    recorder.close()
    return recorder


def test_what_was_recorded_is_read_back_bit_for_bit(run):
    given = make_rollouts()
    recorder = StepRecorder(run, decode=lambda ids: f"[{ids[0]}]")
    recorder.record("grpo", 3, given, updates=[{"step": 3, "grad_norm": 1.5}], about={"version": 2})
    recorder.close()
    step = run.steps[3]
    assert (step.stage, step.step, step.version) == ("grpo", 3, 2)
    assert step.updates == [{"step": 3, "grad_norm": 1.5}]
    where = np.asarray(given.response)
    assert np.array_equal(step.response, where)
    assert np.array_equal(np.where(step.filled, step.padded("tokens"), 0), given.tokens)
    for name in ("logp_old", "logp", "advantage", "loss"):
        assert np.array_equal(step.padded(name)[where], np.asarray(getattr(given, name), dtype=np.float32)[where]), name
    assert np.isnan(step.padded("logp")[~where]).all()
    assert np.array_equal(step.padded("versions"), given.versions)
    assert np.array_equal(step.columns["rewards"], given.rewards)
    assert [each["source"] for each in step.shared] == given.sources
    assert step.text(5) == "answer 5"
    first = step.token_rows(0)[3]
    assert first["text"] == f"[{first['token']}]"
    assert first["ratio"] == pytest.approx(np.exp(1e-3), rel=1e-4)


def test_columns_that_differ_within_a_row_keep_every_token(run):
    given = make_rollouts()
    versions = np.where(given.response, np.arange(given.response.shape[1]), -1)
    advantage = np.where(given.response, np.linspace(-1, 1, given.response.shape[1]), np.nan)
    step = RecordedStep.of("grpo", 1, make_rollouts(versions=versions, advantage=advantage))
    assert np.array_equal(step.padded("versions"), versions)
    assert np.array_equal(step.padded("advantage")[given.response], advantage.astype(np.float32)[given.response])


def test_rows_as_the_steps_had_them_are_laid_out_like_columns_of_the_batch():
    """Two steps on other rows in another order, each as wide as its own rows, and a later epoch, which is left out."""
    rng = np.random.default_rng(0)
    given = make_rollouts()
    order = rng.permutation(8)
    columns = {name: np.asarray(getattr(given, name)) for name in ("logp", "loss", "advantage")}
    columns["clipped"] = rng.random(given.response.shape) < 0.5
    update = np.full(8, -1)
    trained, mask = [], np.zeros_like(given.response)
    for number, rows in enumerate((order[:3], order[3:7], order[:3])):
        width = int(given.lengths[rows].max())
        others = 1.0 if number == 2 else 0.0
        parts = {
            name: each[rows, :width] + others if name != "clipped" else each[rows, :width]
            for name, each in columns.items()
        }
        unknown = {"logp_ref": np.full((len(rows), width), np.nan)}
        trained.append(TrainedRows(rows=rows, trainable=given.response[rows, :width], columns=parts | unknown))
        update[rows] = np.where(update[rows] < 0, number, update[rows])
        mask[rows] = given.response[rows]
    plainly = {name: np.where(mask, each, False if name == "clipped" else np.nan) for name, each in columns.items()}
    absent = {"logp": None, "loss": None, "advantage": None, "update": None}
    one = RecordedStep.of("grpo", 1, make_rollouts(**absent, trained=trained))
    two = RecordedStep.of("grpo", 1, make_rollouts(**plainly, trainable=mask, update=update))
    assert one.columns.keys() == two.columns.keys()
    for name, column in two.columns.items():
        assert np.array_equal(one.columns[name], column, equal_nan=column.dtype.kind == "f"), name
    narrow = TrainedRows(rows=[0, 1], trainable=np.ones((2, 8), dtype=bool), columns={"logp": np.zeros((2, 7))})
    with pytest.raises(
        RecordedStepError, match=r"logp of update 0 has the shape \[2, 7\], its trainable tokens \[2, 8\]"
    ):
        RecordedStep.of("grpo", 1, make_rollouts(trained=[narrow]))


def test_rollouts_are_a_dataframe(run):
    pandas = pytest.importorskip("pandas")
    record(run, [1])
    frame = run.steps[1].rollouts
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 8
    assert {"group", "source", "prompt", "response", "reward", "advantage", "response_tokens"} <= {*frame.columns}
    assert frame.sort_values("reward").iloc[0].reward == frame.reward.min()
    assert len(run.steps[1].tokens(0)) == 8


DESCRIPTION = {
    "version": 7, "seed": 0, "precision": "float32", "device": "cpu", "special_token_ids": {"eos": 2},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 9}, "objective": {"advantage": {"scale": "none"}},
    "timings": {f"phase_s/{name}": 0.1234567 for name in ("generate", "train", "refit")},
}  # fmt: skip


def _rows_of(*arrays):
    return zip(*arrays, strict=True)


def twice_its_tokens_and_log_probabilities(step):
    """In bytes, at 4 bytes for each."""
    known = sum(step.has(name) for name in ("logp_old", "logp", "logp_ref", "logp_proximal"))
    return 2 * 4 * (int(step.filled.sum()) + known * int(step.response.sum()))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 96), group_size=st.integers(1, 8), prompt=st.integers(1, 60), response=st.integers(1, 120),
    vocabulary=st.sampled_from([40, 50_000, 150_000]), seed=st.integers(0, 1000),
    texts=st.sampled_from(["none", "of the tokens", "of other words", "long"]),
    columns=st.sets(st.sampled_from(["logp_ref", "logp_proximal", "weight", "entropy", "value", "figures", "others"])),
    with_pieces=st.booleans(),
)  # fmt: skip
def test_a_bundle_takes_at_most_twice_its_tokens_and_log_probabilities(
    tmp_path_factory, rows, group_size, prompt, response, vocabulary, seed, texts, columns, with_pieces
):
    """Short and long rows, with all texts and none, every column and few: within the bound, and nothing lost unsaid."""
    rng = np.random.default_rng(seed)
    given = make_rollouts(rows=rows, group_size=group_size, prompt=prompt, response=response, seed=seed)
    shape = given.tokens.shape
    tokens = rng.integers(3, vocabulary, shape)
    names = [f"t{number}" for number in range(vocabulary)]
    changes = {name: rng.normal(size=shape) for name in columns - {"figures", "others"}}
    if "figures" in columns:
        changes["figures"] = {"score": rng.normal(size=rows), "margin": rng.normal(size=rows)}
    if "others" in columns:
        changes |= {"advantage": rng.normal(size=shape), "token_rewards": rng.normal(size=shape)}
    said = []
    if texts == "of the tokens":
        said = ["".join(names[token] for token in row[where]) for row, where in _rows_of(tokens, given.response)]
    elif texts != "none":
        longest = response if texts == "of other words" else 2000
        said = [" ".join(map(str, rng.integers(0, 10**6, rng.integers(1, longest + 1)))) for _ in range(rows)]
    changes |= {"responses": said, "failures": [text or None for text in said]}
    changes |= {} if said else {"prompts": (), "sources": ()}
    given = make_rollouts(
        rows=rows, group_size=group_size, prompt=prompt, response=response, seed=seed, tokens=tokens, **changes
    )
    whole = RecordedStep.of("grpo", 1, given)
    run = RunDirectory.create(tmp_path_factory.mktemp("bound") / "run")
    recorder = StepRecorder(run, decode=(lambda ids: names[ids[0]]) if with_pieces else None)
    recorder.record("grpo", 1, given, updates=[{"step": 1, "loss": 0.5}], about=DESCRIPTION)
    recorder.close()
    assert recorder.unwritten == []
    step = run.steps[1]
    assert step.path.stat().st_size <= max(twice_its_tokens_and_log_probabilities(step), LEAST_BYTES)
    for name, column in whole.columns.items():
        kind = "figures" if name.startswith("figure/") else name
        assert (kind in step.cut) != (name in step.columns)
        if name in step.columns:
            assert step.columns[name].dtype == column.dtype
            assert np.array_equal(step.columns[name], column, equal_nan=True), name
    assert {"tokens", "flags", "lengths", "rewards", "groups", "logp_old", "logp"} <= {*step.columns}
    for one, other in zip(step.lines, whole.lines, strict=True):
        for name, text in other.items():
            kind = {"source": "sources", "prompt": "prompts", "response": "responses", "failure": "failures"}[name]
            assert one[name] == text if kind not in step.cut else name not in one
    if with_pieces and "pieces" not in step.cut:
        assert {step.piece(token) for token in tokens[step.filled].tolist()} <= {*names}
    if texts in {"none", "of the tokens"} and with_pieces and vocabulary == 40 and columns <= {"logp_ref", "figures"}:
        assert step.cut == []  # a usual step loses nothing


def test_what_was_cut_is_told_by_every_reader(run):
    """A step of few tokens whose longest texts, and a column that is only shown, have no place in the bundle."""
    rng = np.random.default_rng(0)
    long = ["".join(map(str, rng.integers(0, 10, 400))) for _ in range(200)]
    noise = {name: rng.normal(size=(200, 24)) for name in ("weight", "entropy", "value", "advantage", "loss")}
    given = make_rollouts(rows=200, group_size=1, prompt=4, response=20, responses=long, prompts=long, **noise)
    recorder = StepRecorder(run, decode=lambda ids: f"{ids[0]}")
    recorder.record("grpo", 1, given)
    recorder.close()
    step = run.steps[1]
    assert {*step.cut[:2]} == {"prompts", "responses"}
    assert step.cut[2:] == ["weight"]
    assert step.shared[5]["source"] == given.sources[5]
    assert step.lines[0].get("response") is None
    assert step.text(0) == "".join(str(token) for token in given.tokens[0][given.response[0]])
    with pytest.raises(RecordedStepError, match="weight of step 1 was cut"):
        step.padded("weight")
    said = "step 1 is without"
    assert said in " ".join(diagnose(run).remarks)
    assert said in browsable(run)["left_out"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(rollouts_table(step, step.rows[:2]))
    assert said in console.export_text()


def test_without_the_losses_a_step_is_compared_and_replayed_without_them_and_that_is_said(run, tmp_path):
    """As of a bundle that had to cut them."""
    record(run, [1])
    step = run.steps[1]
    shorter = dataclasses.replace(
        step,
        data={**step.data, "cut": ["loss"], "updates": []},
        columns={name: column for name, column in step.columns.items() if name != "loss"},
    )
    assert [each.reason for each in replay(shorter).results if each.stage == "loss"] == [shorter.cut_told]
    other = RunDirectory.create(tmp_path / "other")
    other.metrics.touch()
    other.recorded_steps.mkdir()
    shorter.write(other.recorded_steps)
    found = compare_records(run, other)
    assert found.first is None
    assert [shorter.cut_told in remark for remark in found.remarks] == [True]


def test_a_response_that_its_tokens_make_up_is_not_stored_and_read_all_the_same(run):
    given = make_rollouts(rows=3, group_size=3)
    said = [
        "".join(f"<{token}>" for token in row[where]) for row, where in zip(given.tokens, given.response, strict=True)
    ]
    recorder = StepRecorder(run, decode=lambda ids: f"<{ids[0]}>")
    recorder.record("grpo", 1, make_rollouts(rows=3, group_size=3, responses=[said[0], "another text", said[2]]))
    recorder.close()
    step = run.steps[1]
    assert step.texts["responses"] == [None, "another text", None]
    assert [line["response"] for line in step.lines] == [said[0], "another text", said[2]]


def test_secrets_are_removed_from_every_text(run):
    """Also where the tokens make the text up, and where a text is a piece."""
    secret = "hf_abcdefghijklmnopqrst"
    rows = {"rows": 2, "group_size": 2, "prompt": 1, "response": 1}
    texts = {name: [f"use {secret} here", "nothing"] for name in ("prompts", "sources", "failures", "expected")}
    tokens = np.array([[3, 4], [3, 5]])
    for step, responses in enumerate(([secret, "y"], [f"x {secret}", "y"]), 1):
        recorder = StepRecorder(run, decode=lambda ids: {3: "x", 4: secret, 5: "y"}[ids[0]])
        recorder.record("grpo", step, make_rollouts(**rows, tokens=tokens, responses=responses, **texts))
        recorder.close()
        assert recorder.unwritten == []
        read = run.steps[step]
        assert secret not in json.dumps([read.data, read.texts, read.lines, read.pieces])
        assert read.lines[0]["response"] == responses[0].replace(secret, "<redacted>")
        assert read.lines[1]["response"] == "y"
        with zipfile.ZipFile(read.path) as bundle:
            assert not any(secret.encode() in bundle.read(name) for name in bundle.namelist())


def test_only_the_steps_that_the_configuration_names_are_kept(run):
    record(run, range(1, 13), RecordedStepsConfig(last=2, every=5, around_events=0))
    assert [*run.steps] == [5, 10, 11, 12]


def test_steps_around_an_event_are_kept(run):
    recorder = StepRecorder(run, RecordedStepsConfig(last=2, around_events=1))
    for step in range(1, 10):
        recorder.record("grpo", step, make_rollouts(seed=step))
        if step == 4:
            recorder.keep_around("grpo", step)
    recorder.close()
    assert [*run.steps] == [3, 4, 5, 8, 9]
    with run.events.open("w") as file:
        file.write(json.dumps({"stage": "grpo", "step": 8, "name": "no_signal"}) + "\n")
    resumed = StepRecorder(run, RecordedStepsConfig(last=1, around_events=1))  # reads the events of the earlier process
    for step in (10, 11, 12):
        resumed.record("grpo", step, make_rollouts(seed=step))
    resumed.close()
    assert [*run.steps] == [8, 9, 12]


def test_several_optimizer_steps_on_one_batch_are_one_bundle_found_by_each_number(run):
    recorder = StepRecorder(run)
    for last in (4, 8):
        recorder.record("grpo", last, make_rollouts(), updates=[{"step": last - 3 + each} for each in range(4)])
    recorder.close()
    assert run.steps[6].step == 8
    with pytest.raises(KeyError, match=r"step 9 of grpo is not recorded.*recorded are 4, 8"):
        run.steps[9]


def test_bytes_are_bounded_and_the_newest_steps_stay(run):
    record(run, range(1, 4), RecordedStepsConfig(last=8))
    size = max(path.stat().st_size for path in run.recorded_steps.glob("*.zip"))
    record(run, range(4, 9), RecordedStepsConfig(last=8, max_bytes=3 * size + 100))
    assert [*run.steps] == [6, 7, 8]


def test_a_step_larger_than_all_bytes_is_told_and_the_run_goes_on(run):
    told = []
    recorder = record(run, [1], RecordedStepsConfig(max_bytes=10), warn=told.append)
    assert "max_bytes=10" in told[0]
    assert recorder.unwritten
    assert not run.steps


def test_wrong_shapes_are_told_with_the_column(run):
    recorder = StepRecorder(run)
    recorder.record("grpo", 1, make_rollouts(logp_old=np.zeros((8, 3))))
    recorder.close()
    assert recorder.unwritten == ["logp_old has the shape [8, 3], and tokens [8, 8]"]


def test_a_file_cut_or_changed_at_any_byte_is_refused(run):
    """Every length, and a flipped bit in every byte that holds content."""
    record(run, [1])
    path = run.recorded_steps / "grpo-00000001.zip"
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(RecordedStepError, match="no complete recorded step"):
            RecordedStep.read(path)
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as bundle:
        tensors = bundle.getinfo("tensors.safetensors")
    start = whole.index(b"tensors.safetensors") + len("tensors.safetensors")
    for place in range(start, start + tensors.file_size, 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RecordedStepError):
            RecordedStep.read(path)
    steps, remarks = run.steps.readable()
    assert (steps, len(remarks)) == ([], 1)


def writers_of(process_id):
    return [each for each in psutil.Process(process_id).children() if "write_steps" in " ".join(each.cmdline())]


def test_if_the_process_that_writes_is_killed_its_step_is_told_and_the_next_ones_are_written(run):
    told = []
    recorder = StepRecorder(run, decode=lambda ids: f"<{ids[0]}>", warn=told.append)
    for step in (1, 2):
        recorder.record("grpo", step, make_rollouts(seed=step))
    recorder._waiting.join()
    (writer,) = writers_of(os.getpid())
    assert not [each.path for each in writer.memory_maps() if Path(each.path).name.startswith("libtorch")]
    assert os.getpgid(writer.pid) != os.getpgid(0), "else Ctrl-C would end it"
    writer.suspend()
    recorder.record("grpo", 3, make_rollouts(seed=3))
    writer.kill()
    recorder.record("grpo", 4, make_rollouts(seed=4))
    recorder.close()
    assert writers_of(os.getpid()) == []
    lost = [why for why in recorder.unwritten if "ended with exit code -9, and this step is lost" in why]
    assert len(lost) == len(recorder.unwritten) == 1
    assert told == [f"a step could not be recorded: {lost[0]}"]
    assert [*run.steps] == [1, 2, 4]
    assert run.steps[4].token_rows(0)[0]["text"].startswith("<"), "the new process is given all texts anew"


def test_a_tokenizer_that_fails_costs_its_step_alone(run):
    """The process that writes waits for the texts of tokens then."""
    recorder = StepRecorder(run, decode=lambda ids: 1 / 0)
    recorder.record("grpo", 1, make_rollouts(seed=1))
    recorder._waiting.join()
    recorder.decode = lambda ids: f"<{ids[0]}>"
    recorder.record("grpo", 2, make_rollouts(seed=2))
    recorder.close()
    assert recorder.unwritten == ["division by zero"]
    assert [*run.steps] == [2]
    assert run.steps[2].piece(int(run.steps[2].padded("tokens")[0, 0])).startswith("<")


def _write_forever(folder, started):
    run = RunDirectory(folder)
    recorder = StepRecorder(run, RecordedStepsConfig(last=1000))
    for step in range(1, 10**6):
        recorder.record("grpo", step, make_rollouts(rows=64, response=200, seed=step % 7))
        started.value = step


def test_a_killed_process_leaves_complete_steps_and_loses_at_most_the_one_in_flight(run, monkeypatch):
    """Killed with SIGKILL at four moments of its writing."""
    root = Path(__file__).parents[__name__.count(".")]
    monkeypatch.syspath_prepend(root)  # a new process imports this module by its name
    context = multiprocessing.get_context("spawn")
    for kill in range(4):
        handed_over = context.Value("i", 0)
        process = context.Process(target=_write_forever, args=(run.path, handed_over))
        process.start()
        first = handed_over.value
        while handed_over.value < first + 3:
            assert process.is_alive()
            time.sleep(0.01)
        time.sleep(0.003 * kill)
        (writer,) = writers_of(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        writer.wait(60)  # it writes the step that it has, and ends
        steps, remarks = run.steps.readable()
        assert remarks == []
        # `handed_over` is counted after `record` returned, so one more may have been handed over, and be there.
        assert [each.step for each in steps][-1] >= handed_over.value - 1
        assert [each.step for each in steps] == [*range(1, steps[-1].step + 1)]
        for path in run.recorded_steps.glob("*.zip"):
            path.unlink()


FORKING_LOOP = """
import os, sys, time
from pathlib import Path
from rl_observe import RunDirectory, StepRecorder
from test_recorded_steps import make_rollouts
recorder = StepRecorder(RunDirectory(Path(sys.argv[1])))
recorder.record("grpo", 1, make_rollouts())
recorder._waiting.join()
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
time.sleep(600)
"""


def test_the_process_that_writes_ends_with_a_killed_loop_although_a_fork_of_that_holds_its_pipe(run):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKING_LOOP, str(run.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}) as loop:
        forked = int(loop.stdout.readline())
        try:
            (writer,) = writers_of(loop.pid)
            loop.kill()
            writer.wait(60)
            assert psutil.pid_exists(forked), "its end of the pipe was open all the time"
        finally:
            os.kill(forked, signal.SIGKILL)
    assert [*run.steps] == [1]


def test_a_resumed_run_discards_the_steps_that_it_takes_again(run):
    record(run, range(1, 5), RecordedStepsConfig(last=4))
    StepRecorder(run).discard_after("grpo", 2)
    assert [*run.steps] == [1, 2]


def test_steps_of_two_stages_are_told_apart(run):
    recorder = StepRecorder(run)
    recorder.record("sft", 9, make_rollouts())
    recorder.record("grpo", 2, make_rollouts())
    recorder.close()
    assert [*run.steps] == [2]
    assert [*RecordedSteps(run, "sft")] == [9]
    assert run.steps.of_stage("sft")[9].stage == "sft"


def test_another_format_is_refused(run):
    record(run, [1])
    path = run.recorded_steps / "grpo-00000001.zip"
    with zipfile.ZipFile(path) as bundle:
        parts = {name: bundle.read(name) for name in bundle.namelist()}
    parts["step.json"] = parts["step.json"].replace(b'"format": 2', b'"format": 1')
    with zipfile.ZipFile(path, "w") as bundle:
        for name, content in parts.items():
            bundle.writestr(name, content)
    with pytest.raises(RecordedStepError, match="format 1, and this version reads 2"):
        RecordedStep.read(path)
