"""Numbers and shapes in words, the same in text and in HTML."""

from collections.abc import Mapping


def size(num_bytes: float) -> str:
    """Bytes with a binary unit and one decimal: `2.4 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def shape(sizes: tuple[int, ...]) -> str:
    """`[64, 128]`."""
    return f"[{', '.join(map(str, sizes))}]"


def share(part: float, whole: float) -> str:
    """`12.5%`."""
    return f"{part / whole:.1%}" if whole else "0.0%"


def counts(collectives: Mapping[str, int]) -> str:
    """`1 all-gather, 1 reduce-scatter`, or `none`."""
    return ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in collectives.items()) or "none"


def elements(count: int) -> str:
    """`8.03 B parameters` of a model."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit} parameters"
    return f"{count} parameters"
