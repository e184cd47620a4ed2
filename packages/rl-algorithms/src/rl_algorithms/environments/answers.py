r"""The final answer out of a text: `\boxed{...}`, `#### ...`, `<answer>...</answer>`, the last number or letter.

Every function is pure and total: any text gives a text or None, in time linear in its length, and only the last `TAIL`
characters are looked at. Only the *last* mark counts, even where it holds nothing or is cut off: whoever writes several
answers is held to the last one.
"""

import re
from collections.abc import Callable

__all__ = ["boxed", "code_block", "final_answer", "hashed", "last_letter", "last_number", "marked", "tagged"]

TAIL = 20_000  # characters; longer than any final answer and what follows it

# Each alternative is decided by its first character, so that nothing is tried twice.
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+|\s?/\s?\d+)?")
LETTER = re.compile(r"(?<![^\W_])[A-Z](?![^\W_])")


def boxed(text: str) -> str | None:
    r"""What the last `\boxed{...}` holds, braces matched; None without one, or where it never closes."""
    return _held(_boxed(text[-TAIL:]))


def hashed(text: str) -> str | None:
    """What stands after the last `####`, to the end of its line, as in GSM8K."""
    return _held(_hashed(text[-TAIL:]))


def tagged(text: str, *, tag: str = "answer") -> str | None:
    """What stands between the last `<answer>` and the `</answer>` after it; `tag` may name another."""
    return _held(_tagged(text[-TAIL:], tag))


def marked(text: str) -> str | None:
    r"""The answer that is marked last, as `\boxed{...}`, `<answer>...</answer>` or `#### ...`; None without one.

    A box within another mark is opened as well: `<answer>\boxed{4}</answer>` is 4.
    """
    return _held(_marked(text[-TAIL:]))


def final_answer(text: str) -> str | None:
    """The marked answer, or the whole text where nothing is marked; None where the last mark holds nothing."""
    found = _marked(text[-TAIL:])
    return text[-TAIL:].strip() or None if found is None else _held(found)


def last_number(text: str) -> str | None:
    """The last number, without commas: `12`, `-3.5`, `1e-3`, `3/4`.

    >>> last_number("of 1,200 apples 3/4 are red, that is 900.")
    '900'
    """
    numbers = NUMBER.findall(text[-TAIL:])
    return "".join(numbers[-1].replace(",", "").split()) if numbers else None


def last_letter(text: str, *, letters: str = "ABCDEFGHIJ") -> str | None:
    """The last capital of `letters` that stands alone. A and I are words as well: ask for a mark if you can.

    >>> last_letter("It is (B), not the other.")
    'B'
    """
    found = [letter for letter in LETTER.findall(text[-TAIL:]) if letter in letters]
    return found[-1] if found else None


def code_block(text: str) -> str | None:
    """The last block fenced by three backticks, in whatever language; None without one, or where it is cut off."""
    parts = text.split("```")
    # Blocks are the odd parts. An even number of parts is an odd one of fences: the last block never closes.
    if len(parts) < 3 or len(parts) % 2 == 0:
        return None
    language, newline, code = parts[-2].partition("\n")
    return code if newline and re.fullmatch(r"[\w+#. -]*\r?", language) else parts[-2]


Extract = Callable[[str], str | None]
"""How a verifier finds the answer in a text: one of the functions above, or any like them."""


def _held(found: tuple[int, str] | None) -> str | None:
    return None if found is None else found[1] or None


def _marked(text: str) -> tuple[int, str] | None:
    found = [each for each in (_boxed(text), _tagged(text, "answer"), _hashed(text)) if each is not None]
    if not found:
        return None
    # A box within a tag begins after the tag, and so wins: it is what the tag holds.
    return max(found)


def _boxed(text: str) -> tuple[int, str] | None:
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    opened = text.index("{", start)
    depth = 0
    for index in range(opened, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
        if not depth:
            return start, text[opened + 1 : index].strip()
    return start, ""


def _hashed(text: str) -> tuple[int, str] | None:
    start = text.rfind("####")
    return None if start < 0 else (start, text[start + 4 :].partition("\n")[0].strip())


def _tagged(text: str, tag: str) -> tuple[int, str] | None:
    start = text.rfind(f"<{tag}>")
    if start < 0:
        return None
    end = text.find(f"</{tag}>", start)
    return start, text[start + len(tag) + 2 : end].strip() if end >= 0 else ""
