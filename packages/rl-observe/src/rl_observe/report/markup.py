"""HTML that cannot be injected into: every string is escaped, except what this module itself has made.

It knows elements and attributes. It does not know the page.
"""

from __future__ import annotations

import html

__all__ = ["Child", "Html", "element", "fragment"]

_VOID = frozenset({"br", "hr", "img", "meta", "path", "rect"})


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


Child = str | None
"""What may stand inside an element: HTML, text to be escaped, or nothing."""


def element(name: str, /, *children: Child, **attributes: str | float | None) -> Html:
    """Write an element. Attributes named like Python's words end in `_`; `_` becomes `-`; None leaves one out.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{written}/>")
    return Html(f"<{name}{written}>{fragment(*children)}</{name}>")


def fragment(*children: Child) -> Html:
    """Join children without an element around them."""
    return Html(
        "".join(child if isinstance(child, Html) else html.escape(child) for child in children if child is not None)
    )
