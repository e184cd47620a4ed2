"""How every stage begins: with a fresh optimizer, or with all that an earlier process of the run had reached."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from rl_algorithms.contracts import Reference
from rl_backends import OptimizerConfig
from rl_launcher.load_model import is_base
from rl_launcher.run.record import Recorder
from rl_launcher.run_parts import Parts, TrainedPolicy

__all__ = ["StageStart", "start_stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStart:
    """What a stage goes on from."""

    taken: int
    """Steps that are done already; 0 for a stage that begins."""

    reference: Reference | None
    """The policy as it was when the stage began, if it was asked for."""

    state: Mapping[str, Any] | None = None
    """What `state` of `Recorder.step` gave; None for a stage that begins."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What `Recorder.keep` was given; empty for a stage that begins."""


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

    With a reference the weights that the stage begins with are saved once, since they cannot be had from later ones;
    but those that adapters were put into are never lost.
    """
    policy, progress, keeper = parts.policy, recorder.progress, recorder.keeper
    taken = progress.steps_of(name)
    policy.start_training(optimizer, num_steps=num_steps, temperature=temperature)
    recorder.begin(name, taken)
    of_base = is_base(parts.selection.adapters, steps_before=progress.total - taken)
    if not taken:
        if with_reference and not of_base:
            keeper.keep_beginning()
        progress.tensors, progress.state, progress.keep_state = {}, None, None
        return StageStart(taken=0, reference=_frozen(policy, of_base=of_base) if with_reference else None)
    going_on = progress.folder is not None and taken < num_steps
    reference = None
    if with_reference and going_on:
        if not of_base:
            policy.load_checkpoint(keeper.beginning, optimizer=False)
        reference = _frozen(policy, of_base=of_base)
    if going_on:
        # Also where only the weights are wanted: the generators of random numbers stand as they stood.
        policy.load_checkpoint(progress.weights)
    return StageStart(taken=taken, reference=reference, state=progress.state, tensors=progress.tensors)


def _frozen(policy: TrainedPolicy, *, of_base: bool) -> Reference:
    freeze: Any = policy.freeze_reference  # only a policy with adapters is asked to leave them off
    reference: Reference = freeze(without_adapters=True) if of_base else freeze()
    return reference
