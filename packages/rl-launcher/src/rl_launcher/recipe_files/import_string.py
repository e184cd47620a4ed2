"""`package.module:name` and `path/to/file.py:name`: the user's own object, named by a text.

A file is imported under a name of its own, once per path; neither `sys.path` nor the user's directory is touched, so
that a file can import installed packages but not its neighbours. Runs the user's code: only give it trusted texts.
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

from rl_launcher.recipe_files.problems import nearest

_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_FEW = 10


class ImportStringError(ValueError):
    """A text that does not name an importable object; says why and what to write."""


def load_object(text: str, *, wanted: str) -> object:
    """Import the object that `text` names: `package.module:name`, `path/to/file.py:name`, or `…:Class.method`.

    A path is relative to the current directory. `wanted` says what for, as in "a reward function".

    Raises:
        ImportStringError: malformed text, missing file, module or name, or the module raised while it was imported
            (its exception is the cause).
    """
    place, colon, name = text.rpartition(":")
    is_file = place.endswith(".py") or "/" in place
    if not colon or not place or not all(part.isidentifier() for part in name.split(".")):
        raise _refusal(text, wanted, "it is not written place:name")
    if not is_file and not _MODULE.fullmatch(place):
        raise _refusal(text, wanted, f"{place!r} is not a module's name")
    module = _load_file(text, Path(place), wanted) if is_file else _load_module(text, place, wanted)
    try:
        return functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        raise _refusal(text, wanted, f"{place} has no {name}. {_names_like(name, module)}") from None


def imported_digest(text: str) -> str | None:
    """Digest of the source that this process runs for `text`; None where nothing was imported for it, or no source.

    Of a module of a package, as its file was when this was first asked.
    """
    place = text.rpartition(":")[0]
    module = sys.modules.get(_module_name(Path(place)) if place.endswith(".py") or "/" in place else place)
    loader, file = getattr(module, "__loader__", None), getattr(module, "__file__", None) or ""
    if isinstance(loader, _SourceOnlyLoader):
        return loader.digest
    return _digest_of_file(file) if file.endswith(".py") and Path(file).is_file() else None


def _load_module(text: str, name: str, wanted: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise _refusal(
                text, wanted, f"there is no module {error.name}. {_modules_like(error.name, name)}"
            ) from None
        raise _failure(text, wanted, error) from error


def _load_file(text: str, path: Path, wanted: str) -> ModuleType:
    if not path.is_file():
        like = nearest(path.name, sorted(other.name for other in path.parent.glob("*.py")))
        hint = f"Did you mean {path.parent / like[0]}?" if like else f"Looked in {path.parent.absolute()}."
        raise _refusal(text, wanted, f"there is no file {path}. {hint}")
    name, resolved = _module_name(path), path.resolve()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved, loader=_SourceOnlyLoader(name, str(resolved)))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise _failure(text, wanted, error, neighbours=resolved.parent) from error
    return module


class _SourceOnlyLoader(SourceFileLoader):
    """Compiles the source each time: no `__pycache__` beside the user's file. Remembers what it read."""

    digest = ""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        self.digest = hashlib.sha256(source).hexdigest()
        return self.source_to_code(source, self.path)


def _module_name(path: Path) -> str:
    resolved = path.resolve()
    return f"_recipe_file_{hashlib.sha256(str(resolved).encode()).hexdigest()[:12]}_{resolved.stem}"


@functools.cache  # a module is imported once, whatever becomes of its file
def _digest_of_file(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _refusal(text: str, wanted: str, why: str) -> ImportStringError:
    form = "package.module:name or path/to/file.py:name"
    return ImportStringError(f"{text!r} does not name {wanted}: {why}\nwrite {form}")


def _failure(text: str, wanted: str, error: BaseException, *, neighbours: Path | None = None) -> ImportStringError:
    lines = [f"{text!r} does not name {wanted}: importing it raised {type(error).__name__}: {error}", _raised_at(error)]
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if neighbours is not None and missing and (neighbours / f"{missing}.py").is_file():
        lines.append(f"{missing}.py lies beside it, but a file is imported alone: add its directory to PYTHONPATH")
    return ImportStringError("\n".join(line for line in lines if line))


def _raised_at(error: BaseException) -> str:
    """Return the deepest line of the first file that the import ran."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"  {error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = {__file__, importlib.__file__}
    ran = [frame for frame in frames if frame.filename not in ours and not frame.filename.startswith("<frozen ")]
    inside = [frame for frame in ran if frame.filename == ran[0].filename]
    return f"  {inside[-1].filename}:{inside[-1].lineno}: {inside[-1].line}" if inside else ""


def _names_like(name: str, module: ModuleType) -> str:
    public = sorted(other for other in vars(module) if not other.startswith("_"))
    like = nearest(name, public)
    if like:
        return f"Did you mean {' or '.join(like)}?"
    return f"It has {', '.join(public)}." if 0 < len(public) <= _FEW else ""


def _modules_like(missing: str, asked: str) -> str:
    file = Path(f"{asked.replace('.', '/')}.py")
    if file.is_file():
        return f"The current directory is not searched: for its file write ./{file}"
    parent, dot, _ = missing.rpartition(".")
    package = sys.modules.get(parent)
    if package is not None and not hasattr(package, "__path__"):
        return f"{parent} is a module, not a package."
    beside = pkgutil.iter_modules(package.__path__ if package is not None else None)
    like = nearest(missing, sorted({f"{parent}{dot}{found.name}" for found in beside}), cutoff=0.75)
    return f"Did you mean {' or '.join(like)}?" if like else "Is it installed?"
