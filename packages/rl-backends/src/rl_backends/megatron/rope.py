"""Rotary frequencies of a Hugging Face configuration, computed by `transformers` itself.

Megatron's own formulas know one base and one kind of scaling with fixed constants. Here the numbers are those that the
Hugging Face model multiplies positions by, so that no variant can be nearly right. What changes them with the length
of a sequence is refused.

References: Su et al. 2021, "RoFormer" (arXiv:2104.09864); Peng et al. 2023, "YaRN" (arXiv:2309.00071).
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_backends.kernels.cpu import rotate

STATIC = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies are the same for any length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Position p turns pair i of a head by p * inverse_frequencies[i]."""

    inverse_frequencies: tuple[float, ...]
    """head_dim / 2 numbers, each exact in float32."""
    attention_scaling: float
    """What cosines and sines are multiplied by; 1 but for YaRN."""

    def tensor(self) -> Tensor:
        """The frequencies: float32 [head_dim / 2] on the CPU."""
        return torch.tensor(self.inverse_frequencies, dtype=torch.float32, device="cpu")


def rope_problems(hf_config: Any) -> Iterator[str]:
    """Why the rotary positions of a configuration are not built here, each with its field and value."""
    fields = _fields(hf_config)
    if any(isinstance(value, Mapping) for value in fields.values()):
        yield f"rope_parameters={dict(fields)}: one kind of rotary positions for each kind of layer is not built here"
        return
    if _kind(fields) not in STATIC:
        yield (
            f"rope_type={_kind(fields)!r}: its frequencies change with the length of a sequence, or are unknown here; "
            f"what is built: {', '.join(STATIC)}"
        )
    if not isinstance(_base(hf_config), int | float):
        yield f"rope_theta={_base(hf_config)!r}: the base of rotary positions is a number"
    partial = fields.get("partial_rotary_factor", getattr(hf_config, "partial_rotary_factor", None))
    if partial not in (None, 1, 1.0):
        yield f"partial_rotary_factor={partial}: whole heads are turned here"


def read_rope(hf_config: Any, *, head_dim: int) -> Rope:
    """The frequencies of a configuration."""
    kind = _kind(_fields(hf_config))
    with torch.device("cpu"):
        if kind == "default":  # as each model of `transformers` computes it, to the bit
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            frequencies, scaling = 1.0 / (_base(hf_config) ** exponents), 1.0
        else:
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](copy.deepcopy(hf_config), torch.device("cpu"))
    assert frequencies.shape == (head_dim // 2,), (kind, frequencies.shape, head_dim)
    return Rope(
        inverse_frequencies=tuple(frequencies.to(torch.float32).tolist()),
        attention_scaling=float(scaling),
    )


def _fields(hf_config: Any) -> Mapping[str, Any]:
    return getattr(hf_config, "rope_parameters", None) or {}


def _kind(fields: Mapping[str, Any]) -> str:
    return str(fields.get("rope_type", fields.get("type", "default")))


def _base(hf_config: Any) -> Any:
    """The base, which a configuration that was made by hand may have beside the fields."""
    return _fields(hf_config).get("rope_theta") or getattr(hf_config, "rope_theta", None)


def apply_rotary(  # noqa: PLR0917 - the signature of Megatron's apply_rotary_pos_emb
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, **_: Any
) -> Tensor:
    """Turn queries or keys: [s, b, heads, d], or [t, heads, d] of packed rows, by the angles [s, 1, 1, d] of positions.

    Megatron's own makes five copies of them, and those of packed rows row by row. Where each token of these is in its
    row hangs on `cu_seqlens`, which Megatron hands through. Cosines are kept with the angles, which all layers of one
    pass are given.
    """
    assert mscale == 1.0, "the factor of YaRN is in the softmax scale"
    assert not config.rotary_interleaved, "transformers turns the halves of a head"
    kept = getattr(freqs, "cos_and_sin", None)
    if kept is None or kept[0] is not cu_seqlens:
        angles = freqs if cu_seqlens is None else freqs[cu_seqlens.positions, 0]  # type: ignore[attr-defined] # see `passes`
        first, second = angles.sin().chunk(2, dim=-1)
        kept = cu_seqlens, angles.cos().to(t.dtype), torch.cat((-first, second), dim=-1).to(t.dtype)
        freqs.cos_and_sin = kept  # type: ignore[attr-defined]
    return rotate(t, *kept[1:])
