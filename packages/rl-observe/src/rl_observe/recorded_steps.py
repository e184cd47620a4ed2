"""Recorded steps: what an optimizer step was trained on, token by token, in one portable file.

    run.steps[120].rollouts                                 # a pandas DataFrame, one line per rollout

A bundle is `steps/<stage>-<step>.zip` in the run directory. It holds one batch of rollouts and every optimizer step
that was taken on them:

    step.json             stage, step, version of the weights, the optimizer steps, sampling, objective, seeds, timings
    texts.json            prompts, gold answers, responses, why a rollout failed, and the text of each token
    tensors.safetensors   one array per column: of rollouts [B], of tokens [N], or of response tokens [R]; a column of
                          tokens that has one value per rollout is [B, 1]

Padding is not stored: N counts the tokens of all rollouts one after another, and R those that the policy sampled. A
column takes the fewest bytes that give all of its bits back (`_packed`), and a response whose text is that of its
tokens, joined, is not stored again.

A bundle takes at most twice the bytes of its token ids and log-probabilities, at 4 bytes each, or `LEAST_BYTES`. Where
that is not enough, the arrays are compressed too; then texts and the columns of `ONLY_SHOWN` are cut, whole kinds, the
one that takes most first; at last the columns of `CUT_COLUMNS`. `RecordedStep.cut` names what was. step.json itself,
tokens, log-probabilities, rewards and the few bytes of flags and row numbers are never cut.

The file appears under its name when it is complete, and a reader checks its checksums. There is no pickle: nothing in a
bundle can run. `rl_observe.step_recorder` writes them during a run.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rl_observe.run_directory import RunDirectory, describe

__all__ = ["Bundle", "RecordedStep", "RecordedStepError", "RecordedSteps", "StepRollouts", "TrainedRows", "bundles"]

Array: TypeAlias = NDArray[Any]

FORMAT = 2
"""The version of the format; a reader refuses others."""

RESPONSE, TRAINABLE, CLIPPED = 1, 2, 4
"""Bits of the column `flags`."""

FLAGS = np.array([RESPONSE, TRAINABLE, CLIPPED], dtype=np.uint8)

SHARED = {"source": "sources", "prompt": "prompts", "expected": "expected"}
"""Texts that the rollouts of a group share, and what texts.json calls them."""

TEXTS_OF_ROWS = ("responses", "failures", *SHARED.values())
"""Fields of `StepRollouts`, and what is cut of texts beside `pieces`."""

PER_RESPONSE_TOKEN = ("logp_old", "logp", "logp_ref", "logp_proximal", "loss", "weight", "entropy", "value")
"""Columns of float32 that only tokens of a response have; NaN where it is not known."""

ONLY_IF_KNOWN = {"advantage", "logp_ref", "logp_proximal"}
"""Columns of `TrainedRows` that many losses do not have."""

FIGURE = "figure/"
"""Begins the name of a column of `figures`."""

LOG_PROBABILITIES = ("logp_old", "logp", "logp_ref", "logp_proximal")

DTYPES = {
    "lengths": "int32", "rewards": "float64", "groups": "int32", "tokens": "int32", "flags": "uint8", "turns": "int16",
    "versions": "int32", "update": "int16", "truncated": "uint8", "failed": "uint8", "token_rewards": "float64",
    "components": "float64",
}  # fmt: skip
"""What columns are in memory; all others are float32."""

LEAST_BYTES = 8192
"""What a bundle may always take: step.json and the names of columns are not in proportion to the tokens."""

ONLY_SHOWN = ("weight", "entropy")
"""Columns that nothing is computed from; they are cut like texts where a bundle would take too many bytes."""

CUT_COLUMNS = (
    "components", "figures", "token_rewards", "turns", "versions", "value", "loss", "advantage",
)  # fmt: skip
"""The columns that are cut, in this order, where a bundle without texts would still take too many bytes."""

OF_ROWS = {"lengths", "rewards", "groups", "truncated", "failed", "update"}
"""Columns of rollouts, beside `figures` and those that are [B, 1] or [B, K]."""


class RecordedStepError(ValueError):
    """A recorded step that cannot be read, or rollouts that cannot be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRows:
    """The rows that one optimizer step was trained on, as it had them: b rows, t tokens of the longest of them."""

    rows: ArrayLike
    """[b] which rows of the batch they are, from 0."""

    trainable: ArrayLike
    """[b, t] bool: the tokens that the loss looks at."""

    columns: Mapping[str, ArrayLike] = field(default_factory=dict)
    """[b, t] by name: columns of `StepRollouts` such as `logp`, `loss` and `clipped`. `advantage`, `logp_ref` and
    `logp_proximal` are left out where nothing of them is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The rollouts of a batch as a training loop has them: padded arrays or CPU tensors. B rollouts, T tokens, K parts.

    Whatever is None is not recorded, and what would need it cannot be answered later.
    """

    tokens: ArrayLike
    """[B, T] token ids: the prompt, then responses and observations in turn, right-padded."""

    lengths: ArrayLike
    """[B] tokens of each row that are not padding."""

    response: ArrayLike
    """[B, T] bool: the tokens that the policy sampled."""

    rewards: ArrayLike
    """[B] the reward of each rollout, float64."""

    groups: ArrayLike
    """[B] which rollouts answer the same prompt: those with equal numbers."""

    logp_old: ArrayLike | None = None
    """[B, T] the sampler's log-probability of each response token."""

    logp: ArrayLike | None = None
    """[B, T] the trainer's, in the optimizer step that trained on the token; NaN if none did."""

    logp_ref: ArrayLike | None = None
    """[B, T] the reference's."""

    logp_proximal: ArrayLike | None = None
    """[B, T] the trainer's when the batch was begun, if the loss takes its ratio to that."""

    trainable: ArrayLike | None = None
    """[B, T] bool: the tokens that the loss looks at. By default `response`."""

    advantage: ArrayLike | None = None
    """[B] or [B, T]."""

    loss: ArrayLike | None = None
    """[B, T] what each token adds to the loss of its optimizer step."""

    weight: ArrayLike | None = None
    """[B, T] the weight that corrects for the sampler's mismatch."""

    entropy: ArrayLike | None = None
    """[B, T] of the policy's distribution, in nats."""

    value: ArrayLike | None = None
    """[B, T] what a critic predicted before each response token."""

    clipped: ArrayLike | None = None
    """[B, T] bool: tokens whose ratio was clipped."""

    token_rewards: ArrayLike | None = None
    """[B, T] the reward of each response at its last token; 0 elsewhere."""

    components: ArrayLike | None = None
    """[B, K] the named parts of the reward."""

    component_names: Sequence[str] = ()
    """What the K parts are called."""

    turns: ArrayLike | None = None
    """[B, T] which response of its conversation a token belongs to, from 0; -1 outside of responses."""

    versions: ArrayLike | None = None
    """[B, T] the version of the weights that sampled each response token; -1 outside of responses."""

    truncated: ArrayLike | None = None
    """[B] bool: ended at a limit."""

    failed: ArrayLike | None = None
    """[B] bool: could not be judged, and is not trained on."""

    update: ArrayLike | None = None
    """[B] which of the step's updates trained on the row, from 0; -1 for none. By default 0."""

    trained: Sequence[TrainedRows] = ()
    """Of each optimizer step its rows, in place of `update`, `trainable` and their columns. A row that is in several,
    as in a later epoch, is recorded as it was in the first."""

    figures: Mapping[str, ArrayLike] = field(default_factory=dict)
    """[B] other numbers of whole rollouts by name, such as a reward model's `score`."""

    sources: Sequence[str] = ()
    """Where each prompt comes from, such as `rows.jsonl line 7`."""

    prompts: Sequence[str] = ()
    """The prompts as text, one per rollout."""

    responses: Sequence[str] = ()
    """The last response of each rollout as text."""

    expected: Sequence[str | None] = ()
    """The gold answers."""

    failures: Sequence[str | None] = ()
    """Why a rollout failed."""

    pieces: Mapping[int, str] = field(default_factory=dict)
    """The text of each token id, where the recorder has no `decode` that knows it."""


