"""Send functions and classes to another process that may not be able to import their modules by name.

A plan under test often lies in a test file or a script. Its module's name and file travel with it, and the receiver
loads the file under that name where it cannot import it. What lies in a running script itself (`__main__`) is refused:
to load it would run the script again.
"""

import io
import pickle
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import FunctionType
from typing import Any

from rl_parallel_plans.errors import PlanError


def packed(value: object) -> bytes:
    """`value` with what it takes to unpack it elsewhere. Raises PlanError for what cannot travel."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"{error}: what verify runs in other processes must be importable there; give a function at the top of a "
            "module, or its path 'package.module:name'"
        ) from error
    return pickle.dumps({"path": sys.path, "files": pickler.files, "value": stream.getvalue()})


def unpacked(data: bytes) -> Any:
    """The value, its modules loaded."""
    sent = pickle.loads(data)  # noqa: S301 - from the process that started this one
    sys.path[:] = list(dict.fromkeys([*sent["path"], *sys.path]))
    for name, file in sent["files"].items():
        _load(name, file)
    return pickle.loads(sent["value"])  # noqa: S301 - as above


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.files: dict[str, str] = {}

    def reducer_override(self, value: Any) -> Any:
        """Note the module's file, then pickle as ever."""
        if isinstance(value, FunctionType | type):
            module = sys.modules.get(value.__module__)
            if value.__module__ == "__main__":
                raise PlanError(
                    f"{value.__qualname__} lies in the running script, which another process could only run again: "
                    "put it into a module"
                )
            file = getattr(module, "__file__", None)
            if file and not _importable(value.__module__):
                self.files[value.__module__] = file
        return NotImplemented


def _importable(name: str) -> bool:
    """Whether a process with this `sys.path` finds the module; a test file under importlib's mode is not found."""
    try:
        loaded = sys.modules.pop(name, None)
        try:
            spec = find_spec(name)
        finally:
            if loaded is not None:
                sys.modules[name] = loaded
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and spec.origin == getattr(loaded, "__file__", spec.origin)


def _load(name: str, file: str) -> None:
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
