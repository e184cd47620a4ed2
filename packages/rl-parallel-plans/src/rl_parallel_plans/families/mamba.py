"""State-space mixers: Mamba 2 with its heads shared out, and those that every rank computes whole.

    Mamba 2 (arXiv:2405.21060); H heads of P features in G groups, N states a group
    in_proj   [gate HP | x HP | B GN | C GN | dt H]     rows by heads, B and C by groups
    conv1d    [x HP | B GN | C GN]                      channels alike
    A_log, D, dt_bias  [H]                              by heads
    norm      [HP]                                      each group by itself: by groups; all at once: across ranks
    out_proj                                            columns

With fewer groups than ranks, heads of several ranks read the same B and C: each computes them, from rows that are
gathered for it. Mamba 1 mixes all of its channels between its two layers (x_proj), and is computed whole.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.checkpoints import segments_in_order
from rl_parallel_plans.families.parts import (
    NotRecognizedError,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    whole_block,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_parallel_plans.checkpoints import RowsOfRanks, RowsRead
    from rl_parallel_plans.families.parts import Styles
    from rl_parallel_plans.styles import LocalParameters
    from rl_parallel_plans.styles.local_parameters import Run, RunsOfRank
    from rl_parallel_plans.styles.mixers import Pieces

WHOLE_MIXERS = ({"conv1d", "x_proj", "dt_proj"}, {"conv1d", "x_proj_weight", "dt_proj_weight"})
ALL, CONVOLVED = slice(None), slice(1, 4)
B, C = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Sizes:
    """Sizes of one mixer."""

    heads: int
    """Heads, over all ranks."""
    features: int
    """Features of all heads together."""
    groups: int
    """Groups of heads that share B and C."""
    states: int
    """States of one group."""

    @property
    def segments(self) -> list[int]:
        """Rows of in_proj's segments."""
        shared = self.groups * self.states
        return [self.features, self.features, shared, shared, self.heads]

    def own_groups(self, tp: int) -> int:
        """Groups that one rank's heads read."""
        return max(1, self.groups // tp)

    def attributes(self, tp: int) -> dict[str, int]:
        """What one rank's module must read."""
        groups, features = self.own_groups(tp), self.features // tp
        return {
            "num_heads": self.heads // tp,
            "n_groups": groups,
            "intermediate_size": features,
            "conv_dim": features + 2 * groups * self.states,
            "groups_time_state_size": groups * self.states,
        }

    def fits(self, tp: int) -> str | None:
        """Why tp ranks cannot share this mixer."""
        if self.heads % tp:
            return f"has {self.heads} heads, which tp={tp} does not divide: choose one that does"
        if self.groups % tp and (tp % self.groups or self.groups * self.states % tp):
            return f"has {self.groups} groups, of which tp={tp} is neither a divisor nor a multiple: choose one that is"
        return None

    def row_order(self, segments: slice) -> "RowsOfRanks":
        """The rows of some segments that each rank holds."""
        return segments_in_order(self.segments[segments])

    def runs(self, segments: slice) -> "RunsOfRank":
        """(tp, rank) to a rank's rows of some segments, with B and C whole where heads of several ranks read them."""
        from rl_parallel_plans.styles.local_parameters import Run

        chosen = list(enumerate(self.segments))[segments]

        def of_rank(tp: int, rank: int) -> "Sequence[Run]":
            runs = [Run(size=size // tp) for number, size in chosen if number not in (B, C)]
            shared = 2 * self.groups * self.states // tp
            needed = None if self.groups % tp == 0 else self._needed(tp, rank)
            runs.insert(B - chosen[0][0], Run(size=shared, needed=needed, parts=2))
            return runs

        return of_rank

    def reads(self, segments: slice) -> "RowsRead":
        """The rows of some segments that a rank computes with, as they stand in the whole of them."""

        def of_rank(tp: int, rank: int) -> "Sequence[slice]":
            found, start = [], 0
            for number, size in list(enumerate(self.segments))[segments]:
                share = size // tp
                run = self._needed(tp, rank) if number in (B, C) else slice(rank * share, (rank + 1) * share)
                found.append(slice(start + run.start, start + run.stop))
                start += size
            return found

        return of_rank

    def _needed(self, tp: int, rank: int) -> slice:
        """Rows of B, or of C, of the groups that a rank's heads read."""
        first, size = rank * self.groups // tp, self.own_groups(tp)
        return slice(first * self.states, (first + size) * self.states)


def mamba_block(module: nn.Module, *, sequence_parallel: bool) -> "Styles | None":
    """Styles of a state-space mixer; None where it is none. NotRecognizedError for unknown parts."""
    children, own = parts(module), own_parameters(module)
    if any(names <= children.keys() | own.keys() for names in WHOLE_MIXERS):
        return whole_block(module, sequence_parallel=sequence_parallel)
    if not ({"in_proj", "conv1d", "out_proj"} <= children.keys() and {"A_log", "D", "dt_bias"} <= own.keys()):
        return None
    sizes = _sizes(module)
    styles = _projections(module, sizes)
    styles |= (norm := _norm(module, sizes))
    styles[""] = _border(module, sizes, styles, sequence_parallel=sequence_parallel, norm=norm)
    refuse_unknown(module, styles, kind="state-space mixer")
    return styles


def _sizes(module: nn.Module) -> Mamba2Sizes:
    rows, output, convolution = linear(module, "in_proj"), linear(module, "out_proj"), module.get_submodule("conv1d")
    groups, states = getattr(module, "n_groups", None), getattr(module, "ssm_state_size", None)
    heads = own_parameters(module)["A_log"].shape
    if rows is None or output is None or not isinstance(groups, int) or not isinstance(states, int) or len(heads) != 1:
        raise NotRecognizedError(f"its state-space mixer ({type(module).__name__}) does not say its groups and states")
    sizes = Mamba2Sizes(heads=heads[0], features=output.in_features, groups=groups, states=states)
    segments = sizes.segments
    channels = sum(segments[CONVOLVED])
    depthwise = isinstance(convolution, nn.Conv1d) and convolution.groups == convolution.in_channels == channels
    if rows.out_features != sum(segments) or sizes.features % sizes.heads or sizes.heads % groups or not depthwise:
        raise NotRecognizedError(
            f"its state-space mixer ({type(module).__name__}) has {rows.out_features} rows in in_proj, which are not "
            f"[gate | x | B | C | dt] {segments} of {sizes.heads} heads in {groups} groups of {states} states"
        )
    return sizes


def _projections(module: nn.Module, sizes: Mamba2Sizes) -> "Styles":
    from rl_parallel_plans.styles import BlockRowwise, BlockSharedRows

    def shared(name: str, segments: slice) -> BlockSharedRows:
        return BlockSharedRows(
            sizes.segments[segments],
            parameters=sum(p.ndim > 1 for p in own_parameters(module.get_submodule(name)).values()),
            row_order=sizes.row_order(segments),
            reads=sizes.reads(segments),
            runs=sizes.runs(segments),
            fits=sizes.fits,
        )

    return {"in_proj": shared("in_proj", ALL), "conv1d": shared("conv1d", CONVOLVED), "out_proj": BlockRowwise()}


def _norm(module: nn.Module, sizes: Mamba2Sizes) -> "Styles":
    from rl_parallel_plans.styles import BlockGatedNorm, BlockGroupNorm

    if "norm" not in parts(module):
        return {}
    norm = module.get_submodule("norm")
    shapes = {name: tuple(p.shape) for name, p in norm.named_parameters()}
    if shapes != {"weight": (sizes.features,)}:
        raise NotRecognizedError(f"the norm of its state-space mixer has the parameters {shapes}")
    size = getattr(norm, "group_size", None)
    groups = getattr(norm, "n_groups", 1) if size is None else sizes.features // size
    if groups == 1:
        return {"norm": BlockGatedNorm()}
    if groups == sizes.groups:
        return {"norm": BlockGroupNorm(units=groups, what="groups")}
    raise NotRecognizedError(f"the norm of its state-space mixer has {groups} groups, and B and C have {sizes.groups}")


def _border(
    module: nn.Module, sizes: Mamba2Sizes, inside: "Styles", *, sequence_parallel: bool, norm: "Styles"
) -> "LocalParameters":
    from torch.distributed.tensor import Shard

    from rl_parallel_plans.styles import BlockGatedNorm, MixerParallel, ParameterRule

    known = {name for name in sizes.attributes(1) if isinstance(module.__dict__.get(name), int)}
    return MixerParallel(
        sequence_parallel=sequence_parallel,
        units={"heads": sizes.heads},
        own={name: ParameterRule(placement=Shard(0)) for name in ("A_log", "D", "dt_bias")},
        attributes=lambda tp: {name: n for name, n in sizes.attributes(tp).items() if name in known},
        inside={name: style for name, style in inside.items() if not isinstance(style, BlockGatedNorm)},  # type: ignore[misc]
        buffers=_buffers(module, sizes),
        unfused=any(isinstance(style, BlockGatedNorm) for style in norm.values()),
    )


def _buffers(module: nn.Module, sizes: Mamba2Sizes) -> "dict[str, Pieces]":
    """Falcon-H1 scales the segments of in_proj by constants that it keeps for each row."""
    found: dict[str, Pieces] = {}
    for name, buffer in module.named_buffers(recurse=False):
        if name != "mup_vector" or buffer.shape[-1] != sum(sizes.segments):
            raise NotRecognizedError(
                f"its state-space mixer has a buffer {name} {list(buffer.shape)}, which no rule knows"
            )
        found[name] = (-1, sizes.reads(ALL))
    return found