# -- What a bundle holds ----------------------------------------------------------------------------------------------


def _laid_out(rollouts: StepRollouts) -> StepRollouts:
    """The same with the columns of `trained` at their rows of the batch."""
    batch: tuple[int, ...] = np.asarray(rollouts.tokens).shape
    update, columns = np.full(batch[0], -1), {"trainable": np.zeros(batch, dtype=bool)}
    for number, step in enumerate(rollouts.trained):
        rows, mask = np.asarray(step.rows), np.asarray(step.trainable).astype(bool)
        given = {name: np.asarray(column) for name, column in step.columns.items()}
        for name, column in given.items():
            if column.shape != mask.shape or mask.shape != (len(rows), min(mask.shape[-1], batch[-1])):
                raise RecordedStepError(
                    f"{name} of update {number} has the shape {list(column.shape)}, its trainable tokens "
                    f"{list(mask.shape)}, its rows {list(rows.shape)} and the batch {list(batch)}"
                )
        if not (new := update[rows] < 0).all():
            rows, mask = rows[new], mask[new]
            given = {name: column[new] for name, column in given.items()}
        update[rows], width = number, mask.shape[1]
        columns["trainable"][rows, :width] = mask
        for name, column in given.items():
            is_flag = column.dtype == bool
            if name in ONLY_IF_KNOWN and not np.isfinite(column[mask]).any():
                continue
            if name not in columns:
                columns[name] = np.full(batch, *((False, bool) if is_flag else (np.nan, np.float32)))
            columns[name][rows, :width] = column if is_flag else np.where(mask, column, np.float32("nan"))
    laid_out: dict[str, Any] = {"update": update, **columns}
    return replace(rollouts, trained=(), **laid_out)


