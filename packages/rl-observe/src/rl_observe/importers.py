"""Read the rollouts that other trainers dump, so that `show`, `diagnose` and `compare` work on their runs too.

    trainer   how it dumps                                         what is in it
    verl      trainer.rollout_data_dir: <step>.jsonl               text, score, gold answer
    trl       log_completions: completions_<step>.parquet          text, rewards by function, advantage
    nemo-rl   train_data_step<N>.jsonl                             text, rewards, both log-probabilities, maybe ids
    slime     --save-debug-rollout-data: <name>_<rollout_id>.pt    token ids, mask, the engine's logp, reward

Where a file has text and no token ids, each word stands for a token, so that lengths and repetition can be looked at,
and `about["lacks"]` says what cannot be answered. Files of slime are read by `torch.load(weights_only=True)`, so that
nothing in them is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_observe.config import RecordedStepsConfig
from rl_observe.log_files import MetricsLog
from rl_observe.recorded_steps import RecordedStepError, StepRollouts
from rl_observe.run_directory import RunDirectory
from rl_observe.step_recorder import StepRecorder

__all__ = ["FORMATS", "ImportedStep", "import_run", "read_nemo_rl", "read_slime", "read_trl", "read_verl"]

Array: TypeAlias = NDArray[Any]

NO_TOKENS = "token ids, masks and log-probabilities: each word stands for a token"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedStep:
    """The rollouts of one step of another trainer."""

    step: int
    """As that trainer counts."""

    rollouts: StepRollouts
    """What was in its file."""

    about: Mapping[str, Any]
    """`imported_from`, `lacks`."""


def import_run(trainer: str, source: Path | str, run_dir: Path | str) -> tuple[RunDirectory, list[str]]:
    """Make a run directory of another trainer's dump; return it, and what the dump lacks.

    Args:
        trainer: one of `FORMATS`.
        source: a file, or the folder of all files of a run.
        run_dir: a new run directory.

    Raises:
        RecordedStepError: the trainer is unknown, no file is found, or one is not as that trainer writes it.
        RunDirectoryError: the run directory cannot be created.
    """
    if trainer not in FORMATS:
        raise RecordedStepError(f"{trainer!r} is no trainer whose rollouts are read; choose {', '.join(FORMATS)}")
    steps = sorted(FORMATS[trainer](Path(source)), key=lambda each: each.step)
    if not steps:
        raise RecordedStepError(f"{source} holds no rollouts of {trainer}")
    run = RunDirectory.create(run_dir)
    recorder = StepRecorder(run, RecordedStepsConfig(last=len(steps), around_events=0))
    with MetricsLog(run, tensorboard=False) as log:
        for each in steps:
            recorder.record("imported", each.step, each.rollouts, about=each.about)
            log.write("imported", each.step, _figures(each.rollouts))
    recorder.close()
    if recorder.unwritten:
        raise RecordedStepError(recorder.unwritten[0])
    return run, [*dict.fromkeys(lack for each in steps for lack in each.about["lacks"])]


def read_verl(source: Path) -> Iterator[ImportedStep]:
    """Files of `trainer.rollout_data_dir`: lines with `input`, `output`, `score`, `step` and maybe `gts`."""
    for path in _files(source, "*.jsonl", r"\d+\.jsonl"):
        lines = _lines(path, needs=("input", "output", "score"))
        gold = [None if line.get("gts") is None else str(line["gts"]) for line in lines]
        yield _of_texts(
            "verl",
            int(lines[0].get("step", path.stem)),
            prompts=[str(line["input"]) for line in lines],
            responses=[str(line["output"]) for line in lines],
            rewards=np.array([float(line["score"]) for line in lines]),
            expected=gold if any(each is not None for each in gold) else (),
        )


def read_trl(source: Path) -> Iterator[ImportedStep]:
    """Files of `log_completions=True`: `step`, `prompt`, `completion`, one column per reward function, `advantage`."""
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise RecordedStepError("TRL's files are Parquet: pip install 'rl-observe[notebook]'") from error
    for path in _files(source, "completions_*.parquet", r"completions_\d+\.parquet"):
        table = pd.read_parquet(path)
        if missing := sorted({"step", "prompt", "completion", "advantage"} - set(table.columns)):
            raise RecordedStepError(f"{path} has no column {', '.join(missing)}; TRL's log_completions writes them")
        others = table.drop(columns=["step", "prompt", "completion", "advantage"]).select_dtypes("number")
        parts = np.nan_to_num(others.to_numpy(dtype=np.float64))
        yield _of_texts(
            "trl",
            int(table["step"].iloc[0]),
            prompts=[_text(value) for value in table["prompt"]],
            responses=[_text(value) for value in table["completion"]],
            rewards=parts.sum(axis=1),
            advantage=table["advantage"].to_numpy(dtype=np.float64),
            components=parts,
            component_names=[str(name) for name in others.columns],
            lacks=["reward_weights: the rewards of all functions are added up"] if parts.shape[1] > 1 else [],
        )


def read_nemo_rl(source: Path) -> Iterator[ImportedStep]:
    """Files `train_data_step<N>.jsonl`: `content`, `rewards`, `generation_logprobs`, `prev_logprobs`, `input_lengths`.

    Newer versions also write `token_ids`, `token_loss_mask` and `advantages`. Without a mask, a token of a response is
    one with a log-probability that is not 0.
    """
    for path in _files(source, "train_data_step*.jsonl", r"train_data_step\d+\.jsonl"):
        lines = _lines(path, needs=("content", "rewards", "generation_logprobs", "input_lengths"))
        logp_old = _padded([line["generation_logprobs"] for line in lines], np.nan)
        lengths = np.array([int(line["input_lengths"]) for line in lines])
        filled = np.arange(logp_old.shape[1]) < lengths[:, None]
        lacks = []
        if "token_loss_mask" in lines[0]:
            response = _padded([line["token_loss_mask"] for line in lines], 0)[:, : logp_old.shape[1]].astype(bool)
        else:
            response = np.nan_to_num(logp_old) != 0
            lacks.append("token_loss_mask: responses are the tokens whose log-probability is not 0")
        if "token_ids" in lines[0]:
            tokens = _padded([line["token_ids"] for line in lines], 0)[:, : logp_old.shape[1]].astype(np.int64)
            starts = np.where(response.any(axis=1), response.argmax(axis=1), lengths)
            groups = _numbered(
                [tuple(row[:start]) for row, start in zip(tokens.tolist(), starts.tolist(), strict=True)]
            )
        else:
            tokens, groups = np.zeros(logp_old.shape, dtype=np.int64), np.arange(len(lines))
            lacks.append("token_ids: all are 0, and which rollouts answer the same prompt is not known")
        optional: dict[str, Any] = {}
        if "prev_logprobs" in lines[0]:
            optional["logp"] = np.where(response, _padded([line["prev_logprobs"] for line in lines], np.nan), np.nan)
        if "advantages" in lines[0]:
            given = [line["advantages"] for line in lines]
            of_tokens = isinstance(given[0], list) and len(given[0]) > 1
            optional["advantage"] = _padded(given, np.nan) if of_tokens else np.array(given, dtype=float).reshape(-1)
        yield ImportedStep(
            step=int(re.findall(r"\d+", path.stem)[-1]),
            rollouts=StepRollouts(
                tokens=tokens,
                lengths=lengths,
                response=response & filled,
                logp_old=np.nan_to_num(logp_old),
                rewards=np.array([float(np.sum(line["rewards"])) for line in lines]),
                groups=groups,
                responses=[_text(line["content"]) for line in lines],
                **optional,
            ),
            about={"imported_from": f"nemo-rl: {path.name}", "lacks": lacks},
        )


def read_slime(source: Path) -> Iterator[ImportedStep]:
    """Files of `--save-debug-rollout-data`: a dict with `rollout_id` and `samples`, each sample a dict."""
    import torch  # seconds: only here

    for path in _files(source, "*.pt", r".*\.pt"):
        try:
            dump = torch.load(path, weights_only=True, map_location="cpu")
        except Exception as error:
            raise RecordedStepError(f"{path} cannot be read without running code of it: {error}") from error
        if not isinstance(dump, Mapping) or not dump.get("samples"):
            raise RecordedStepError(f"{path} has no `samples`; slime's --save-debug-rollout-data writes them")
        samples: Sequence[Mapping[str, Any]] = dump["samples"]
        if missing := sorted({"tokens", "response_length", "reward"} - set(samples[0])):
            raise RecordedStepError(f"{path}: its samples have no {', '.join(missing)}")
        lengths = np.array([len(each["tokens"]) for each in samples])
        tokens = _padded([list(each["tokens"]) for each in samples], 0).astype(np.int64)
        places = np.arange(tokens.shape[1])
        starts = lengths - np.array([int(each["response_length"]) for each in samples])
        response = (places >= starts[:, None]) & (places < lengths[:, None])
        logp_old = np.zeros(tokens.shape)
        has_logp = all(each.get("rollout_log_probs") is not None for each in samples)
        for row, each in enumerate(samples):
            if (mask := each.get("loss_mask")) is not None:  # of the response; observations are 0
                response[row, starts[row] : lengths[row]] &= np.array(mask, dtype=bool)
            if has_logp:
                logp_old[row, starts[row] : lengths[row]] = each["rollout_log_probs"]
        rewards, status = [each["reward"] for each in samples], [each.get("status") for each in samples]
        if any(isinstance(each, Mapping) for each in rewards):
            raise RecordedStepError(f"{path}: rewards are dicts; name the one that counts by --reward-key in slime")
        lacks = ["the trainer's log-probabilities, advantages and losses"]
        lacks += [] if has_logp else ["rollout_log_probs: the engine's log-probabilities"]
        given = [each.get("group_index") for each in samples]
        groups = _numbered(given if None not in given else [str(each.get("prompt")) for each in samples])
        gold = [None if each.get("label") is None else str(each["label"]) for each in samples]
        yield ImportedStep(
            step=int(dump.get("rollout_id", 0)) + 1,
            rollouts=StepRollouts(
                tokens=tokens,
                lengths=lengths,
                response=response,
                logp_old=np.where(response, logp_old, 0.0) if has_logp else None,
                rewards=np.array([0.0 if each is None else float(each) for each in rewards]),
                failed=np.array([one is None for one in rewards])
                | np.array([each in {"aborted", "failed"} for each in status]),
                truncated=np.array([each == "truncated" for each in status]),
                groups=groups,
                prompts=[_text(each.get("prompt", "")) for each in samples],
                responses=[str(each.get("response", "")) for each in samples],
                expected=gold if any(each is not None for each in gold) else (),
            ),
            about={"imported_from": f"slime: {path.name}", "lacks": lacks},
        )


FORMATS: dict[str, Callable[[Path], Iterator[ImportedStep]]] = {
    "verl": read_verl,
    "trl": read_trl,
    "nemo-rl": read_nemo_rl,
    "slime": read_slime,
}
"""Trainers, and what reads their files."""


def _files(source: Path, pattern: str, name: str) -> list[Path]:
    if source.is_file():
        return [source]
    found = [path for path in sorted(source.rglob(pattern)) if re.fullmatch(name, path.name)] if source.is_dir() else []
    if not found:
        raise RecordedStepError(f"{source} holds no file {pattern}")
    return found


def _lines(path: Path, *, needs: Sequence[str]) -> list[dict[str, Any]]:
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError as error:
            raise RecordedStepError(f"{path} line {number} is no JSON: {error}") from error
        if missing := [name for name in needs if name not in line]:
            raise RecordedStepError(f"{path} line {number} has no {', '.join(missing)}; it has {', '.join(line)}")
        lines.append(line)
    if not lines:
        raise RecordedStepError(f"{path} is empty")
    return lines


def _of_texts(
    trainer: str,
    step: int,
    *,
    prompts: Sequence[str],
    responses: Sequence[str],
    rewards: Array,
    lacks: Sequence[str] = (),
    **others: Any,
) -> ImportedStep:
    """Rollouts of which only the text is known: each word, with the space before it, stands for a token."""
    ids: dict[str, int] = {}
    rows, counts = [], []
    for prompt, response in zip(prompts, responses, strict=True):
        words = [re.findall(r"\s*\S+|\s+$", text) or [""] for text in (prompt, response)]
        counts.append(len(words[0]))
        rows.append([ids.setdefault(word, len(ids)) for word in (*words[0], *words[1])])
    lengths = np.array([len(row) for row in rows])
    tokens = _padded(rows, 0).astype(np.int64)
    places = np.arange(tokens.shape[1])
    return ImportedStep(
        step=step,
        rollouts=StepRollouts(
            tokens=tokens,
            lengths=lengths,
            response=(places >= np.array(counts)[:, None]) & (places < lengths[:, None]),
            rewards=rewards,
            groups=_numbered(prompts),
            prompts=prompts,
            responses=responses,
            pieces={number: word for word, number in ids.items()},
            **others,
        ),
        about={"imported_from": trainer, "lacks": [NO_TOKENS, *lacks]},
    )


def _padded(rows: Sequence[Sequence[float]], missing: float) -> Array:
    width = max(len(row) for row in rows)
    return np.array([[*row, *[missing] * (width - len(row))] for row in rows], dtype=np.float64)


def _numbered(keys: Sequence[object]) -> Array:
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _text(value: object) -> str:
    """A text, or a conversation as its messages' contents."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | np.ndarray):
        return "\n".join(_text(each.get("content", "") if isinstance(each, Mapping) else each) for each in value)
    return str(value)


def _figures(rollouts: StepRollouts) -> dict[str, float]:
    rewards, groups = np.asarray(rollouts.rewards), np.asarray(rollouts.groups)
    differing = [np.ptp(rewards[groups == group]) > 0 for group in np.unique(groups)]
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "response_tokens": float(np.asarray(rollouts.response).sum(axis=1).mean()),
        **({"groups_with_signal": float(np.mean(differing))} if len(differing) < len(rewards) else {}),
    }
