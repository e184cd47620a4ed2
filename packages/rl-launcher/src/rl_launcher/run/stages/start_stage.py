"""How every stage starts: with a fresh optimizer, or where an earlier process of the run stopped."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rl_algorithms.contracts import Reference
from rl_backends import OptimizerConfig
from rl_backends.backend import TrainingBackend
from rl_backends.lora.layers import is_base
from rl_launcher.build.parts import Parts
from rl_launcher.run.record import Recorder


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """Where a stage starts or continues. For a stage that starts, `taken` is 0 and the last two are empty."""

    taken: int
    """Steps that are done already."""
    reference: Reference | None
    """The policy as it was when the stage started, if that was requested."""
    state: Mapping[str, Any] | None = None
    """What `state` of `Recorder.step` returned."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What the stage put into `Progress.tensors`."""


def start_stage(
    name: str,
    optimizer: OptimizerConfig,
    *,
    num_steps: int,
    parts: Parts,
    recorder: Recorder,
    temperature: float = 1.0,
    with_reference: bool = False,
) -> StageStart:
    """Make the policy ready to train.

    With a reference, the weights at the start of the stage are saved once, since later weights cannot restore them;
    the base model under adapters is never lost and is not saved.
    """
    policy, progress, keeper = parts.policy, recorder.progress, recorder.keeper
    taken = progress.steps_of(name)
    policy.start_training(optimizer, num_steps=num_steps, temperature=temperature)
    recorder.log.profiler.reached(name, taken)  # the next step may be recorded
    parts.reached(name, taken)
    of_base = is_base(parts.selection.adapters, steps_before=progress.total - taken)
    if not taken:
        if with_reference and not of_base:
            keeper.save_stage_start()
        progress.tensors, progress.state, progress.keep_state = {}, None, None
        return StageStart(taken=0, reference=_freeze(policy, of_base=of_base) if with_reference else None)
    reference = None
    if progress.folder is not None and taken < num_steps:
        if with_reference:
            if not of_base:
                policy.load_checkpoint(keeper.stage_start, optimizer=False)
            reference = _freeze(policy, of_base=of_base)
        # Even if only the weights are needed: the random generators must be where they were.
        policy.load_checkpoint(progress.weights())
    return StageStart(taken=taken, reference=reference, state=progress.state, tensors=progress.tensors)


def _freeze(policy: TrainingBackend, *, of_base: bool) -> Reference:
    reference: Reference = policy.freeze_reference(without_adapters=of_base)
    return reference