def _columns(rollouts: StepRollouts) -> dict[str, Array]:
    """The arrays of a bundle: of rows [B], of tokens [N], and of response tokens [R]."""
    lengths = np.asarray(rollouts.lengths, dtype=np.int64)
    padded = np.asarray(rollouts.tokens)
    if padded.ndim != 2 or len(lengths) != len(padded) or (len(lengths) and lengths.max() > padded.shape[1]):
        raise RecordedStepError(
            f"tokens has the shape {list(padded.shape)}, and lengths are {len(lengths)} numbers up to "
            f"{lengths.max() if len(lengths) else 0}; tokens is [B, T], padded to the longest row"
        )
    filled = np.arange(padded.shape[1]) < lengths[:, None]

    def of_tokens(name: str, given: ArrayLike) -> Array:
        array = np.asarray(given)
        if array.shape != padded.shape:
            raise RecordedStepError(f"{name} has the shape {list(array.shape)}, and tokens {list(padded.shape)}")
        return array

    def of_rows(name: str, given: ArrayLike) -> Array:
        array = np.asarray(given)
        if len(array) != len(lengths):
            raise RecordedStepError(f"{name} has {len(array)} entries, and there are {len(lengths)} rollouts")
        return array

    response = of_tokens("response", rollouts.response).astype(bool) & filled
    trainable = response if rollouts.trainable is None else of_tokens("trainable", rollouts.trainable).astype(bool)
    flags = RESPONSE * response.astype(np.uint8) + TRAINABLE * trainable.astype(np.uint8)
    if rollouts.clipped is not None:
        flags += CLIPPED * (of_tokens("clipped", rollouts.clipped).astype(bool) & trainable).astype(np.uint8)
    # Places in the padded arrays, counted through: many times faster than masks.
    tokens, sampled = np.flatnonzero(filled), np.flatnonzero(response)
    columns: dict[str, Array] = {
        "lengths": lengths.astype(np.int32),
        "rewards": of_rows("rewards", rollouts.rewards).astype(np.float64),
        "groups": of_rows("groups", rollouts.groups).astype(np.int32),
        "tokens": padded.ravel()[tokens].astype(np.int32),
        "flags": flags.ravel()[tokens],
    }
    for name in PER_RESPONSE_TOKEN:
        if (given := getattr(rollouts, name)) is not None:
            columns[name] = of_tokens(name, given).ravel()[sampled].astype(np.float32)
    if rollouts.advantage is not None:
        advantage = np.asarray(rollouts.advantage, dtype=np.float32)
        if advantage.ndim == 1:
            columns["advantage"] = of_rows("advantage", advantage)[:, None]
        else:
            both = sampled if trainable is response else np.flatnonzero(trainable & response)
            columns["advantage"] = _one_per_row(of_tokens("advantage", advantage), both)
    if rollouts.token_rewards is not None:
        earned = of_tokens("token_rewards", rollouts.token_rewards)
        last = padded.shape[1] - 1 - response[:, ::-1].argmax(axis=1)  # of the last response token
        expected = np.zeros(padded.shape)
        expected[np.arange(len(lengths)), last] = columns["rewards"]
        if not np.array_equal(earned, expected):  # more than one reward in a conversation
            columns["token_rewards"] = earned.ravel()[sampled].astype(np.float64)
    for name, missing in (("turns", -1), ("versions", -1)):
        if (given := getattr(rollouts, name)) is not None:
            columns[name] = _one_per_row(of_tokens(name, given).astype(DTYPES[name]), sampled, missing=missing)
    for name in ("truncated", "failed"):
        if (given := getattr(rollouts, name)) is not None:
            columns[name] = of_rows(name, given).astype(np.uint8)
    if rollouts.update is not None:
        columns["update"] = of_rows("update", rollouts.update).astype(np.int16)
    if rollouts.components is not None and len(rollouts.component_names):
        columns["components"] = of_rows("components", rollouts.components).astype(np.float64)
    for name, given in rollouts.figures.items():
        columns[f"{FIGURE}{name}"] = of_rows(name, given).astype(np.float32)
    return columns


def _trainable_padding(rollouts: StepRollouts) -> dict[str, int] | None:
    """How many tokens of padding the loss looks at, and where the first is: a bundle has no place for them."""
    if rollouts.trainable is None:
        return None
    trainable, lengths = np.asarray(rollouts.trainable).astype(bool), np.asarray(rollouts.lengths)
    padding = trainable & (np.arange(trainable.shape[1]) >= lengths[:, None])
    if not padding.any():
        return None
    row = int(padding.any(axis=1).argmax())
    return {"tokens": int(padding.sum()), "row": row, "token": int(padding[row].argmax())}


