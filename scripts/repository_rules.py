"""The rules of this repository that no linter knows: words, changelog fragments, and nothing tied to one machine.

    python scripts/repository_rules.py

Prints every violation as `path:line: what, and what to do`, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from repository import Repository
from repository_url import differing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The words table of CONTRIBUTING.md: what a name that we define must not contain, and the word to use instead.
SYNONYMS = {
    r"log_?probs?": "logp",
    r"old_logp": "logp_old",
    r"ref_logp": "logp_ref",
    r"lps?": "logp",
    r"(actor|policy)_model": "policy",
    r"ref(erence)?_(model|policy)": "reference",
    r"teacher_model": "teacher",
    r"(inference|llm)_engine": "engine",
    r"trajector(y|ies)": "rollout",
    r"experiences?": "rollout",
    r"happenings?": "event",
    r"(global|train|update)_step": "step",
    r"(sync|update|push|broadcast)_weights": "refit",
    r"sharding_spec": "plan",
    r"mesh_dim": "mesh axis",
}
# Names that other projects chose and users of this one know.
KEPT = {"get_logprobs_from_vocab_parallel_logits", "logprobs", "mesh_dim_names", "top_logprobs"}
# Operators of a version that end below some later release.
UPPER = ("<", "<=", "==", "===", "~=")
# The sections of a changelog, as in the root pyproject.toml.
KINDS = ("added", "changed", "deprecated", "removed", "fixed")

# Written so that this file does not find itself.
MACHINE_PATH = re.compile(r"(?<![\w.~])/(?:work|tmp|opt|root)/")
HOME = re.compile(r"(?<![\w.~])/(?:home|Users)/")
REGISTRY_HOST = re.compile(r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org)\b")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cfg", ".json", ".jsonl", ".sh", ""}


def main() -> None:
    """Check the repository in the current directory."""
    repository = Repository.read(Path.cwd())
    complaints = [
        *(complaint for path in code_files(repository) for complaint in check_code(path, path.read_text())),
        *(complaint for path in text_files(repository) for complaint in check_text(path, path.read_text())),
        *check_fragments(repository),
        *check_licences(repository),
        *differing(repository),
        *check_workflows(repository),
        *check_upper_bounds(repository),
    ]
    for complaint in complaints:
        print(complaint.replace(f"{repository.root}/", ""))
    if complaints:
        sys.exit(f"{len(complaints)} violations of the repository's rules")


def code_files(repository: Repository) -> list[Path]:
    """Return the sources of the packages, and the scripts that check them."""
    shipped = (
        path for package in repository.packages.values() for path in sorted((package.root / "src").rglob("*.py"))
    )
    return [*shipped, repository.root / "noxfile.py", *sorted((repository.root / "scripts").glob("*.py"))]


def text_files(repository: Repository) -> list[Path]:
    """Return every text file that git tracks or would track."""
    listed = repository.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = (repository.root / name for name in sorted(listed) if Path(name).suffix in TEXT_SUFFIXES)
    return [path for path in files if path.is_file()]


def check_code(path: Path, source: str) -> Iterator[str]:
    """Find names in one file that use another word than this repository does."""
    for node in ast.walk(ast.parse(source)):
        for name in defined_names(node):
            for synonym, word in SYNONYMS.items():
                if name not in KEPT and re.search(rf"(?:^|_){synonym}(?:_|$)", name, flags=re.IGNORECASE):
                    yield f"{path}:{getattr(node, 'lineno', 1)}: {name}: the word in this repository is {word!r}"


def defined_names(node: ast.AST) -> list[str]:
    """Return the names that one node of a syntax tree defines. Names that it only uses may come from other projects."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.arg():
            return [node.arg]
        case ast.Name(ctx=ast.Store()):
            return [node.id]
        case ast.Attribute(ctx=ast.Store()):
            return [node.attr]
    return []


