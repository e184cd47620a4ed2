"""A complete conversion: where it lies, what it is of, and its weights into a model of any layout.

Part of a conversion is pickle, as megatron-core writes it. It is loaded only from a folder whose marker this package
wrote and whose files are those of the marker; that finds damage and not malice, so keep conversions where nobody
writes whom you would not let run code.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from rl_backends.errors import CheckpointError
from rl_backends.megatron.conversion.marker import Marker, check_files, read_marker
from rl_backends.megatron.conversion.space import told_bytes
from rl_backends.megatron.conversion.tensors import ShardedModel, load_tensors, stored_dtypes
from rl_backends.rank_agreement import on_every_rank

__all__ = ["TRACKER", "WEIGHTS", "Conversion", "read_conversion"]

WEIGHTS = "release"
"""Folder of the distributed checkpoint, under the name that Megatron-LM has for one that no training step made."""
TRACKER = "latest_checkpointed_iteration.txt"
"""By which Megatron-LM finds it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """One Hugging Face model as a Megatron distributed checkpoint, complete and looked at."""

    folder: Path
    marker: Marker
    why: str
    """Why it was made in this run, or `found`."""

    @property
    def weights(self) -> Path:
        """What `megatron.core.dist_checkpointing.load` reads."""
        return self.folder / WEIGHTS

    @property
    def bytes(self) -> int:
        """Of all files."""
        return self.marker.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensors."""
        dtype: torch.dtype = getattr(torch, self.marker.dtype)
        return dtype

    def load_into(self, model: ShardedModel) -> None:
        """Fill a model of any layout, in place, cast to its dtype; every rank must call it.

        Raises:
            CheckpointError: the files are not those of the marker; tensors are missing, left over, or of another
                shape. The model is unusable afterwards.
            RankError: on the ranks on which nothing failed.
        """
        on_every_rank(lambda: stored_dtypes(self.weights))
        load_tensors(model, self.weights)

    def figures(self) -> dict[str, Any]:
        """The same as `explain`, for programs."""
        told = asdict(self.marker)
        return {"folder": str(self.folder), "why": self.why, **told, "files": len(self.marker.files)}

    def explain(self) -> str:
        """Where it is, of what, how big, how long it took and why it was made."""
        marker = self.marker
        model = marker.model_name + (f" at {marker.revision[:8]}" if marker.revision else "")
        return (
            f"{self.folder}: {model} ({marker.architecture}) as a Megatron checkpoint in {marker.dtype}, "
            f"{told_bytes(marker.num_bytes)}, made {marker.written_at} in {marker.seconds:.1f} s by "
            f"{marker.ranks} rank{'s' if marker.ranks > 1 else ''}; {self.why}"
        )


def read_conversion(folder: str | Path, *, why: str = "found") -> Conversion:
    """The conversion in a folder, after a look at each of its files.

    Raises:
        CheckpointError: it is not complete, damaged, or of another format.
    """
    path = Path(folder)
    marker = read_marker(path)
    check_files(path, marker)
    if not any(Path(record.name).parts[0] == WEIGHTS for record in marker.files):
        raise CheckpointError(f"{path} holds no {WEIGHTS}, where weights lie")
    return Conversion(folder=path, marker=marker, why=why)