def _one_per_row(values: Array, places: Array, *, missing: float = np.nan) -> Array:
    """One value per row [B, 1] if all tokens of each row have the same, else those of the tokens at `places` [R]."""
    rows, known = places // max(1, values.shape[1]), values.ravel()[places]
    first = np.full(len(values), missing, dtype=values.dtype)
    first[rows[::-1]] = known[::-1]  # the first of each row is written last
    of_row = first[rows]
    same = known == of_row
    if values.dtype.kind == "f":
        same |= np.isnan(known) & np.isnan(of_row)
    return first[:, None] if same.all() else known


def _texts(
    rollouts: StepRollouts, columns: Mapping[str, Array], *, data: Mapping[str, Any], pieces: Mapping[int, str]
) -> dict[str, list[Any]]:
    """What texts.json holds.

    `pieces` of the token ids in ascending order, null where it is not known; `responses` of all rows, null where the
    pieces make it up; `sources`, `prompts` and `expected` of the rows `told`, where they are not those of an earlier
    row of the group; `failures` as pairs of row and text.
    """
    groups, texts = columns["groups"].tolist(), dict[str, list[Any]]()
    given = {name: values for name in TEXTS_OF_ROWS if len(values := getattr(rollouts, name))}
    for name, values in given.items():
        if len(values) != len(groups):
            raise RecordedStepError(f"{name} has {len(values)} entries, and there are {len(groups)} rollouts")
    if pieces:
        texts["pieces"] = [pieces.get(token) for token in _distinct(columns["tokens"]).tolist()]
    if "responses" in given:
        joined = _joined(columns, data, pieces) if pieces else itertools.repeat(None, len(groups))
        texts["responses"] = [None if one == two else one for one, two in zip(given["responses"], joined, strict=True)]
    if shared := [name for name in SHARED.values() if name in given]:
        of_group: dict[int, tuple[object, ...]] = {}
        texts["told"] = told = []
        for row, one in enumerate(zip(*(given[name] for name in shared), strict=True)):
            if of_group.get(group := groups[row]) != one:
                of_group[group] = one
                told.append(row)
        texts |= {name: [given[name][row] for row in told] for name in shared}
    if failures := [[row, why] for row, why in enumerate(given.get("failures", ())) if why is not None]:
        texts["failures"] = failures
    return texts


# -- The file ------------------------------------------------------------------------------------------------------


def _to_bytes(step: RecordedStep) -> bytes:
    """The bundle, within its bound."""
    responses = sum(len(step.columns[name]) for name in LOG_PROBABILITIES if name in step.columns)
    bound = max(2 * 4 * (len(step.columns["tokens"]) + responses), LEAST_BYTES)
    data = {**step.data, "rollouts": len(step)}
    columns = {name: _packed(name, column) for name, column in step.columns.items()}
    written = _zipped(data, step.texts, columns)
    if len(written) <= bound:
        return written
    columns = {name: _in_planes(column) for name, column in columns.items()}
    written = _zipped(data, step.texts, columns, compress=True)
    sizes = {part: len(json.dumps(texts)) for part, texts in step.texts.items() if part != "told"}
    sizes |= {name: columns[name].nbytes for name in ONLY_SHOWN if name in columns}
    kinds = {name: "figures" if name.startswith(FIGURE) else name for name in columns}
    cut: list[str] = []
    for part in (*sorted(sizes, key=lambda each: -sizes[each]), *CUT_COLUMNS):
        if len(written) <= bound:
            break
        if part not in sizes and part not in kinds.values():
            continue
        cut.append(part)
        texts = {name: texts for name, texts in step.texts.items() if name not in cut}
        if "pieces" in cut and "responses" in texts:  # which they do not make up any more
            texts["responses"] = [line["response"] for line in step.lines]
        left = {name: column for name, column in columns.items() if kinds[name] not in cut}
        written = _zipped(data | {"cut": cut}, texts, left, compress=True)
    return written


def _zipped(
    data: Mapping[str, object], texts: Mapping[str, object], columns: Mapping[str, Array], *, compress: bool = False
) -> bytes:
    from safetensors.numpy import save

    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for name, content, method in (
            ("step.json", json.dumps(data, ensure_ascii=False, default=plain), zipfile.ZIP_DEFLATED),
            ("texts.json", json.dumps(texts, ensure_ascii=False), zipfile.ZIP_DEFLATED),
            (
                "tensors.safetensors",
                save({name: np.ascontiguousarray(each) for name, each in columns.items()}),
                zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED,
            ),
        ):
            # A fixed date: equal steps are equal bytes.
            bundle.writestr(
                zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), content, compress_type=method, compresslevel=1
            )
    return buffer.getvalue()


def _distinct(tokens: Array) -> Array:
    """The token ids that occur, ascending; sorting takes a tenth of the time that numpy's own `unique` does."""
    ordered = np.sort(tokens)
    first = np.ones(len(ordered), dtype=bool)
    first[1:] = ordered[1:] != ordered[:-1]
    return ordered[first]


