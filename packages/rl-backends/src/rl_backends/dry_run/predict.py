"""`predict`: the peak memory of a step of the DTensor backend on each rank, before anything is loaded or started.

A module in hand is run in this process if that has no process group; otherwise, and for a folder, a config.json or a
hub id, an interpreter of its own runs it, which is asked in JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rl_backends.dtensor.config import DTensorConfig
from rl_backends.errors import ModelError
from rl_backends.kernels import KernelsConfig
from rl_backends.loading.source import ModelSource, open_model
from rl_backends.lora import LoraConfig
from rl_backends.optimizers import MuonConfig, OptimizerConfig

# ---- The result.

GIB = 2**30
MIB = 2**20
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "unsharded gradients": "gradients",
    "optimizer state": "optimizer state",
    "reference": "reference",
    "activations": "activations",
    "recomputed activations": "activations",
    "unsharded parameters": "gathered parameters",
}
"""What the count calls things, in the words of a table; everything else is working memory."""

COLUMNS = (
    "parameters",
    "reference",
    "gradients",
    "optimizer state",
    "gathered parameters",
    "activations",
    "working memory",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The worst moment of one phase of a step, on rank 0, whose shards are the largest."""

    name: str
    """between steps, logp, reference logp, forward_backward or optim_step."""
    num_bytes: int
    """Alive at that moment."""
    by_category: Mapping[str, int]
    """What they are, largest first."""
    largest: tuple[tuple[str, str, int], ...]
    """The largest shares: category, module that ran when they were made ("" outside of all), bytes."""

    @property
    def by_column(self) -> dict[str, int]:
        """The categories in the words of the table."""
        found = dict.fromkeys(COLUMNS, 0)
        for category, size in self.by_category.items():
            found[KINDS.get(category, "working memory")] += size
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What one phase sends over some axes of the mesh."""

    phase: str
    """In which it runs."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or broadcast."""
    axes: str
    """Names of the axes over which it runs, joined by x."""
    ranks: int
    """How many they are."""
    count: int
    """How often it runs."""
    num_bytes: int
    """Of the whole tensors, all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Peak memory of a step of the backend on one rank, predicted by running it on fake tensors."""

    model: str
    """Class of the model."""
    num_parameters: int
    """Of the whole model, ties counted once."""
    mesh: Mapping[str, int]
    """Ranks on each axis."""
    num_rows: int
    """Of the whole batch, on all ranks together."""
    num_tokens: int
    """Of the whole batch, padding left out."""
    num_microbatches: int
    """That each rank works on."""
    phases: tuple[Phase, ...]
    """In their order. A phase's peak counts what was alive when it began."""
    host_bytes: int
    """Held in host memory beside, where parameters or the reference are offloaded from a GPU; else 0."""
    collectives: tuple[Collective, ...]
    """What ranks send one another, by phase."""
    assumptions: tuple[str, ...]
    """What the figures rest on, and what they leave out."""

    @property
    def peak(self) -> Phase:
        """The worst moment of the step."""
        return max(self.phases, key=lambda phase: phase.num_bytes)

    def phase(self, name: str) -> Phase:
        """The phase of this name.

        Raises:
            KeyError: there is none.
        """
        found = {phase.name: phase for phase in self.phases}
        if name not in found:
            raise KeyError(f"no phase {name!r}: the step has {', '.join(found)}")
        return found[name]

    def text(self) -> str:
        """For people."""
        rows = [["on one rank", "peak", *COLUMNS]]
        rows += [[p.name, format_bytes(p.num_bytes), *map(format_bytes, p.by_column.values())] for p in self.phases]
        used = [0, 1, *(i for i in range(2, len(rows[0])) if any(row[i] != "-" for row in rows[1:]))]
        smallest = self.peak.num_bytes / 50
        return "\n".join(
            [
                *aligned([[row[i] for i in used] for row in rows]),
                "",
                f"peak: {format_bytes(self.peak.num_bytes)} in {self.peak.name}; most of it:",
                *(
                    f"  {format_bytes(size):>9}  {category}{f', made in {owner}' if owner else ''}"
                    for category, owner, size in self.peak.largest
                    if size >= smallest
                ),
                *([f"host memory beside: {format_bytes(self.host_bytes)}"] if self.host_bytes else []),
                *(f"note: {assumption}" for assumption in self.assumptions),
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the peak by category among them."""
        return {**asdict(self), "peak_bytes": self.peak.num_bytes, "peak_phase": self.peak.name}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "DryRun":
        """The inverse of `as_dict`, also after a walk through JSON."""
        given = {key: value for key, value in values.items() if key not in ("peak_bytes", "peak_phase")}
        phases = tuple(Phase(**{**each, "largest": tuple(map(tuple, each["largest"]))}) for each in values["phases"])
        collectives = tuple(Collective(**each) for each in values["collectives"])
        listed = {"phases": phases, "collectives": collectives, "assumptions": tuple(values["assumptions"])}
        return cls(**{**given, **listed})


def format_bytes(num_bytes: int) -> str:
    """A size in a unit that suits it; `-` for none."""
    if not num_bytes:
        return "-"
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def aligned(rows: list[list[str]]) -> list[str]:
    """Cells as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]


# ---- The prediction.

DIFFERENT_TOKENS = 32
"""So many that a mixture's experts all get some; fewer where the vocabulary is smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The step whose memory is asked for."""

    lengths: tuple[int, ...]
    """Tokens of each row of the whole batch."""
    optimizer: OptimizerConfig | None
    """None takes no step, and has no state."""
    temperature: float = 1.0
    """Of the log-probabilities."""
    reference: bool = False
    """Keep a frozen copy of the policy."""
    offload_reference: bool = False
    """Keep that copy in host memory."""
    different_tokens: int = DIFFERENT_TOKENS
    """Ids of the rows are from 0 to one less."""


CHILD = "rl_backends.dry_run"
MICROBATCHES = 2
"""That a rank works on where nobody said how many rows there are: the second finds the gradient of the first."""


def predict(
    model: nn.Module | str | Path,
    config: DTensorConfig,
    *,
    world_size: int,
    optimizer: OptimizerConfig | None = None,
    **asked: Any,
) -> DryRun:
    """Run a step of `DTensorBackend` on fake tensors and ranks, and count what one of them holds.

    Args and errors as `rl_backends.explain`, which tells more; without an optimizer there is no state and no step.
    """
    from rl_backends.dry_run.explanation import explain

    return explain(model, config, world_size=world_size, optimizer=optimizer, **asked).dry_run


def step_asked(
    config: DTensorConfig,
    *,
    world_size: int,
    optimizer: OptimizerConfig | None,
    rows: int | None,
    length: int,
    lengths: Sequence[int] | None,
    temperature: float,
    reference: bool,
    offload_reference: bool,
) -> StepRequest:
    """The step that `predict` is asked for."""
    for name, value in (("world_size", world_size), ("rows", rows), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be >= 1")
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise ValueError(f"lengths={list(lengths)} must be those of one row or more, each of 1 token or more")
    if lengths is None:
        lengths = [length] * (rows or _default_rows(config, world_size=world_size, length=length))
    return StepRequest(
        lengths=tuple(lengths),
        optimizer=optimizer,
        temperature=temperature,
        reference=reference,
        offload_reference=offload_reference,
    )


def request_of(
    model: nn.Module | str | Path,
    config: DTensorConfig,
    asked: StepRequest,
    *,
    world_size: int,
    revision: str | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """A step in plain values, for `ask_child`."""
    in_hand = isinstance(model, nn.Module)
    return {
        "source": None if in_hand else str(model),
        "model_config": config_of_module(model) if isinstance(model, nn.Module) else None,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "config": asdict(config),
        "asked": asdict(asked),
        "world_size": world_size,
    }


def config_from_dict(values: Mapping[str, Any]) -> DTensorConfig:
    """The inverse of `asdict`, also after a walk through JSON."""
    lora = values["lora_cfg"]
    if lora is not None:
        given: dict[str, Any] = {key: tuple(each) if isinstance(each, list) else each for key, each in lora.items()}
        lora = LoraConfig(**given)
    return DTensorConfig(**{**values, "lora_cfg": lora, "kernels": KernelsConfig(**values["kernels"])})


def step_from_dict(values: Mapping[str, Any]) -> StepRequest:
    """The inverse of `asdict`, also after a walk through JSON."""
    optimizer = values["optimizer"]
    if optimizer is not None:
        tuples = {name: tuple(value) for name, value in optimizer.items() if isinstance(value, list)}
        optimizer = OptimizerConfig(**{**optimizer, **tuples, "muon": MuonConfig(**optimizer["muon"])})
    return StepRequest(**{**values, "lengths": tuple(values["lengths"]), "optimizer": optimizer})


def ask_child(request: Mapping[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """The answer of an interpreter of its own to a request in plain values."""
    found = [os.environ.get("PYTHONPATH", ""), *sys.path]
    try:
        child = subprocess.run(  # noqa: S603 - this interpreter, this package
            [sys.executable, "-m", CHILD],
            input=json.dumps(request),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"the process that makes a dry run has not answered for {timeout_s:g} s and was ended; ask for fewer rows, "
            f"or raise timeout_s"
        ) from None
    answer = child.stdout.splitlines()[-1] if child.returncode == 0 and child.stdout else None
    if answer is None:
        raise RuntimeError(
            f"the process that makes a dry run ended with status {child.returncode}:\n{child.stderr[-4000:]}"
        )
    values: dict[str, Any] = json.loads(answer)
    if "refused" in values:
        raise ModelError(values["refused"])
    return values


def _default_rows(config: DTensorConfig, *, world_size: int, length: int) -> int:
    sharers = config.tensor_parallel_size * config.context_parallel_size
    rows = config.micro_batch_size
    if config.micro_batch_tokens is not None:
        rows = max(1, min(rows, config.micro_batch_tokens // length))
    return MICROBATCHES * rows * max(1, world_size // sharers)


# ---- The model, without its weights.


def skeleton_of(
    source: str | None, *, revision: str | None, trust_remote_code: bool, model_config: dict[str, Any] | None = None
) -> nn.Module:
    """In float32, its parameters on the meta device."""
    import transformers

    if model_config is not None:
        given = {key: value for key, value in model_config.items() if key != "model_type"}
        return _of_config(
            transformers.AutoConfig.for_model(model_config["model_type"], **given),
            name=model_config["model_type"],
            trust_remote_code=trust_remote_code,
        )
    assert source is not None
    if Path(source).expanduser().is_file() or (source in transformers.CONFIG_MAPPING and not Path(source).exists()):
        from rl_parallel_plans.model_source import read_config

        config = read_config(source, trust_remote_code=trust_remote_code)
        return _of_config(config, name=source, trust_remote_code=trust_remote_code)
    return open_model(source, revision=revision, trust_remote_code=trust_remote_code).skeleton()


def config_of_module(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model of transformers in plain values."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        raise ModelError(
            f"this process has a process group, so a dry run happens in another one, and {type(model).__qualname__} "
            f"has no configuration from which to make it there; call it before init_process_group"
        )
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def _of_config(config: Any, *, name: str, trust_remote_code: bool) -> nn.Module:
    source = ModelSource(
        model_name=name, folder=Path(), config=config, head="causal_lm", trust_remote_code=trust_remote_code
    )
    return source._bare()  # noqa: SLF001 - ours; a folder's generation configuration is not there
