"""Dumps of other trainers are read as they write them, and what they lack is said."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from rl_observe.cli import app
from rl_observe.diagnose import diagnose
from rl_observe.importers import FORMATS, import_run
from rl_observe.recorded_steps import RecordedStepError


def write_verl(folder):
    """As `_dump_generations` of verl's RayPPOTrainer writes it: one file per step, one line per response."""
    folder.mkdir()
    for step in (1, 2):
        lines = [
            {"input": f"user\nWhat is {row // 4}+1?", "output": f"It is {row % 4}", "gts": str(row // 4 + 1),
             "score": float(row % 4 == row // 4 + 1), "step": step, "acc": True}
            for row in range(8)
        ]  # fmt: skip
        (folder / f"{step}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def write_nemo_rl(folder, *, newer=True, temperature=1.0):
    """As `log_batched_dict_as_jsonl` writes NeMo-RL's `log_data`: padded lists, one line per sample."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = []
    for row in range(8):
        length = 3 + int(rng.integers(8, 13))
        prev = [0.0] * 3 + (-rng.random(length - 3) - 0.01).tolist() + [0.0] * (16 - length)
        line = {"content": f"prompt {row // 4} answer", "rewards": float(row % 2), "input_lengths": length}
        line |= {"generation_logprobs": [value / temperature for value in prev], "prev_logprobs": prev}
        if newer:
            line["token_ids"] = [
                10 + row // 4,
                11,
                12,
                *rng.integers(20, 30, length - 3).tolist(),
                *[0] * (16 - length),
            ]
            line["token_loss_mask"] = [0] * 3 + [1] * (length - 3) + [0] * (16 - length)
        lines.append(line)
    (folder / "train_data_step3.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def test_verl(tmp_path):
    write_verl(tmp_path / "dump")
    run, lacks = import_run("verl", tmp_path / "dump", tmp_path / "run")
    assert [*run.steps] == [1, 2]
    step = run.steps[2]
    assert step.columns["groups"].tolist() == [0] * 4 + [1] * 4
    assert step.rows[1]["reward"] == 1.0
    assert (step.rows[1]["prompt"], step.rows[1]["response"], step.rows[1]["expected"]) == (
        "user\nWhat is 0+1?", "It is 1", "1",
    )  # fmt: skip
    assert "".join(token["text"] for token in step.token_rows(1) if token["response"]) == "It is 1"
    assert any("log-probabilities" in lack for lack in lacks)
    found = diagnose(run)
    assert any("logp_old" in remark for remark in found.remarks)


def test_trl(tmp_path):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    (tmp_path / "completions").mkdir()
    table = {
        "step": [5] * 4, "prompt": ["p"] * 4, "completion": [f"c {row}" for row in range(4)],
        "accuracy_reward": [1.0, 0.0, 0.0, 1.0], "format_reward": [0.5, 0.5, 0.0, None], "advantage": [1.0, 0, -1.0, 0],
    }  # fmt: skip
    pandas.DataFrame(table).to_parquet(tmp_path / "completions" / "completions_00005.parquet")
    run, lacks = import_run("trl", tmp_path / "completions", tmp_path / "run")
    step = run.steps[5]
    assert step.columns["rewards"].tolist() == [1.5, 0.5, 0.0, 1.0]
    assert step.rows[0]["reward/accuracy_reward"] == 1.0
    assert step.rows[2]["advantage"] == -1.0
    assert any("reward_weights" in lack for lack in lacks)


def test_nemo_rl_has_both_log_probabilities_so_that_a_temperature_is_named(tmp_path):
    write_nemo_rl(tmp_path / "good")
    run, lacks = import_run("nemo-rl", tmp_path / "good", tmp_path / "run")
    assert lacks == []
    assert run.steps[3].columns["groups"].tolist() == [0] * 4 + [1] * 4
    assert diagnose(run).findings == []
    write_nemo_rl(tmp_path / "warm", temperature=1.5)
    run, _ = import_run("nemo-rl", tmp_path / "warm", tmp_path / "warm-run")
    first = diagnose(run).findings[0]
    assert (first.cause, first.step, first.row, first.token) == ("temperature", 3, 0, 3)
    write_nemo_rl(tmp_path / "older", newer=False)
    run, lacks = import_run("nemo-rl", tmp_path / "older", tmp_path / "older-run")
    assert len(lacks) == 2
    assert run.steps[3].response[:, :3].sum() == 0


def test_slime_is_read_without_running_its_code(tmp_path):
    torch = pytest.importorskip("torch")
    samples = [
        {"index": row, "group_index": row // 2, "prompt": f"p{row // 2}", "tokens": [5, 6, 7 + row, 8, 9],
         "response": "r", "response_length": 3, "label": "7", "reward": float(row % 2), "loss_mask": [1, 0, 1],
         "rollout_log_probs": [-0.5, 0.0, -0.25], "status": "truncated" if row == 3 else "completed"}
        for row in range(4)
    ]  # fmt: skip
    torch.save({"rollout_id": 6, "samples": samples}, tmp_path / "data_6.pt")
    run, lacks = import_run("slime", tmp_path / "data_6.pt", tmp_path / "run")
    step = run.steps[7]
    assert step.response.tolist() == [[False, False, True, False, True]] * 4
    assert step.padded("logp_old")[0][[2, 4]].tolist() == [-0.5, -0.25]
    assert [row["truncated"] for row in step.rows] == [False, False, False, True]
    assert step.columns["groups"].tolist() == [0, 0, 1, 1]
    assert any("trainer's" in lack for lack in lacks)


def test_files_that_are_not_what_they_are_called_are_refused(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"input": "a"}\n')
    with pytest.raises(RecordedStepError, match="line 1 has no output, score; it has input"):
        import_run("verl", tmp_path / "1.jsonl", tmp_path / "run")
    with pytest.raises(RecordedStepError, match="choose verl, trl, nemo-rl, slime"):
        import_run("openrlhf", tmp_path, tmp_path / "run")
    with pytest.raises(RecordedStepError, match="holds no file"):
        import_run("nemo-rl", tmp_path, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert {*FORMATS} == {"verl", "trl", "nemo-rl", "slime"}


def test_the_command_says_what_the_files_lack(tmp_path):
    write_verl(tmp_path / "dump")
    answer = CliRunner().invoke(app, ["import", "verl", str(tmp_path / "dump"), str(tmp_path / "run"), "--json"])
    assert answer.exit_code == 0
    lines = answer.output.splitlines()
    assert lines[1].startswith("not in these files: token ids")
    assert json.loads(lines[-1])["steps"] == [1, 2]