def _joined(columns: Mapping[str, Array], data: Mapping[str, Any], pieces: Mapping[int, str]) -> list[str]:
    """The pieces of each rollout's response tokens in one text, special tokens left out."""
    special = {*data.get("special_token_ids", {}).values()}
    sampled = columns["flags"] & RESPONSE > 0
    tokens = columns["tokens"][sampled].tolist()
    known = {token: "" if token in special else pieces.get(token, "") for token in {*tokens}}
    made = [*map(known.__getitem__, tokens)]
    rows = np.repeat(np.arange(len(columns["lengths"])), columns["lengths"])[sampled]
    ends = np.cumsum(np.bincount(rows, minlength=len(columns["lengths"]))).tolist()
    return ["".join(made[start:end]) for start, end in itertools.pairwise([0, *ends])]


def _refuse_other_formats(path: Path, data: Mapping[str, Any]) -> None:
    if data.get("format") != FORMAT:
        raise RecordedStepError(f"{path} has the format {data.get('format')}, and this version reads {FORMAT}")


def _packed(name: str, column: Array) -> Array:
    """The column in few bytes that give all of its bits back: narrow numbers, and one row where all are the same."""
    if name == "flags":
        return np.packbits(column & FLAGS[:, None] > 0, axis=1)
    if column.dtype.kind in "iu" and column.size:
        narrow = (np.min_scalar_type(bound) for bound in (column.min(), column.max()))
        column = column.astype(np.result_type(*narrow))
    elif column.dtype == np.float64:
        with np.errstate(over="ignore"):
            single = column.astype(np.float32)
        if single.astype(np.float64).tobytes() == column.tobytes():
            column = single
    if _is_of_rows(name, column) and column.tobytes() == column[:1].tobytes() * len(column):
        column = column[:1]
    return column


def _in_planes(column: Array) -> Array:
    """A column of floats as bytes, all first ones, then all second ones: the exponents, much alike, compress better."""
    if column.dtype.kind != "f":
        return column
    planes: Array = np.ascontiguousarray(column)[..., None].view(np.uint8)
    return np.ascontiguousarray(np.moveaxis(planes, -1, 0))


def _unpacked(name: str, stored: Array, *, rollouts: int, tokens: int) -> Array:
    """The column that `_packed` and maybe `_in_planes` were given."""
    if name == "flags":
        bits = np.unpackbits(stored, axis=1, count=tokens)
        flags: Array = (bits * FLAGS[:, None]).sum(axis=0, dtype=np.uint8)
        return flags
    dtype = np.dtype(DTYPES.get(name, np.float32))
    if dtype.kind == "f" and stored.dtype == np.uint8:  # in planes
        stored = np.ascontiguousarray(np.moveaxis(stored, 0, -1)).view(f"f{len(stored)}")[..., 0]
    if _is_of_rows(name, stored) and len(stored) == 1:
        stored = np.repeat(stored, rollouts, axis=0)
    return stored.astype(dtype)


def _is_of_rows(name: str, column: Array) -> bool:
    return column.ndim == 2 or name in OF_ROWS or name.startswith(FIGURE)


def plain(value: object) -> object:
    """Numbers of numpy and torch, and whatever else JSON does not know, as plain data."""
    item = getattr(value, "item", None)
    return item() if callable(item) else str(value)


# -- Reading -------------------------------------------------------------------------------------------------------


