"""What a run was made of: the recipe with the origin of each key, the machine, the software, the state of the code.

It shows what the files say and proves nothing of its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_observe.json_lines import finite_number
from rl_observe.number_format import format_bytes
from rl_observe.report.markup import Html, element
from rl_observe.report.record import RunRecord, section, text

__all__ = ["repeat_section"]

# Shown by themselves, in words.
_TOLD = frozenset({"packages", "gpus", "git_diff_stat"})


def repeat_section(record: RunRecord) -> Html | None:
    """The resolved recipe, the machine and the versions; None if nothing of them is known."""
    parts = [
        _recipe(record),
        _origins(record.origins),
        _changes(record.versions),
        _versions(record.versions),
        _packages(section(record.versions, "packages")),
    ]
    if not any(parts):
        return None
    return element("section", element("h2", "To repeat it"), *parts, id="repeat")


def _recipe(record: RunRecord) -> Html | None:
    if not record.recipe:
        return None
    lines = len(record.recipe.splitlines())
    return _folded("Resolved recipe", f"recipe.yaml · {lines} lines", element("pre", record.recipe, class_="recipe"))


def _origins(origins: Mapping[str, object]) -> Html | None:
    if not origins:
        return None
    written = {key: str(origin) for key, origin in origins.items() if origin != "default"}
    rows = [_pair(key, origin) for key, origin in written.items()]
    note = f"{len(written)} keys are written, {len(origins) - len(written)} are defaults"
    return _folded("Where each key was written", note, element("table", element("tbody", *rows), class_="versions"))


def _changes(versions: Mapping[str, object]) -> Html | None:
    stat = text(versions, "git_diff_stat")
    if not stat:
        return None
    return _folded("Changes that are in no commit", "git diff --stat", element("pre", stat, class_="recipe"))


def _versions(versions: Mapping[str, object]) -> Html | None:
    if not versions:
        return None
    gpus = versions.get("gpus")
    rows = [_pair(name.replace("_", " "), _word(name, value)) for name, value in versions.items() if name not in _TOLD]
    rows += [_pair("GPU", str(gpu)) for gpu in gpus] if isinstance(gpus, list) else []
    return element("table", element("tbody", *rows), class_="versions")


def _packages(packages: Mapping[str, object]) -> Html | None:
    if not packages:
        return None
    rows = [_pair(name, str(version)) for name, version in packages.items()]
    return _folded(
        "Every package", f"{len(rows)} installed", element("table", element("tbody", *rows), class_="versions")
    )


def _folded(title: str, note: str, content: Html) -> Html:
    return element("details", element("summary", title, element("small", note)), content)


def _pair(name: str, value: str) -> Html:
    return element("tr", element("th", name, scope="row"), element("td", value))


def _word(name: str, value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    size = finite_number(value)
    return format_bytes(size) if name.endswith("_bytes") and size is not None else str(value)
