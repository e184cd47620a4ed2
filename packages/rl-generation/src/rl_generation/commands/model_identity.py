"""Which model this is, without trusting its name: a digest of its files. Loads nothing.

Files up to 64 MiB are read whole, larger ones at 64 places, 1 MiB each: enough to tell two checkpoints of a run from
each other in a second, since training moves weights everywhere. It is no protection against forgery.
"""

import hashlib
from pathlib import Path
from typing import Any

__all__ = ["model_identity"]

SUFFIXES = {".bin", ".jinja", ".json", ".model", ".py", ".safetensors", ".txt"}
WHOLE_BYTES = 64 << 20
PIECES, PIECE_BYTES = 64, 1 << 20


def model_identity(model_name: str, config: Any) -> str:
    """Return the commit of a hub id, or a digest of the files of a folder."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        return f"{model_name}@{getattr(config, '_commit_hash', None)}"
    total = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in SUFFIXES:
            total.update(f"{path.name} {path.stat().st_size}\n".encode())
            _read_into(total, path)
    return f"sha256:{total.hexdigest()}"


def _read_into(total: "hashlib._Hash", path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            total.update(file.read())
            return
        for piece in range(PIECES):
            file.seek((size - PIECE_BYTES) * piece // (PIECES - 1))
            total.update(file.read(PIECE_BYTES))
