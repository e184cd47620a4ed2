"""The recorded rollouts of a run as data for the report's browser, in few bytes.

    rows      of each rollout: step, stage, group, reward, advantage, tokens, whether it was cut off
    texts     prompt, gold answer and source once per group
    tokens    for as many rollouts as fit into `MAX_TOKENS`: piece, flags, and log-probabilities in thousandths

Numbers travel as little-endian arrays in base64, which a browser decodes in milliseconds. NaN is the least of an int16.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_observe.recorded_steps import RecordedStep, RecordedSteps
from rl_observe.run_directory import RunDirectory

__all__ = ["MAX_ROLLOUTS", "MAX_TOKENS", "browsable"]

Array: TypeAlias = NDArray[Any]

MAX_ROLLOUTS = 20_000
MAX_TOKENS = 600_000
"""A page holds at most so many; those of the newest steps come first. A token takes about 15 bytes."""

THOUSANDTHS = ("logp_old", "logp", "advantage")
"""Columns of tokens that the page shows; the ratio follows from two of them."""

UNKNOWN = -32768


def browsable(run: RunDirectory) -> dict[str, Any] | None:
    """What the page embeds of all recorded steps, and `left_out`, a sentence about what does not fit. None if none."""
    steps, remarks = _all_steps(run)
    if not steps:
        return None
    kept: list[RecordedStep] = []
    rollouts = 0
    for step in reversed(steps):
        rollouts += len(step)
        if kept and rollouts > MAX_ROLLOUTS:
            break
        kept.insert(0, step)
    with_tokens, budget = set(), MAX_TOKENS
    for step in reversed(kept):
        if (budget := budget - int(step.columns["lengths"].sum())) < 0:
            break
        with_tokens.add(id(step))
    pieces: dict[str, int] = {}
    rows: dict[str, list[Any]] = {name: [] for name in ("step", "row", "group", "length", "sampled")}
    rows |= {name: [] for name in ("truncated", "first", "text")}
    numbers: dict[str, list[float | None]] = {"reward": [], "advantage": []}
    texts: list[list[str]] = []
    tokens: dict[str, list[Array]] = {"piece": [], "flags": [], **{name: [] for name in THOUSANDTHS}}
    filled = 0
    for step_number, step in enumerate(kept):
        of_group: dict[int, int] = {}
        own = step.columns["tokens"]
        ids, inverse = np.unique(own, return_inverse=True)
        place = np.array([pieces.setdefault(step.piece(token), len(pieces)) for token in ids.tolist()], dtype=np.uint32)
        if id(step) in with_tokens:
            tokens["piece"].append(place[inverse])
            tokens["flags"].append(step.columns["flags"].astype(np.uint8))
            for name in THOUSANDTHS:
                values = step.padded(name)[step.filled] if step.has(name) else np.full(len(own), np.nan)
                tokens[name].append(_thousandths(values))
        for row in step.rows:
            shared = of_group.get(row["group"])
            if shared is None:
                shared = of_group[row["group"]] = len(texts)
                texts.append([row["prompt"] or "", str(row["expected"] or ""), str(row["source"] or "")])
            rows["step"].append(step_number)
            rows["row"].append(row["row"])
            rows["group"].append(shared)
            rows["length"].append(int(step.columns["lengths"][row["row"]]))
            rows["sampled"].append(row["response_tokens"])
            rows["truncated"].append(int(row["truncated"]) + 2 * int(row["failed"]))
            rows["first"].append(filled if id(step) in with_tokens else -1)
            rows["text"].append(_short(row["response"]))
            numbers["reward"].append(_finite(row["reward"]))
            numbers["advantage"].append(_finite(row["advantage"]))
            if id(step) in with_tokens:
                filled += rows["length"][-1]
    named = [f"{each.stage} {each.step}" for each in kept]
    left_out = [*remarks, *(f"{told}." for step in kept if (told := step.cut_told))]
    if len(kept) < len(steps):
        left_out.append(f"{len(steps) - len(kept)} older recorded steps are not on this page.")
    if len(with_tokens) < len(kept):
        left_out.append(f"Of {len(kept) - len(with_tokens)} older steps the page has no tokens; rl-observe show has.")
    return {
        "steps": named,
        "columns": {
            name: _encoded(values, np.int32) for name, values in rows.items() if name not in {"text", "truncated"}
        }
        | {"truncated": _encoded(rows["truncated"], np.uint8)},
        "responses": rows["text"],
        **numbers,
        "texts": texts,
        "pieces": [*pieces],
        "tokens": {
            "piece": _encoded(_joined(tokens["piece"], np.uint32), np.uint32),
            "flags": _encoded(_joined(tokens["flags"], np.uint8), np.uint8),
            **{name: _encoded(_joined(tokens[name], np.int16), np.int16) for name in THOUSANDTHS},
        },
        "left_out": " ".join(left_out),
    }


def _all_steps(run: RunDirectory) -> tuple[list[RecordedStep], list[str]]:
    """Those of every stage, each stage's in order, and a sentence about each that cannot be read."""
    steps, remarks = [], []
    for stage in RecordedSteps(run).stages:
        found, unreadable = RecordedSteps(run, stage).readable()
        steps += found
        remarks += unreadable
    return steps, remarks


def _thousandths(values: Array) -> Array:
    rounded = np.clip(np.round(1000 * np.nan_to_num(values)), -32767, 32767)
    return np.where(np.isfinite(values), rounded, UNKNOWN).astype(np.int16)


def _joined(parts: Sequence[Array], dtype: type[Any]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def _encoded(values: Any, dtype: type[Any]) -> str:
    little: Array = np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    return base64.b64encode(little.tobytes()).decode("ascii")


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(float(value), 6)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 160 else line[:159] + "…"
