"""HTML that cannot be injected into: every string is escaped, except what this module itself has made."""

import html

VOID = frozenset({"input", "meta", "wbr"})


class Html(str):
    """Text that is HTML already and is not escaped again."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """An element with its children.

    Attributes named like words of Python end in `_`; any other `_` becomes `-`; None leaves an attribute out.

    >>> element("p", "1 < 2", class_="note")
    '<p class="note">1 &lt; 2</p>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Html(f"<{name}{written}>")
    inner = "".join(child if isinstance(child, Html) else html.escape(child) for child in children if child is not None)
    return Html(f"<{name}{written}>{inner}</{name}>")
