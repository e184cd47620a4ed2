"""`recipe_origins.json`: where each key of a resolved recipe was written. It does not know recipes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rl_launcher.observe.redaction import Secrets
from rl_launcher.observe.run_directory import RunDirectory, RunDirectoryError, describe

__all__ = ["write_origins"]


def write_origins(run: RunDirectory, origins: Mapping[str, object], *, recipe: object) -> None:
    """Write `str(origin)` by dotted key; an override is quoted in it, hence credentials of `recipe` are taken out.

    Raises:
        RunDirectoryError: the disk refused it.
    """
    secrets = Secrets.of(recipe)
    written = {key: secrets.scrub(str(origin)) for key, origin in origins.items()}
    try:
        run.origins.write_text(json.dumps(written, indent=1, ensure_ascii=False), encoding="utf-8")
    except OSError as error:
        raise RunDirectoryError(f"{run.origins} cannot be written: {describe(error)}") from error