_NAME = re.compile(r"(.+)-(\d{8,})\.zip")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A file of a recorded step."""

    path: Path
    stage: str
    step: int
    size: int
    order: float
    stride: int = 1


def bundles(folder: Path) -> list[Bundle]:
    """The files of recorded steps, oldest first: by stage in the order in which they were written, then by step."""
    found: list[Bundle] = []
    for entry in os.scandir(folder) if folder.is_dir() else ():
        if (name := _NAME.fullmatch(entry.name)) is not None:
            stat = entry.stat()
            found.append(Bundle(folder / entry.name, name[1], int(name[2]), stat.st_size, stat.st_mtime))
    newest = {stage: max(each.order for each in found if each.stage == stage) for stage in {e.stage for e in found}}
    found.sort(key=lambda each: (newest[each.stage], each.stage, each.step))
    strides: dict[str, int] = {}  # optimizer steps from one recorded step to the next, where several share a batch
    for one, two in itertools.pairwise(found):
        if one.stage == two.stage:
            strides[one.stage] = min(strides.get(one.stage, two.step - one.step), two.step - one.step)
    return [
        Bundle(each.path, each.stage, each.step, each.size, each.order, strides.get(each.stage, 1)) for each in found
    ]


class RecordedSteps(Mapping[int, "RecordedStep"]):
    """The recorded steps of a run by number. A number between two recorded ones finds the batch that it trained on.

    Args:
        run: the run directory.
        stage: only steps of this stage; by default those of the stage that was recorded last.
    """

    def __init__(self, run: RunDirectory, stage: str | None = None) -> None:
        found = bundles(run.recorded_steps)
        self.stage = stage or (found[-1].stage if found else None)
        self.stages = [*dict.fromkeys(each.stage for each in found)]
        """Every stage that has recorded steps, in the order in which they were recorded."""
        self._run, self._paths = run, {each.step: each.path for each in found if each.stage == self.stage}

    def of_stage(self, stage: str) -> RecordedSteps:
        """The steps of another stage."""
        return RecordedSteps(self._run, stage)

    def __iter__(self) -> Iterator[int]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, step: int) -> RecordedStep:
        path = self._paths.get(step)
        if path is None:  # it may be one of several optimizer steps on the same rollouts
            later = [number for number in self._paths if number > step]
            found = RecordedStep.read(self._paths[min(later)]) if later else None
            if found is not None and any(update.get("step") == step for update in found.updates):
                return found
            known = ", ".join(map(str, self._paths)) or "none"
            of_stage = f" of {self.stage}" if self.stage else ""
            raise KeyError(
                f"step {step}{of_stage} is not recorded in {self._run.path}; recorded are {known}. Which steps are "
                f"kept says RecordedStepsConfig (logger.recorded_steps in a recipe)"
            )
        return RecordedStep.read(path)

    @property
    def rollouts(self) -> Any:
        """The rollouts of all steps that can be read as one DataFrame, with the column `step`. Needs pandas."""
        rows = [{"step": step.step, **row} for step in self.readable()[0] for row in step.rows]
        return _pandas().DataFrame(rows)

    def readable(self) -> tuple[list[RecordedStep], list[str]]:
        """All steps that can be read in their order, and one sentence about each that cannot."""
        steps, remarks = [], []
        for path in self._paths.values():
            try:
                steps.append(RecordedStep.read(path))
            except RecordedStepError as error:
                remarks.append(str(error))
        return steps, remarks


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step. B rollouts, T tokens of the longest, N tokens of all, R response tokens of all."""

    path: Path | None
    """The bundle; None for a step that was imported."""

    data: Mapping[str, Any]
    """What step.json holds."""

    columns: Mapping[str, Array] = field(repr=False)
    """The arrays as they are stored."""

    texts: Mapping[str, list[Any]] = field(repr=False)
    """The texts as texts.json has them: `pieces` `responses`, `sources`, `prompts`, `expected`, `failures`."""

    @classmethod
    def read(cls, path: Path | str) -> RecordedStep:
        """Read a bundle.

        Raises:
            RecordedStepError: it is incomplete, damaged, or of a format that this version does not know.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        path = Path(path)
        try:
            with zipfile.ZipFile(path) as bundle:
                data = json.loads(bundle.read("step.json"))
                _refuse_other_formats(path, data)
                texts, stored = json.loads(bundle.read("texts.json")), load(bundle.read("tensors.safetensors"))
            sizes = {"rollouts": data["rollouts"], "tokens": 0}
            lengths = _unpacked("lengths", stored["lengths"], **sizes)
            sizes["tokens"] = int(lengths.sum())
            columns = {name: _unpacked(name, column, **sizes) for name, column in stored.items()}
        except RecordedStepError:
            raise
        except OSError as error:
            raise RecordedStepError(f"{path} cannot be read: {describe(error)}") from error
        except (zipfile.BadZipFile, zlib.error, KeyError, ValueError, SafetensorError) as error:
            raise RecordedStepError(
                f"{path} is no complete recorded step ({error}); it was cut off or changed, delete it"
            ) from error
        return cls(path, data, columns, texts)

    @classmethod
    def of(
        cls,
        stage: str,
        step: int,
        rollouts: StepRollouts,
        *,
        updates: Sequence[Mapping[str, object]] = (),
        about: Mapping[str, object] | None = None,
    ) -> RecordedStep:
        """A recorded step that is nowhere on disk, with the arguments of `StepRecorder.record`.

        Raises:
            RecordedStepError: a column or a list of texts has another shape than the tokens; it is named.
        """
        data = {"format": FORMAT, "stage": stage, "step": step, "updates": list(updates), **(about or {})}
        data["component_names"] = list(rollouts.component_names)
        if rollouts.trained:
            rollouts = _laid_out(rollouts)
        columns = _columns(rollouts)
        if padding := _trainable_padding(rollouts):
            data["trainable_padding"] = padding
        return cls(None, data, columns, _texts(rollouts, columns, data=data, pieces=rollouts.pieces))

    def write(self, folder: Path) -> Path:
        """Write the bundle into `folder`, which is made; returns its path.

        Raises:
            RecordedStepError: the stage cannot be part of a file's name.
            OSError: the disk refuses.
        """
        if not re.fullmatch(r"[\w.]+", self.stage):
            raise RecordedStepError(f"stage={self.stage!r} must consist of letters, digits, _ and . to be a file name")
        written = _to_bytes(self)
        folder.mkdir(exist_ok=True)
        # The name appears when every byte is written. A machine that loses power may lose the newest bytes all the
        # same; then the checksums of the zip file do not match, and the reader says so.
        unfinished, path = (
            folder / f".{self.stage}-{self.step}.unfinished",
            folder / f"{self.stage}-{self.step:08d}.zip",
        )
        unfinished.write_bytes(written)
        unfinished.replace(path)
        return path

    def __len__(self) -> int:
        """How many rollouts there are: B."""
        return len(self.columns["lengths"])

    @property
    def stage(self) -> str:
        """Whose step it is."""
        return str(self.data["stage"])

    @property
    def step(self) -> int:
        """Its number: that of the last optimizer step on these rollouts."""
        return int(self.data["step"])

    @property
    def version(self) -> int | None:
        """Optimizer steps that the weights had seen before the first update; None if not recorded."""
        version = self.data.get("version")
        return None if version is None else int(version)

    @property
    def updates(self) -> list[dict[str, Any]]:
        """The optimizer steps on these rollouts."""
        return list(self.data.get("updates", []))

    @property
    def component_names(self) -> list[str]:
        """The names of the parts of the reward."""
        return list(self.data.get("component_names", []))

    @property
    def cut(self) -> list[str]:
        """What the bundle had no bytes for: kinds of texts, such as `responses`, and columns."""
        return list(self.data.get("cut", []))

    @property
    def cut_told(self) -> str:
        """One sentence about what was cut, for people; empty if nothing was."""
        if not self.cut:
            return ""
        return f"step {self.step} is without {', '.join(self.cut)}, for which its bundle had no bytes"

    @cached_property
    def filled(self) -> Array:
        """[B, T] bool: True where there is a token, False in padding."""
        lengths = self.columns["lengths"]
        filled: Array = np.arange(int(lengths.max()) if len(lengths) else 0) < lengths[:, None]
        return filled

    @cached_property
    def response(self) -> Array:
        """[B, T] bool: the tokens that the policy sampled."""
        return self.flag(RESPONSE)

    @cached_property
    def trainable(self) -> Array:
        """[B, T] bool: the tokens that the loss looked at."""
        return self.flag(TRAINABLE)

    def flag(self, bit: int) -> Array:
        """[B, T] bool: the tokens with this bit in `flags`."""
        flags = np.zeros(self.filled.shape, dtype=bool)
        flags.ravel()[self._places(bit)] = True
        return flags

    def has(self, name: str) -> bool:
        """Whether a column was recorded."""
        return name in self.columns

    def padded(self, name: str) -> Array:
        """A column as [B, T]: NaN, or -1 for whole numbers, where there is no token or nothing is known.

        Raises:
            RecordedStepError: it was not recorded.
        """
        if not self.has(name):
            why = "was cut from it, so that the bundle has few bytes" if name in self.cut else "it does not have"
            raise RecordedStepError(
                f"the column {name} of step {self.step} {why}; it has {', '.join(sorted(self.columns))}"
            )
        values = self.columns[name]
        if name in {"tokens", "flags"}:
            padded = np.full(self.filled.shape, -1, dtype=np.int64)
            padded.ravel()[self._places(0)] = values
            return padded
        places = self._places(RESPONSE | TRAINABLE if name == "advantage" else RESPONSE)
        padded = np.full(self.filled.shape, np.nan if values.dtype.kind == "f" else -1, dtype=values.dtype)
        # One value per row is stored as [B, 1].
        one_per_row = values.ndim == 2
        padded.ravel()[places] = values.ravel()[places // max(1, self.filled.shape[1])] if one_per_row else values
        return padded

    def _places(self, bits: int) -> Array:
        """Where the tokens with all of these bits are in a padded array, counted through."""
        if bits not in self._known_places:
            tokens = np.flatnonzero(self.filled) if bits == 0 else self._places(0)
            self._known_places[bits] = tokens[self.columns["flags"] & bits == bits]
        return self._known_places[bits]

    @cached_property
    def _known_places(self) -> dict[int, Array]:
        return {}

    def row(self, name: str, *, missing: Any = None) -> Array:
        """A column of rollouts [B], or `missing` for each if it was not recorded."""
        return self.columns[name] if self.has(name) else np.full(len(self), missing)

    @cached_property
    def pieces(self) -> dict[int, str]:
        """The text of each token id, as far as it is known."""
        texts = self.texts.get("pieces")
        ids = [] if texts is None else _distinct(self.columns["tokens"]).tolist()
        return {token: text for token, text in zip(ids, texts or (), strict=True) if text is not None}

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Texts of each rollout: `response`, `failure`, and where a group begins `source`, `prompt` and `expected`."""
        lines: list[dict[str, Any]] = [{} for _ in range(len(self))]
        for name, plural in SHARED.items():
            for row, text in zip(self.texts["told"], self.texts[plural], strict=True) if plural in self.texts else ():
                lines[row][name] = text
        if (responses := self.texts.get("responses")) is not None:
            made_up = _joined(self.columns, self.data, self.pieces)
            for line, text, joined in zip(lines, responses, made_up, strict=True):
                line["response"] = joined if text is None else text
        for row, why in self.texts.get("failures", ()):
            lines[row]["failure"] = why
        return lines

    @cached_property
    def shared(self) -> list[dict[str, Any]]:
        """`source`, `prompt` and `expected` of each rollout."""
        by_group: dict[int, dict[str, Any]] = {}
        found = []
        for group, line in zip(self.columns["groups"].tolist(), self.lines, strict=True):
            if {"source", "prompt", "expected"} & line.keys():
                by_group[group] = {name: line.get(name) for name in ("source", "prompt", "expected")}
            found.append(by_group.get(group, {"source": None, "prompt": None, "expected": None}))
        return found

    def piece(self, token: int) -> str:
        """The text of one token, or its id in angle brackets."""
        return self.pieces.get(token, f"<{token}>")

    def text(self, row: int, *, part: str = "response") -> str:
        """The `prompt` or `response` of a rollout as text; joined from its tokens if the text was not recorded."""
        given = self.lines[row].get("response") if part == "response" else self.shared[row]["prompt"]
        if given is not None:
            return str(given)
        where = self.response[row] if part == "response" else self.filled[row] & ~self.response[row]
        return "".join(self.piece(token) for token in self.padded("tokens")[row][where].tolist())

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """One dict per rollout: what `rollouts` shows, without pandas."""
        response = self.response
        counts = response.sum(axis=1)
        logp_old = self.padded("logp_old") if self.has("logp_old") else None
        logp = self.padded("logp") if self.has("logp") else None
        advantage = self.padded("advantage") if self.has("advantage") else None
        loss = self.padded("loss") if self.has("loss") else None
        clipped = self.flag(CLIPPED)
        rows: list[dict[str, Any]] = []
        for row in range(len(self)):
            where = response[row]
            each: dict[str, Any] = {
                "row": row,
                "group": int(self.columns["groups"][row]),
                **self.shared[row],
                "prompt": self.text(row, part="prompt"),
                "response": self.text(row),
                "reward": float(self.columns["rewards"][row]),
            }
            if self.has("components"):
                parts = self.columns["components"][row].tolist()
                each |= {f"reward/{name}": part for name, part in zip(self.component_names, parts, strict=True)}
            each["advantage"] = None if advantage is None else _mean(advantage[row])
            each["response_tokens"] = int(counts[row])
            each["truncated"] = bool(self.row("truncated", missing=False)[row])
            each["failed"] = bool(self.row("failed", missing=False)[row])
            each["failure"] = self.lines[row].get("failure")
            each["update"] = int(self.row("update", missing=0)[row])
            each["logp_old"] = None if logp_old is None else _mean(logp_old[row][where])
            each["logp"] = None if logp is None else _mean(logp[row][where])
            if logp is not None and logp_old is not None:
                gaps = np.abs(logp[row][where] - logp_old[row][where])
                each["max_logp_gap"] = float(np.nanmax(gaps)) if np.isfinite(gaps).any() else None
            each["loss"] = None if loss is None else float(np.nansum(loss[row]))
            each["clip_fraction"] = float(clipped[row].sum() / max(counts[row], 1))
            for name in self.columns:
                if name.startswith(FIGURE):
                    each[name.removeprefix(FIGURE)] = float(self.columns[name][row])
            rows.append(each)
        return rows

    @property
    def rollouts(self) -> Any:
        """The rollouts as a DataFrame, one line each. Needs pandas: `pip install 'rl-observe[notebook]'`."""
        return _pandas().DataFrame(self.rows)

    def tokens(self, row: int) -> Any:
        """The tokens of one rollout as a DataFrame, one line each. Needs pandas."""
        return _pandas().DataFrame(self.token_rows(row))

    def token_rows(self, row: int) -> list[dict[str, Any]]:
        """One dict per token of one rollout: its text and every column that was recorded of it."""
        if not 0 <= row < len(self):
            raise RecordedStepError(f"row {row} is not in step {self.step}, which has rows 0 to {len(self) - 1}")
        length = int(self.columns["lengths"][row])
        ids = self.padded("tokens")[row][:length].tolist()
        names = [name for name in (*PER_RESPONSE_TOKEN, "advantage", "turns", "versions") if self.has(name)]
        values = {name: self.padded(name)[row][:length].tolist() for name in names}
        flags = {"response": RESPONSE, "trainable": TRAINABLE, "clipped": CLIPPED}
        bits = {name: self.flag(bit)[row][:length].tolist() for name, bit in flags.items()}
        rows = []
        for index, token in enumerate(ids):
            each = {"index": index, "token": token, "text": self.piece(token)}
            each |= {name: values_of[index] for name, values_of in (bits | values).items()}
            if "logp" in values and "logp_old" in values:
                each["ratio"] = float(np.exp(np.clip(values["logp"][index] - values["logp_old"][index], -20, 20)))
            rows.append(each)
        return rows


def _mean(values: Array) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None


def _pandas() -> Any:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise RecordedStepError(
            "a DataFrame needs pandas: pip install 'rl-observe[notebook]'; `rows` and `token_rows` are lists of dicts"
        ) from error
    return pd
