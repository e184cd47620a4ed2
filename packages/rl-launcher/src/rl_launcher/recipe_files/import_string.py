"""`load_object`: import the user's own object that a text names, `package.module:name` or `path/to/file.py:name`.

A file is imported under a name of its own, once per path. Neither `sys.path` nor the user's directory is changed, so a
file can import installed packages but not its neighbours. This runs the user's code: pass trusted texts only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import pkgutil
import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from rl_launcher.errors import Refusal
from rl_launcher.recipe_files.problems import nearest

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FEW = 10


class ImportStringError(Refusal):
    """A text that does not name an importable object; says why and what to write."""


def load_object(text: str, *, wanted: str) -> object:
    """Import the object that `text` names: `package.module:name`, `path/to/file.py:name`, or `…:Class.method`.

    A path is relative to the current directory. `wanted` says what it is for, as in "a reward function".

    Raises:
        ImportStringError: the text is malformed, the file, module or name is missing, or the module raised while it was
            imported (its exception is the cause).
    """

    def refuse(why: str) -> ImportStringError:
        form = "package.module:name or path/to/file.py:name"
        return ImportStringError(f"{text!r} does not name {wanted}: {why}\nwrite {form}")

    place, colon, name = text.rpartition(":")
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise refuse("it is not written place:name")
    file = Path(place) if _is_file(place) else None
    if file is None and not _MODULE.fullmatch(place):
        raise refuse(f"{place!r} is not a module's name")
    if file is not None and not file.is_file():
        like = nearest(file.name, sorted(other.name for other in file.parent.glob("*.py")))
        hint = f"Did you mean {file.parent / like[0]}?" if like else f"Looked in {file.parent.absolute()}."
        raise refuse(f"there is no file {file}. {hint}")
    try:
        module = importlib.import_module(place) if file is None else _import_file(file)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if file is None and missing and f"{place}.".startswith(f"{missing}."):
            raise refuse(f"there is no module {missing}. {_modules_like(missing, place)}") from None
        reason = f"{text!r} does not name {wanted}: importing it raised {type(error).__name__}: {error}"
        lines = [reason, _raised_at(error)]
        if file is not None and missing and (file.resolve().parent / f"{missing}.py").is_file():
            lines.append(f"{missing}.py lies beside it, but a file is imported alone: add its directory to PYTHONPATH")
        raise ImportStringError("\n".join(line for line in lines if line)) from error
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        public = sorted(other for other in vars(module) if not other.startswith("_"))
        hint = f"It has {', '.join(public)}." if 0 < len(public) <= _FEW else ""
        if like := nearest(name, public):
            hint = f"Did you mean {' or '.join(like)}?"
        raise refuse(f"{place} has no {name}. {hint}") from None


def imported_digest(text: str) -> str | None:
    """Return the SHA-256 of the source that this process runs for `text`; None if nothing was imported for it.

    For a module of a package it is the file's digest when this was first called.
    """
    place = text.rpartition(":")[0]
    module = sys.modules.get(_module_name(Path(place)) if _is_file(place) else place)
    loader, file = getattr(module, "__loader__", None), getattr(module, "__file__", None) or ""
    if isinstance(loader, _SourceOnlyLoader):
        return loader.digest
    return _digest_of_file(file) if file.endswith(".py") and Path(file).is_file() else None


@functools.cache  # a module is imported once, whatever becomes of its file
def _digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class _SourceOnlyLoader(SourceFileLoader):
    """Compiles the source each time, so no `__pycache__` appears beside the user's file; keeps the source's digest."""

    digest = ""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self.digest = hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, self.path)


def _import_file(path: Path) -> ModuleType:
    name, resolved = _module_name(path), path.resolve()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved, loader=_SourceOnlyLoader(name, str(resolved)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _module_name(path: Path) -> str:
    resolved = path.resolve()
    return f"_recipe_file_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}_{resolved.stem}"


def _raised_at(error: BaseException) -> str:
    """Return the deepest line of the first file that the import ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"  {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = {__file__, importlib.__file__}
    ran = [frame for frame in frames if frame.filename not in ours and not frame.filename.startswith("<frozen ")]
    inside = [frame for frame in ran if frame.filename == ran[0].filename]
    return f"  {inside[-1].filename}:{inside[-1].lineno}: {inside[-1].line}" if inside else ""


def _modules_like(missing: str, wanted: str) -> str:
    file = Path(f"{wanted.replace('.', '/')}.py")
    if file.is_file():
        return f"The current directory is not searched: for its file write ./{file}"
    parent, dot, _ = missing.rpartition(".")
    package = sys.modules.get(parent)
    if package is not None and not hasattr(package, "__path__"):
        return f"{parent} is a module, not a package."
    beside = pkgutil.iter_modules(package.__path__ if package is not None else None)
    like = nearest(missing, sorted({f"{parent}{dot}{found.name}" for found in beside}), cutoff=0.75)
    return f"Did you mean {' or '.join(like)}?" if like else "Is it installed?"
