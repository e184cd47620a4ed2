"""The rules of the repository that no linter knows: sizes, words, changelog fragments, and nothing tied to one machine.

    python scripts/repository_rules.py

Prints every violation as `path:line: what, and what to do`, and exits 1 if there is one.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from repository import Repository

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# One word, one meaning (the glossary of CONTRIBUTING.md): what a name must not contain, and the word that stands there.
SYNONYMS = {
    r"log_?probs?": "logp",
    r"old_logp": "logp_old",
    r"ref_logp": "logp_ref",
    r"ref(erence)?_(model|policy)": "reference",
    r"(inference|llm)_engine": "engine",
    r"trajector(y|ies)": "rollout",
    r"(sync|update|push|broadcast)_weights": "refit",
    r"mesh_dim": "mesh axis",
}
# Names that others chose and build on.
KEPT = {"get_logprobs_from_vocab_parallel_logits", "mesh_dim_names"}
# The headings of a changelog, as the root pyproject.toml gives them to towncrier.
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
    ]
    for complaint in complaints:
        print(complaint.replace(f"{repository.root}/", ""))
    if complaints:
        sys.exit(f"{len(complaints)} times a rule of the repository is broken")


def code_files(repository: Repository) -> list[Path]:
    """What we ship, and what checks it; tests may be as long as they need."""
    shipped = (path for package in repository.packages.values() for path in sorted((package.root / "src").rglob("*.py")))
    return [*shipped, repository.root / "noxfile.py", *sorted((repository.root / "scripts").glob("*.py"))]


def text_files(repository: Repository) -> list[Path]:
    """Every file that git tracks, or would, and a person reads."""
    listed = repository.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    files = (repository.root / name for name in sorted(listed) if Path(name).suffix in TEXT_SUFFIXES)
    return [path for path in files if path.is_file()]


def check_code(path: Path, source: str) -> Iterator[str]:
    """Sizes and words of one file."""
    num_lines = source.count("\n")
    if num_lines > MAX_FILE_LINES:
        yield f"{path}:1: {num_lines} lines, limit {MAX_FILE_LINES}: a file has one concern, split off the other"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name}: {length} lines, limit {MAX_FUNCTION_LINES}: name its parts"
        for name in defined_names(node):
            for synonym, word in SYNONYMS.items():
                if name not in KEPT and re.search(rf"(?:^|_){synonym}(?:_|$)", name, flags=re.IGNORECASE):
                    yield f"{path}:{getattr(node, 'lineno', 1)}: {name}: the word of this repository is {word!r}"


def defined_names(node: ast.AST) -> list[str]:
    """The names that one node of a syntax tree introduces; names that it merely uses may be other people's."""
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
    """Nothing that holds on one machine only."""
    fiction = "tests" in path.parts  # where a home is somebody's who does not exist
    for number, line in enumerate(text.splitlines(), start=1):
        if found := MACHINE_PATH.search(line) or (not fiction and HOME.search(line)):
            yield f"{path}:{number}: {found[0]!r} is a path of one machine: use a relative one, or tmp_path in a test"
        if found := REGISTRY_HOST.search(line):
            yield f"{path}:{number}: {found[0]!r}: where packages come from is the affair of pip's configuration"


def check_fragments(repository: Repository) -> Iterator[str]:
    """A package whose source differs from its last release says so to its users, under a heading that exists."""
    for name, package in repository.packages.items():
        for path in {*package.fragments()} - {*package.fragments(*KINDS)}:
            yield f"{path}:1: the kind of a fragment is one of {', '.join(KINDS)}, as in +bucket-bytes.added.md"
        for released in repository.releases(name)[:1]:
            changed = repository.git("diff", "--name-only", f"{name}/v{released}", "--", f"packages/{name}/src").split()
            log = repository.git("diff", "--name-only", f"{name}/v{released}", "--", f"packages/{name}/CHANGELOG.md").split()
            if changed and not log and not package.fragments():
                example = f"packages/{name}/changelog.d/+what-changed.added.md"
                yield f"{changed[0]}:1: {name} changed since {released}: tell its users in {example}"


if __name__ == "__main__":
    main()
