"""Remove credentials from what is written or sent, found by the names of their keys and by their format.

`redact` is for data with keys. `Secrets` collects the credentials of a recipe and removes them from texts without keys,
such as error messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, quote_plus, unquote

T = TypeVar("T")

REDACTED = "<redacted>"
"""The replacement for a credential."""

# Among environment variables, a name that contains one of these words is a credential.
_WORD = re.compile(
    r"tokens?|keys?|apikey|secrets?|passwords?|passwd|passphrase|pwd|pass|pat|credentials?|creds?|auth|authorization"
    r"|bearer|cookies?|dsn|sas|jwt|signature|session|private"
)
# Elsewhere only the last word counts, since recipes have other keys and tokens: a column's key, a padding token.
_LAST_WORD = re.compile(
    r"apikey|secrets?|passwords?|passwd|passphrase|pwd|pat|credentials?|creds|authorization|bearer|cookies?|jwt"
)
_BEFORE_KEY = re.compile(
    r"|api|access|secret|private|encryption|signing|ssh|account|auth|service|shared|master|license|client"
)
_BEFORE_TOKEN = re.compile(r"pad|eos|bos|unk|sep|cls|mask|stop|end|start|think|image|audio|video|special|new|per")
_VARIABLES = frozenset({"env_vars", "env_var", "environment_variables", "environ", "envvars", "runtime_env"})

# `git@` is the user of every repository over ssh, and not a secret.
_USERINFO = re.compile(r"(?<=://)(?!git@)[^/?#\s]+(?=@)")
_ASSIGNED = re.compile(
    r"(?i)(?<![a-z0-9])((?:[a-z0-9]+[_-])*(?:api[_-]?key|access[_-]?key|secret[_-]?key|token|secret|password|passwd|pwd"
    r"|signature|sig|credential)s?(?:=|[\"']\s*:\s*[\"']))([^\s&;,\"']+)"
)
_KNOWN_FORMATS = re.compile(
    r"(?:\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}"
    r"|\bglpat-[\w-]{16,}|\bxox[abprs]-[\w-]{10,}|\bA(?:KIA|SIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*|(?i:\bbearer\s+)[\w.~+/=-]{8,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
    re.DOTALL,
)
# Without any of these words, in lower case, the two patterns match nowhere; to look for words is many times faster.
_WORDS_ASSIGNED = ("key", "token", "secret", "passw", "pwd", "sig", "credential")
_WORDS_OF_FORMATS = (
    *("hf_", "sk-", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "xox", "akia", "asia", "aiza"),
    *("eyj", "bearer", "-----begin "),
)
# What no credential holds and no pattern reaches across: texts with it between them are looked through at once.
_BETWEEN = ";\n"
# Shorter credentials are redacted under their keys, but not searched for in texts: "a" would match everywhere.
_MIN_SEARCHED_LENGTH = 4


def redact(data: T) -> T:
    """Return plain data of the same shape in which every credential is `<redacted>`.

    A value is a credential if its key says so (`token`, `api_key`, `password`; under `env_vars` every name that
    contains such a word), if it is the user info of a URL or a URL parameter with such a name, or if it has the format
    of a known service's key. `${env:NAME}` names a variable and is kept, as are null and booleans.
    """
    return _redacted(data, name="", in_variables=False)  # type: ignore[return-value]  # of the same shape


def redacted_keys(data: object) -> list[str]:
    """Return the dotted keys that `redact` has replaced: a resumed run needs their values again."""
    return [".".join(path) for path, value in _leaves(data, ()) if isinstance(value, str) and REDACTED in value]


@dataclass(frozen=True, slots=True, repr=False)
class Secrets:
    """The credentials of one recipe, to be removed from texts. Its `repr` does not show them."""

    values: tuple[str, ...] = ()
    """The strings to search for, longest first."""

    @classmethod
    def of(cls, data: object) -> Secrets:
        """Collect what `redact` would remove from `data`, both verbatim and URL-encoded."""
        found: set[str] = set()
        for (_, before), (_, after) in zip(_leaves(data, ()), _leaves(redact(data), ()), strict=True):
            if before != after:
                # The removed parts stand in `before` where `after` has the replacement.
                kept = [re.escape(part) for part in str(after).split(REDACTED)]
                match = re.fullmatch("(.*?)".join(kept), str(before), re.DOTALL)
                found.update(match.groups() if match else [str(before)])
        forms = {form for value in found for form in (value, quote(value, safe=""), quote_plus(value), unquote(value))}
        searched = {form for form in forms if len(form) >= _MIN_SEARCHED_LENGTH and form not in REDACTED}
        return cls(tuple(sorted(searched, key=lambda value: (-len(value), value))))

    def scrub(self, data: T) -> T:
        """Return `data` without the secrets, in keys and values, and without other text in the format of a key.

        Data that hold none, which most do, are returned as they are: all their texts are looked through at once.
        """
        if isinstance(data, str):
            text: str = data
            for value in self.values:
                text = text.replace(value, REDACTED)
            return _redact_text(text)  # type: ignore[return-value]  # a string again
        if not isinstance(data, Mapping | list | tuple):
            return data
        whole = _BETWEEN.join(_texts(data))
        return data if self.scrub(whole) == whole else self._scrubbed(data)  # type: ignore[return-value]  # same shape

    def _scrubbed(self, data: object) -> object:
        if isinstance(data, str):
            return self.scrub(data)
        if isinstance(data, Mapping):
            return {self._scrubbed(name): self._scrubbed(value) for name, value in data.items()}
        if isinstance(data, list | tuple):
            return [self._scrubbed(value) for value in data]
        return data

    def __repr__(self) -> str:
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
    if data is None or isinstance(data, bool) or re.fullmatch(r"\$\{env:\w+\}", str(data)):
        return data
    if _is_credential(name, in_variables=in_variables, is_number=not isinstance(data, str)):
        return REDACTED if data != "" else data
    return _redact_text(data) if isinstance(data, str) else data


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


def _texts(data: object) -> list[str]:
    """Every text in plain data, keys included, in any order."""
    found, waiting = list[str](), [data]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            found.append(each)
        elif each is None or isinstance(each, int | float):
            continue
        elif isinstance(each, list | tuple):
            waiting += each
        elif isinstance(each, Mapping):
            waiting += each
            waiting += each.values()
    return found


def _redact_text(text: str) -> str:
    if "://" in text:
        text = _USERINFO.sub(REDACTED, text)
    folded = text.casefold()  # as the patterns ignore case
    if any(sign in text for sign in "='\"") and any(word in folded for word in _WORDS_ASSIGNED):
        # `token=$HF_TOKEN` names a variable and is kept.
        text = _ASSIGNED.sub(lambda match: match[0] if match[2].startswith("$") else match[1] + REDACTED, text)
    if any(word in folded for word in _WORDS_OF_FORMATS):
        text = _KNOWN_FORMATS.sub(REDACTED, text)
    return text


def _leaves(data: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, data
