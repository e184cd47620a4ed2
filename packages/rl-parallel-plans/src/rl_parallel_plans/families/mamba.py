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

from torch import nn

from rl_parallel_plans.families.parts import (
    Layout,
    NotRecognizedError,
    Styles,
    linear,
    own_parameters,
    parts,
    refuse_unknown,
    whole_block,
)
from rl_parallel_plans.styles import Colwise, Norm, PackedColwise, Rowwise
from rl_parallel_plans.styles.table import ROWS

WHOLE_MIXERS = ({"conv1d", "x_proj", "dt_proj"}, {"conv1d", "x_proj_weight", "dt_proj_weight"})
SEGMENTS, CONVOLVED = "gxBCd", "xBC"
"""Segments of in_proj (d stands for dt), and those that are convolved."""


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

    def attributes(self, tp: int) -> dict[str, int]:
        """What one rank's module must read."""
        groups, features = max(1, self.groups // tp), self.features // tp
        return {
            "num_heads": self.heads // tp,
            "n_groups": groups,
            "intermediate_size": features,
            "conv_dim": features + 2 * groups * self.states,
            "groups_time_state_size": groups * self.states,
        }

    def packed(self, tp: int, names: str) -> PackedColwise:
        """The style of a layer with the segments `names`; with fewer groups than ranks, some read the same B and C."""
        rows = dict(zip(SEGMENTS, self.segments, strict=True))
        shared = self.groups % tp != 0 and tp % self.groups == 0
        return PackedColwise(
            tuple(rows[name] for name in names),
            tuple(self.groups if name in "BC" else self.heads for name in names),
            tuple("groups" if name in "BC" else "heads" for name in names),
            shared=tuple(number for number, name in enumerate(names) if name in "BC") if shared else (),
        )


def mamba_block(module: nn.Module, layout: Layout) -> Styles | None:
    """Styles of a state-space mixer; None where it is none. NotRecognizedError for unknown parts."""
    children, own = parts(module), own_parameters(module)
    if any(names <= children.keys() | own.keys() for names in WHOLE_MIXERS):
        return whole_block(module, layout)
    if not ({"in_proj", "conv1d", "out_proj"} <= children.keys() and {"A_log", "D", "dt_bias"} <= own.keys()):
        return None
    sizes = _sizes(module)
    styles: Styles = {
        "in_proj": (rows := sizes.packed(layout.tp, SEGMENTS)),
        "conv1d": sizes.packed(layout.tp, CONVOLVED),
        "out_proj": Rowwise(),
        **_norm(module, sizes),
    }
    styles[""] = layout.block(
        units={"heads": sizes.heads},
        table=dict.fromkeys(("A_log", "D", "dt_bias"), ROWS),
        sizes=sizes.attributes(layout.tp),
        reads={name: style for name, style in styles.items() if not isinstance(style, Norm)},
        buffers=dict.fromkeys(_buffers(module, sizes), (-1, rows.reads)),
        unfused=isinstance(styles.get("norm"), Norm),
    )
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
    channels = sum(segments[1:4])  # those of x, B and C
    depthwise = isinstance(convolution, nn.Conv1d) and convolution.groups == convolution.in_channels == channels
    if rows.out_features != sum(segments) or sizes.features % sizes.heads or sizes.heads % groups or not depthwise:
        raise NotRecognizedError(
            f"its state-space mixer ({type(module).__name__}) has {rows.out_features} rows in in_proj, which are not "
            f"[gate | x | B | C | dt] {segments} of {sizes.heads} heads in {groups} groups of {states} states"
        )
    return sizes


def _norm(module: nn.Module, sizes: Mamba2Sizes) -> Styles:
    if "norm" not in parts(module):
        return {}
    norm = module.get_submodule("norm")
    shapes = {name: tuple(p.shape) for name, p in norm.named_parameters()}
    if shapes != {"weight": (sizes.features,)}:
        raise NotRecognizedError(f"the norm of its state-space mixer has the parameters {shapes}")
    size = getattr(norm, "group_size", None)
    groups = getattr(norm, "n_groups", 1) if size is None else sizes.features // size
    if groups == 1:
        return {"norm": Norm()}
    if groups == sizes.groups:
        return {"norm": Colwise(groups, "groups")}
    raise NotRecognizedError(f"the norm of its state-space mixer has {groups} groups, and B and C have {sizes.groups}")


def _buffers(module: nn.Module, sizes: Mamba2Sizes) -> list[str]:
    """Falcon-H1 scales the segments of in_proj by constants that it keeps for each row."""
    found = dict(module.named_buffers(recurse=False))
    for name, buffer in found.items():
        if name != "mup_vector" or buffer.shape[-1] != sum(sizes.segments):
            raise NotRecognizedError(
                f"its state-space mixer has a buffer {name} {list(buffer.shape)}, which no rule knows"
            )
    return list(found)
