"""The conversion that the Megatron backend would read or make of a model: where, why there, how big. Writes nothing."""

from pathlib import Path
from typing import Any

from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir, megatron_checkpoint_dir
from rl_backends.errors import CheckpointError, ModelError
from rl_backends.loading import ModelSource
from rl_backends.loading.source import weight_files
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.conversion.content import source_content
from rl_backends.megatron.conversion.place import Place
from rl_backends.megatron.conversion.space import told_bytes

__all__ = ["look_for_conversion"]


def look_for_conversion(source: ModelSource | None, config: MegatronConfig, *, numbers: int) -> dict[str, Any]:
    """`directory`, `reason`, `state` ("there", "absent", "damaged", "unknown"), `folder`, `bytes` and `told`.

    Args:
        source: None for a configuration without weights.
        config: may name the directory.
        numbers: of the whole model.
    """
    directory = megatron_checkpoint_dir()
    reason = explain_megatron_checkpoint_dir().removeprefix(f"{directory} (").removesuffix(")")
    if config.checkpoint_dir is not None:
        directory, reason = Path(config.checkpoint_dir).expanduser(), "checkpoint_dir says so"
    found: dict[str, Any] = {"directory": str(directory.absolute()), "reason": reason, "folder": None, "bytes": None}
    if source is None:
        return found | {"state": "unknown", "told": "MODEL is a configuration without weights: nothing is converted"}
    try:
        weight_files(str(source.folder), source.folder)  # those of the Hub are not fetched to be explained
    except ModelError:
        size = numbers * (2 if "bfloat16" in str(getattr(source.config, "dtype", None)) else 4)
        told = f"the weights are not here yet; a conversion would take about {told_bytes(size)}"
        return found | {"state": "unknown", "bytes": size, "told": told}
    return found | _there(Place(directory.absolute(), source_content(source)))


def _there(place: Place) -> dict[str, Any]:
    size = place.content.tensor_bytes
    told = f"made at the first start, in {place.content.dtype}, about {told_bytes(size)}"
    try:
        conversion = place.complete()
    except CheckpointError as damage:
        return _state("damaged", place, size, told=f"there and damaged, so it is {told}: {damage}")
    if conversion is not None:
        return _state("there", place, conversion.bytes, told=conversion.explain())
    outdated = place.outdated()
    changed = f"; the model's files have changed since {outdated} was made" if outdated else ""
    return _state("absent", place, size, told=f"none there; {told}, as {place.target.name}{changed}")


def _state(state: str, place: Place, num_bytes: int, *, told: str) -> dict[str, Any]:
    return {"state": state, "folder": str(place.target), "bytes": num_bytes, "told": told}
