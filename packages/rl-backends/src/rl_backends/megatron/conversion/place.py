"""A folder of conversions: what lies in it for a model, who is writing, and what dead writers left. One process's view.

Of each conversion there are a folder with its name, which appears whole by a rename; a lock beside it; and while it is
written a hidden folder. A hidden folder whose lock is free has no writer any more.
"""

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from rl_backends.checkpoints.manifest import sync
from rl_backends.errors import CheckpointError
from rl_backends.megatron.conversion.content import SourceContent
from rl_backends.megatron.conversion.conversion import Conversion, read_conversion
from rl_backends.megatron.conversion.lock import WriterLock
from rl_backends.megatron.conversion.marker import MARKER, read_marker
from rl_backends.megatron.conversion.space import told_bytes

__all__ = ["Place"]

UNFINISHED = ".unfinished-"


@final
@dataclass(frozen=True, slots=True)
class Place:
    """Where the conversion of some content belongs."""

    directory: Path
    content: SourceContent

    @property
    def target(self) -> Path:
        """The folder of the conversion."""
        return self.directory / self.content.name

    def complete(self) -> Conversion | None:
        """The conversion, if it is there and sound.

        Raises:
            CheckpointError: it is there, and damaged.
        """
        if not self.target.exists():
            return None
        conversion = read_conversion(self.target)
        if conversion.marker.content != self.content.key:
            raise CheckpointError(f"{self.target} was made of other files, in spite of its name")
        return conversion

    def begin(self) -> Path:
        """A new hidden folder on the same filesystem, to be written and then published."""
        folder = self.directory / f".{self.target.name}{UNFINISHED}{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        return folder

    def publish(self, unfinished: Path) -> None:
        """Give a written and marked folder its name, and wait until that is on disk.

        Raises:
            OSError: it cannot be renamed.
        """
        sync([path for path in (*unfinished.rglob("*"), unfinished) if path.name != MARKER])
        unfinished.rename(self.target)
        sync([self.directory])

    def remove_damaged(self) -> None:
        """Take a damaged conversion away; for the holder of the lock."""
        doomed = self.directory / f".{self.target.name}{UNFINISHED}{uuid.uuid4().hex[:8]}"
        self.target.rename(doomed)
        shutil.rmtree(doomed)

    def remove_leftovers(self) -> list[Path]:
        """Remove what dead writers left, of this conversion and of others; for the holder of this one's lock."""
        return [folder for folder in self._unfinished() if self._remove_if_dead(folder)]

    def outdated(self) -> str:
        """What lies here of the same model and commit with other content, in words; empty where nothing does."""
        folders = (marker.parent for marker in self.directory.glob(f"*/{MARKER}"))
        found = [folder for folder in folders if folder != self.target and not folder.name.startswith(".")]
        told = []
        for folder in found:
            try:
                marker = read_marker(folder)
            except CheckpointError:
                continue
            if (marker.model_name, marker.revision) == (self.content.model_name, self.content.revision):
                told.append(f"{folder.name} ({told_bytes(marker.num_bytes)})")
        return ", ".join(sorted(told))

    def _unfinished(self) -> Iterator[Path]:
        yield from sorted(self.directory.glob(f".*{UNFINISHED}*"))

    def _remove_if_dead(self, folder: Path) -> bool:
        name = folder.name.removeprefix(".").partition(UNFINISHED)[0]
        if name == self.target.name:
            shutil.rmtree(folder)
            return True
        try:
            with WriterLock(self.directory / name).held_if_free() as free:
                if free:
                    shutil.rmtree(folder)
                return free
        except OSError:  # somebody else's, who may not let this one do it
            return False
