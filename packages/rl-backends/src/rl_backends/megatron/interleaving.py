"""What Megatron's interleaved schedule (1F1B over virtual stages) needs beside its function.

Imports Megatron: only `passes.py` imports this, where a stage holds several chunks of the model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection

from rl_backends.batching.microbatches import ModelInputs

Shape = tuple[int, int, int]


def interleaving(config: Any, inputs: Sequence[ModelInputs], *, chunks: int) -> dict[str, Any]:
    """Arguments of Megatron's schedule for these microbatches; `config` is the chunks' `TransformerConfig`."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    stage, stages = groups.pp.rank(), groups.pp.size()
    config.microbatch_group_size_per_vp_stage = turn = microbatches_per_turn(len(inputs), stages=stages)
    tokens_apart = groups.tp.size() if config.sequence_parallel else 1
    shapes = [(each.tokens.shape[1] // tokens_apart, each.tokens.shape[0], config.hidden_size) for each in inputs]
    # Forward and backward go through the microbatches in one order. Chunk by chunk: the first stage receives nothing
    # for the first chunk of a forward, and the last one nothing for that of a backward.
    order = get_schedule_table(len(inputs), chunks, turn)
    forward = [shapes[number] for number, chunk in order if stage > 0 or chunk > 0]
    backward = [shapes[number] for number, chunk in order if stage < stages - 1 or chunk > 0]
    communicator = CommunicatorOfKnownShapes(groups.pp, config, forward=iter(forward), backward=iter(backward))
    return {"p2p_communicator": communicator, "pg_collection": groups}


def microbatches_per_turn(num_microbatches: int, *, stages: int) -> int:
    """How many microbatches go through one chunk before the next one's turn: the fewest that Megatron takes.

    A turn has at least as many as there are stages, and the last one, which has what is left, too. Fewer in a turn are
    fewer whose activations are kept.

    num_microbatches: at least `stages`.
    """
    return next(
        turn
        for turn in range(stages, num_microbatches + 1)
        if num_microbatches % turn == 0 or num_microbatches % turn >= stages
    )


class CommunicatorOfKnownShapes(P2PCommunicator):  # type: ignore[misc]
    """Receives microbatches of several lengths without being sent their shapes first, as all stages know them.

    Megatron's own exchange of shapes (0.16.1) mixes up those of activations and gradients between two stages, and waits
    for ever where one stage has all its microbatches in the warm-up and the other has not.
    """

    def __init__(self, group: Any, config: Any, *, forward: Iterator[Shape], backward: Iterator[Shape]) -> None:
        super().__init__(group, config)
        self._forward, self._backward = forward, backward

    def _communicate_shapes(  # noqa: PLR0917 - Megatron's signature
        self,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,  # noqa: FBT001
        recv_next: bool,  # noqa: FBT001
    ) -> tuple[Shape | None, Shape | None]:
        del tensor_send_next, tensor_send_prev
        return next(self._forward) if recv_prev else None, next(self._backward) if recv_next else None
