"""A file of NeMo-RL with all that it inherits, as plain data. It knows their YAML, and none of their keys.

`defaults:` names files to start from; a section with `_override_: true` replaces what it inherits. Their reader is
OmegaConf on PyYAML: YAML 1.1 with `1e-6` as a number.
"""

import re
from pathlib import Path
from typing import Any

import yaml

__all__ = ["NemoRLError", "read"]

DEFAULTS, REPLACE = "defaults", "_override_"
MISSING = "???"


class NemoRLError(ValueError):
    """A file that cannot be read as one of NeMo-RL's."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with the floats that OmegaConf reads."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*)(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def read(path: Path, *, chain: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read one file and what it inherits, later files and the file itself winning.

    Raises:
        NemoRLError: a file is missing, is no YAML, is no mapping, or inherits itself.
    """
    if path.resolve() in [link.resolve() for link in chain]:
        raise NemoRLError(f"{path} inherits itself, through {' → '.join(map(str, (*chain, path)))}")
    own = _parse(path, chain)
    defaults = own.pop(DEFAULTS, None) or []
    names = defaults if isinstance(defaults, list) else [defaults]
    merged: dict[str, Any] = {}
    for name in names:
        merged = _merge(merged, read(path.parent / str(name), chain=(*chain, path)))
    return _merge(merged, own)


def _parse(path: Path, chain: tuple[Path, ...]) -> dict[str, Any]:
    through = f", inherited through {' → '.join(map(str, chain))}" if chain else ""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a safe loader
    except FileNotFoundError:
        raise NemoRLError(f"there is no file {path}{through}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NemoRLError(f"{path} cannot be read: {error}{through}") from error
    except yaml.YAMLError as error:
        raise NemoRLError(f"{path} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise NemoRLError(f"{path} is no recipe: it holds no sections")
    return content


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in over.items():
        key = str(name)
        if value == MISSING and key in merged:
            continue
        if not isinstance(value, dict):
            merged[key] = value
            continue
        inherited = {} if value.get(REPLACE) or not isinstance(merged.get(key), dict) else merged[key]
        merged[key] = _merge(inherited, {inner: each for inner, each in value.items() if inner != REPLACE})
    return merged