def check_text(path: Path, text: str) -> Iterator[str]:
    """Find paths and package registries that exist only on one machine."""
    is_test = "tests" in path.parts  # tests may use an invented home directory
    for number, line in enumerate(text.splitlines(), start=1):
        if found := MACHINE_PATH.search(line) or (not is_test and HOME.search(line)):
            yield f"{path}:{number}: {found[0]!r} is a path of one machine: use a relative one, or tmp_path in a test"
        if found := REGISTRY_HOST.search(line):
            yield f"{path}:{number}: {found[0]!r}: which registry to use is a matter of pip's configuration"


def check_fragments(repository: Repository) -> Iterator[str]:
    """Find packages that changed since their release without a changelog fragment, and fragments of unknown kinds."""
    for name, package in repository.packages.items():
        for path in {*package.fragments()} - {*package.fragments(*KINDS)}:
            yield f"{path}:1: the kind of a fragment must be one of {', '.join(KINDS)}, as in +bucket-bytes.added.md"
        for released in repository.releases(name)[:1]:
            since = repository.commit_of(name, released)
            changed = repository.git("diff", "--name-only", since, "--", f"packages/{name}/src").split()
            log = repository.git("diff", "--name-only", since, "--", f"packages/{name}/CHANGELOG.md").split()
            if changed and not log and not package.fragments():
                example = f"packages/{name}/changelog.d/+what-changed.added.md"
                yield f"{changed[0]}:1: {name} changed since {released}: describe the change for its users in {example}"


def check_licences(repository: Repository) -> Iterator[str]:
    """Find packages whose licence text is not that of the repository: each ships its own copy."""
    text = (repository.root / "LICENSE").read_bytes()
    for name, package in repository.packages.items():
        copy = package.root / "LICENSE"
        if not copy.is_file() or copy.read_bytes() != text:
            yield f"{copy}:1: {name} must ship the licence text: cp LICENSE packages/{name}/LICENSE"


def check_upper_bounds(repository: Repository) -> Iterator[str]:
    """Find upper bounds on third parties of which no probe is recorded, and records whose bound is gone."""
    file = repository.root / "pyproject.toml"
    tools = tomllib.loads(file.read_text(encoding="utf-8"))
    probes: dict[str, str] = tools.get("tool", {}).get("upper-bounds", {})
    bounded = set()
    described = [(each.root / "pyproject.toml", each.pyproject) for each in repository.packages.values()]
    for place, pyproject in [(file, tools), *described]:
        for line in requirements_of(pyproject):
            asked = Requirement(line)
            if asked.name in repository.packages or not any(each.operator in UPPER for each in asked.specifier):
                continue
            bounded.add(asked.name)
            if not re.search(r"\d+\.\d+", probes.get(asked.name, "")):
                where = "[tool.upper-bounds] of the root pyproject.toml"
                yield f"{place}:1: {line} is bounded without a probe: remove the bound, or say in {where} what broke"
    for name in sorted(probes.keys() - bounded):
        yield f"{file}:1: [tool.upper-bounds] has {name}, which nothing bounds any more: remove it"


def requirements_of(pyproject: Mapping[str, Any]) -> list[str]:
    """Return every requirement of a `pyproject.toml`: dependencies, extras, groups and what builds it."""
    project, groups = pyproject.get("project", {}), pyproject.get("dependency-groups", {})
    extras = project.get("optional-dependencies", {}).values()
    listed = [project.get("dependencies", []), *extras, *groups.values()]
    listed.append(pyproject.get("build-system", {}).get("requires", []))
    return [line for lines in listed for line in lines if isinstance(line, str)]


def check_workflows(repository: Repository) -> Iterator[str]:
    """Find what a workflow runs by a name that can come to mean something else: actions by tag, packages unhashed."""
    for path in sorted((repository.root / ".github/workflows").glob("*.yml")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            action = re.search(r"\buses: *(\S+)", line)
            if action and not re.search(r"@[0-9a-f]{40}$", action[1]):
                yield f"{path}:{number}: {action[1]} is not pinned: its commit after @, the version as a comment"
            if re.search(r"\bpip install\b", line) and "--require-hashes" not in line:
                yield f"{path}:{number}: this takes whatever is newest: pip install --require-hashes -r .github/nox.txt"


if __name__ == "__main__":
    main()
