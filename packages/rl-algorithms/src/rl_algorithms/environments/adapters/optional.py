"""Optional packages: imported when an adapter is made, or refused by the name of the extra that brings them."""

import importlib
from typing import Any

__all__ = ["AdapterError", "require"]


class AdapterError(ValueError):
    """Something that an adapter cannot carry; the message names it."""


def require(module: str, *, extra: str) -> Any:
    """The module.

    Raises:
        AdapterError: it, or something that it imports, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise AdapterError(f"{error}; install it by: pip install 'rl-algorithms[{extra}]'") from error
