"""Where the repository is published: one setting, `[tool.repository] url` in the root `pyproject.toml`.

    python scripts/repository_url.py                                  is it set to where this clone comes from?
    python scripts/repository_url.py --set https://host/owner/name    set it, and write it into every package

Each package's `[project.urls]`, and the links of its README on a package index, begin with it. They are written there,
since a source distribution holds nothing of the root; `scripts/repository_rules.py` finds one that differs. Until it is
set, its host ends in `.invalid`, which no network resolves, and `nox -s release` and `nox -s build` refuse. Exit code 2
if they would.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTING = re.compile(r'^\[tool\.repository\]\n(?:#.*\n)*url = "([^"]+)"', flags=re.MULTILINE)
HOW = "python scripts/repository_url.py --set URL"


def main() -> None:
    """Set the URL, or say whether a release may name it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", metavar="URL", help="such as https://github.com/owner/name")
    arguments = parser.parse_args()
    repository = Repository.read(Path.cwd())
    if arguments.set:
        write_url(repository, arguments.set.rstrip("/"))
        print(f"{len(repository.packages)} packages name {arguments.set.rstrip('/')}: commit it")
        return
    reasons = [*url_refusals(repository)]
    print(*(reasons or [f"{url_of(repository)} is where this clone comes from"]), sep="\n")
    sys.exit(2 if reasons else 0)


def url_of(repository: Repository) -> str:
    """Return the setting; ValueError if there is none."""
    if not (found := SETTING.search((repository.root / "pyproject.toml").read_text(encoding="utf-8"))):
        raise ValueError('the root pyproject.toml has no [tool.repository] with url = "..."')
    return found[1]


def write_url(repository: Repository, url: str) -> None:
    """Write another URL into the setting and into the `pyproject.toml` of every package."""
    before = url_of(repository)
    for file in [
        repository.root / "pyproject.toml",
        *(each.root / "pyproject.toml" for each in repository.packages.values()),
    ]:
        file.write_text(file.read_text(encoding="utf-8").replace(before, url), encoding="utf-8")


def differing(repository: Repository) -> Iterator[str]:
    """Find URLs of packages that do not begin with the setting."""
    url = url_of(repository)
    for name, package in repository.packages.items():
        file = package.root / "pyproject.toml"
        hook = package.pyproject.get("tool", {}).get("hatch", {}).get("metadata", {}).get("hooks", {})
        links = [each["replacement"] for each in hook.get("fancy-pypi-readme", {}).get("substitutions", [])]
        named = [*package.pyproject["project"].get("urls", {}).values(), *(link.removeprefix("](") for link in links)]
        for other in (each for each in named if each != url and not each.startswith(f"{url}/")):
            yield f"{file}:1: {name} names {other}, and the repository is {url}: {HOW} writes it everywhere"


def url_refusals(repository: Repository) -> Iterator[str]:
    """Yield the reasons why nothing may be uploaded that names this URL."""
    yield from differing(repository)
    url, here = url_of(repository), published_at(repository)
    if url.partition("//")[2].partition("/")[0].endswith(".invalid"):
        yield f"the repository's URL is not set (it is {url}): {HOW}{f', which seems to be {here}' if here else ''}"
    elif here is None:
        yield f"the URL is {url}, and no remote `origin` nor GITHUB_REPOSITORY says that this clone comes from there"
    elif here != url:
        yield f"the URL is {url}, and this clone comes from {here}: correct one of them ({HOW})"


def published_at(repository: Repository) -> str | None:
    """Return where this clone comes from: what GITHUB_REPOSITORY says, or else the remote `origin`; None if neither."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{name}"
    try:
        remote = repository.git("config", "--get", "remote.origin.url").strip()
    except subprocess.CalledProcessError:
        return None
    return web_address(remote)


def web_address(remote: str) -> str:
    """Return a remote as its page on the web: `git@host:owner/name.git` is `https://host/owner/name`."""
    remote = remote.removesuffix("/").removesuffix(".git")
    if ssh := re.fullmatch(r"(?:ssh://)?[\w.-]+@([\w.-]+)(?::\d+(?=/))?[:/](.+)", remote):
        return f"https://{ssh[1]}/{ssh[2]}"
    return re.sub(r"^(https?://)[^/@]*@", r"\1", remote)


if __name__ == "__main__":
    main()
