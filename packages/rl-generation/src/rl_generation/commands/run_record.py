"""What an output file was made of, kept beside it, so that a resumed run cannot go on with something else.

`identity` is what the answers follow from, and must be the same; `circumstances` may have changed, and that is said.
Knows JSON and digests; does not know rows, engines or models.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from rl_generation.commands.console import CommandError

__all__ = ["RunRecord", "digest", "read_record", "record_path", "write_record"]

FORMAT = 1
_SUFFIX = ".run.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run of `generate`, however often it was resumed."""

    identity: Mapping[str, Any]
    """Name → a JSON value, short enough to be shown."""

    circumstances: Mapping[str, Any]
    """Likewise."""

    @classmethod
    def of(cls, *, identity: Mapping[str, Any], circumstances: Mapping[str, Any]) -> "RunRecord":
        """Make a record as it is when it is read back: tuples are lists."""
        return cls(**json.loads(json.dumps({"identity": identity, "circumstances": circumstances})))

    def check(self, other: "RunRecord") -> list[str]:
        """Return what differs in the circumstances of `other`, a sentence each.

        Raises:
            CommandError: The identities differ; it names each difference.
        """
        differences = list(_differences(self.identity, other.identity))
        if differences:
            listed = "".join(f"\n  {difference}" for difference in differences)
            raise CommandError(
                f"this is not the run that was interrupted:{listed}\n"
                f"give what was given then, write to another file, or begin again with --overwrite"
            )
        return list(_differences(self.circumstances, other.circumstances))


def digest(values: Iterable[Any]) -> str:
    """Return the SHA-256 of JSON values, in their order."""
    total = hashlib.sha256()
    for value in values:
        total.update(json.dumps(value, sort_keys=True).encode())
        total.update(b"\n")
    return total.hexdigest()


def record_path(output: Path) -> Path:
    """Where the record of an output file lies."""
    return output.with_name(output.name + _SUFFIX)


def read_record(output: Path) -> RunRecord | None:
    """Return the record of an output file, or None where there is none.

    Raises:
        CommandError: There is one that this release cannot read.
    """
    path = record_path(output)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be read: {error}; begin again with --overwrite") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CommandError(f"{path} is no record of format {FORMAT}; begin again with --overwrite")
    parts: dict[str, Any] = {name: content.get(name) for name in ("identity", "circumstances")}
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise CommandError(f"{path} is damaged: its {name!r} is no object; begin again with --overwrite")
    return RunRecord(**parts)


def write_record(output: Path, record: RunRecord) -> None:
    """Write the record of an output file; a crash leaves the old one or the new one.

    Raises:
        CommandError: It cannot be written.
    """
    path = record_path(output)
    draft = path.with_name(path.name + ".tmp")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"format": FORMAT, **asdict(record)}, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` survive a power failure, where the system can do so."""
    with contextlib.suppress(PermissionError):  # Windows opens no folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name in {**ours, **theirs}:
        before, now = ours.get(name), theirs.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            yield from _differences(before, now, within=f"{within}{name}.")
        elif before != now:
            yield f"{within}{name}: was {json.dumps(before)}, now {json.dumps(now)}"
