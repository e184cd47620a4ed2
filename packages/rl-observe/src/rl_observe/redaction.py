"""What must not be written down or sent: credentials, found by the names of their keys and by their looks.

It knows plain data and text. It does not know which file or tracker they are for. `redact` is for data with keys;
`Secrets` remembers what was found in a recipe, and takes it out of texts that have no keys, as messages of errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, quote_plus, unquote

__all__ = ["REDACTED", "Secrets", "redact", "redacted_keys"]

T = TypeVar("T")

REDACTED = "<redacted>"
"""What stands where a credential was."""

# In the variables of a process every name with such a word is taken for a credential's.
_WORD = re.compile(
    r"tokens?|keys?|apikey|secrets?|passwords?|passwd|passphrase|pwd|pass|pat|credentials?|creds?|auth|authorization"
    r"|bearer|cookies?|dsn|sas|jwt|signature|session|private"
)
# Elsewhere a recipe has keys and tokens of other kinds: the column of a data set, a token of a vocabulary.
_LAST_WORD = re.compile(
    r"apikey|secrets?|passwords?|passwd|passphrase|pwd|pat|credentials?|creds|authorization|bearer|cookies?|jwt"
)
_BEFORE_KEY = re.compile(
    r"|api|access|secret|private|encryption|signing|ssh|account|auth|service|shared|master|license|client"
)
_BEFORE_TOKEN = re.compile(r"pad|eos|bos|unk|sep|cls|mask|stop|end|start|think|image|audio|video|special|new|per")
_VARIABLES = frozenset({"env_vars", "env_var", "environment_variables", "environ", "envvars", "runtime_env"})

# The user of a repository over ssh is always the same, and no secret.
_USERINFO = re.compile(r"(?<=://)(?!git@)[^/?#\s]+(?=@)")
_ASSIGNED = re.compile(
    r"(?i)(?<![a-z0-9])((?:[a-z0-9]+[_-])*(?:api[_-]?key|access[_-]?key|secret[_-]?key|token|secret|password|passwd|pwd"
    r"|signature|sig|credential)s?(?:=|[\"']\s*:\s*[\"']))([^\s&;,\"']+)"
)
_LOOKS = re.compile(
    r"(?:\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?i:\bbearer\s+)[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
    re.DOTALL,
)
# Shorter ones are found by their keys, but not looked for in texts, which would lose every `a`.
_SHORTEST_SOUGHT = 4


def redact(data: T) -> T:
    """Plain data of the same shape in which every credential is `<redacted>`.

    A value is one if its key is named like one (`token`, `api_key`, `password`, under `env_vars` every name with such
    a word), if it is the user's part of a URL or a parameter named so, or if it looks like a key of a known service.
    `${env:NAME}` names a variable and is kept; so are null and booleans.
    """
    return _redacted(data, name="", in_variables=False)  # type: ignore[return-value]  # of the same shape


def redacted_keys(data: object) -> list[str]:
    """The dotted keys at which `redact` has left its mark: a run that is resumed needs those values again."""
    return [".".join(path) for path, value in _leaves(data, ()) if isinstance(value, str) and REDACTED in value]


@dataclass(frozen=True, slots=True)
class Secrets:
    """The credentials of one recipe, to be taken out of texts. Its own representation does not show them."""

    values: tuple[str, ...] = ()
    """What is sought, the longest first."""

    @classmethod
    def of(cls, data: object) -> Secrets:
        """Collect what `redact` would remove from `data`, as it is written and as a URL would write it."""
        found: set[str] = set()
        for before, after in zip(_leaves(data, ()), _leaves(redact(data), ()), strict=True):
            if before[1] != after[1]:
                found.update(_removed(str(before[1]), str(after[1])))
        written = {
            form for value in found for form in (value, quote(value, safe=""), quote_plus(value), unquote(value))
        }
        sought = {form for form in written if len(form) >= _SHORTEST_SOUGHT and form not in REDACTED}
        return cls(tuple(sorted(sought, key=lambda value: (-len(value), value))))

    def scrub(self, data: T) -> T:
        """`data` without the secrets, in keys and in values, and without whatever else looks like one in a text."""
        if isinstance(data, str):
            text: str = data
            for value in self.values:
                text = text.replace(value, REDACTED)
            return _without_looks(text)  # type: ignore[return-value]  # a string again
        if isinstance(data, Mapping):
            return {self.scrub(name): self.scrub(value) for name, value in data.items()}  # type: ignore[return-value]
        if isinstance(data, list | tuple):
            return [self.scrub(value) for value in data]  # type: ignore[return-value]  # plain data has lists
        return data

    def __repr__(self) -> str:
        """How many there are."""
        return f"Secrets({len(self.values)} hidden)"


def _redacted(data: object, *, name: str, in_variables: bool) -> object:
    in_variables = in_variables or not _VARIABLES.isdisjoint(name.lower().split("."))
    if isinstance(data, Mapping):
        return {key: _redacted(value, name=str(key), in_variables=in_variables) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_redacted(value, name=name, in_variables=in_variables) for value in data]
    if isinstance(data, str) and name.lower() in _VARIABLES and "=" in data:
        variable, _, value = data.partition("=")
        return f"{variable}={_redacted(value, name=variable, in_variables=True)}"
    if data is None or isinstance(data, bool) or (isinstance(data, str) and _names_a_variable(data)):
        return data
    if _is_credential(name, in_variables=in_variables, is_number=not isinstance(data, str)):
        return REDACTED if data != "" else data
    return _without_looks(data) if isinstance(data, str) else data


def _is_credential(name: str, *, in_variables: bool, is_number: bool) -> bool:
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if not words:
        return False
    if in_variables:
        return any(_WORD.fullmatch(word) for word in words)
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "key":
        return not is_number and _BEFORE_KEY.fullmatch(before) is not None
    if last == "token":
        return not is_number and _BEFORE_TOKEN.fullmatch(before) is None
    return _LAST_WORD.fullmatch(last) is not None


def _without_looks(text: str) -> str:
    text = _USERINFO.sub(REDACTED, text)
    text = _ASSIGNED.sub(
        lambda match: match[1] + ("" if match[2].startswith("$") else REDACTED) + _kept(match[2]), text
    )
    return _LOOKS.sub(REDACTED, text)


def _kept(value: str) -> str:
    return value if value.startswith("$") else ""


def _names_a_variable(text: str) -> bool:
    return re.fullmatch(r"\$\{env:\w+\}", text) is not None


def _removed(before: str, after: str) -> Iterator[str]:
    """The parts of `before` that stand where `after` has the mark."""
    kept = [re.escape(part) for part in after.split(REDACTED)]
    match = re.fullmatch("(.*?)".join(kept), before, re.DOTALL)
    yield from match.groups() if match else [before]


def _leaves(data: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, data
