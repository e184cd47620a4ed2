"""A page that is whole in itself: the style and the script that it carries inside, and a policy that admits no other.

The page reaches for nothing: no network, no font, no script but its own, which its Content-Security-Policy names by
hash. It does not know what the sections say.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from rl_observe.report.markup import Html, element
from rl_observe.run_directory import RunDirectoryError, describe

__all__ = ["document", "remarks_aside", "write_page"]


def document(title: str, sections: Sequence[Html]) -> str:
    """The HTML of a page."""
    script = _resource("report.js")
    # 'unsafe-inline' styles place the labels; scripts are only ours, so that nothing in a sample can ever run.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(_resource("report.css"))),
    )
    body = element("body", element("main", *sections), element("script", Html(script)))
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def write_page(path: Path, page: str) -> Path:
    """Write the page in one move, and return its path.

    Raises:
        RunDirectoryError: it cannot be written; an earlier page is still there.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunDirectoryError(f"{path} cannot be written: {describe(error)}") from error
    return path


def remarks_aside(remarks: Sequence[str]) -> Html | None:
    """What the page could not show; None if that is nothing."""
    if not remarks:
        return None
    items = [element("li", remark) for remark in remarks]
    return element("aside", element("h2", "What this report lacks"), element("ul", *items), class_="remarks")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
