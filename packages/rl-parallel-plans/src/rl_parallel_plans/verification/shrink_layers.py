"""Which decoder layers of a configuration are enough: at least two, and one of each kind.

Kinds are read from whatever differs between layers, under any name: lists with one entry a layer, a pattern string with
one letter a layer, lists of layer numbers, and thresholds ("the first k are dense"). Knows no architecture.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COUNT = re.compile(
    r"(?:\w*_)?(?:num_hidden_layers|n_layers?|num_layers|encoder_layers|decoder_layers|num_encoder_layers"
    r"|num_decoder_layers|resampler_depth|num_layers_per_stack|num_global_layers|num_blocks)|depth|layers"
)
NUMBERS = re.compile(r"\w*(?:layers|indices|indexes|idxs|layer_ids)")
FIRST = re.compile(r"first_k_dense\w*|\w*num_dense_layers|n_dense_layers|max_window_layers|moe_layer_start_index")
LAST = re.compile(r"num_kv_shared_layers")
PERIOD = re.compile(
    r"\w*(?:layer_period|attention_interval|layer_interval|layers_interval|sliding_window_pattern|every_n_layers"
    r"|sparse_step|moe_layer_step|attention_frequency|layer_freq|moe_every_n_layers)"
)
OFFSET = re.compile(r"\w*layer_offset")
FEATURE_LAYER = re.compile(r"vision_feature_layers?|feature_layer")
MOST_LAYERS = 8


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers kept, as numbers in the full configuration."""

    total: int
    """Layers of the full configuration."""
    kept: tuple[int, ...]
    """Their numbers there, ascending."""


def choose(section: Mapping[str, Any], *, of_each: int = 1, extra: int = 0) -> Layers | None:
    """One layer of each kind and two at least, or None where the section has no layers.

    of_each: how many of each kind where there are as many. extra: how many more of the kind that is there most often.
    """
    total = _total(section)
    if total is None:
        return None
    for use in (_anything, _names_only):
        kinds = _kinds(section, total, use)
        kept = [n for n, kind in enumerate(kinds) if kinds[:n].count(kind) < of_each]
        if len(kept) <= MOST_LAYERS:
            break
    kept = kept[:MOST_LAYERS]
    if len(kept) == 1 and total > 1:
        kept.append(total - 1)
    common = max(kinds, key=kinds.count)
    for number in (n for n, kind in enumerate(kinds) if kind == common and n not in kept):
        if extra == 0:
            break
        kept.append(number)
        extra -= 1
    return Layers(total=total, kept=tuple(sorted(kept)))


def apply(section: dict[str, Any], layers: Layers) -> None:
    """Keep only `layers` in everything of the section that speaks of layers, in place."""
    kept, total = layers.kept, layers.total
    if section.get("attention_types") and _per_layer(section.get("attention_layers"), total):
        section["attention_types"] = [[[section["attention_layers"][number] for number in kept], 1]]  # GPT-Neo
    for key, value in list(section.items()):
        if _is_count(key, value):
            section[key] = len(kept)
        elif _per_layer(value, total):
            picked = [value[number] for number in kept]
            section[key] = "".join(picked) if isinstance(value, str) else picked
        elif _is_numbers(key, value, total):
            section[key] = [place for place, number in enumerate(kept) if number in value]
        elif _by_number(value):
            section[key] = _renumbered(value, kept)
        elif isinstance(value, int) and not isinstance(value, bool):
            section[key] = _bound(key, value, layers)


def _bound(key: str, value: int, layers: Layers) -> int:
    kept, total = layers.kept, layers.total
    if FIRST.fullmatch(key):
        return sum(number < value for number in kept)
    if LAST.fullmatch(key):
        return sum(number >= total - value for number in kept)
    if key == "moe_layer_end_index":
        return len(kept) - 1 if value >= 0 else value
    if PERIOD.fullmatch(key):
        return min(value, 2)
    return min(value, 1) if OFFSET.fullmatch(key) else value


def _total(section: Mapping[str, Any]) -> int | None:
    counts = [value for key, value in section.items() if _is_count(key, value)]
    if counts:
        return int(section.get("num_hidden_layers") or counts[0])
    lists = [value for key, value in section.items() if key in {"layers_block_type", "layer_types"} and value]
    return len(lists[0]) if lists else None


def _kinds(section: Mapping[str, Any], total: int, use: Callable[[Any], bool]) -> list[tuple[Any, ...]]:
    """What is said of each layer."""
    said: list[Callable[[int], Any]] = []
    for key, value in section.items():
        if _is_count(key, value):
            continue
        if _per_layer(value, total) and use(value):
            said.append(lambda n, v=value: repr(v[n]))  # type: ignore[misc]
        elif _is_numbers(key, value, total):
            said.append(lambda n, v=value: n in v)  # type: ignore[misc]
        elif _by_number(value):
            said.append(lambda n, v=value: repr(next((v[k] for k in v if int(k) == n), None)))  # type: ignore[misc]
        elif isinstance(value, int) and FIRST.fullmatch(key):
            said.append(lambda n, v=value: n < v)  # type: ignore[misc]
        elif isinstance(value, int) and LAST.fullmatch(key):
            said.append(lambda n, v=value: n >= total - v)  # type: ignore[misc]
    return [tuple(say(number) for say in said) for number in range(total)]


def _anything(_value: object) -> bool:
    return True


def _names_only(value: list[Any] | str) -> bool:
    return all(isinstance(entry, str | bool | type(None)) for entry in value)


def _is_count(key: str, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and bool(COUNT.fullmatch(key))


def _per_layer(value: object, total: int) -> bool:
    if isinstance(value, str):
        return len(value) == total > 2 and len(set(value)) < len(value) and not value.isalnum()
    return isinstance(value, list) and len(value) == total and total > 1


def _is_numbers(key: str, value: object, total: int) -> bool:
    return (
        isinstance(value, list)
        and bool(NUMBERS.fullmatch(key))
        and all(isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < total for entry in value)
        and bool(value)
    )


def _by_number(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(k, str) and k.isdigit() for k in value)


def _renumbered(value: dict[str, Any], kept: tuple[int, ...]) -> dict[str, Any]:
    by_number = {int(key): (key, entry) for key, entry in value.items()}
    return {
        str(place).zfill(len(by_number[number][0])): by_number[number][1]
        for place, number in enumerate(kept)
        if number in by_number
    }
