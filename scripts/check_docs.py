"""Check what can be checked of the documents without running them: links, anchors, tables, marks of code blocks.

    python scripts/check_docs.py            every complaint, a line each
    python scripts/check_docs.py --write    first make the root README's table of tested versions again
    python scripts/check_docs.py --blocks   list the code blocks that no test runs, with their places and reasons

A link is any relative `[text](path#anchor)` outside code; anchors are made from headings as on GitHub. Links to the web
are not followed. A README's table under the heading "Public names" (or "Names") must mention all of `__all__`, and what
its first column lists must exist: a name, a module, or `module.name`. The root README's table of tested versions,
between its two comments, is made from the cells of the matrix that ran; those that never did are listed under it. Each
code block is run by a test, or marked with the reason why it cannot run here: see `scripts/code_blocks.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from packaging.version import Version

from code_blocks import blocks_of, check_blocks, documents, left_out
from repository import Repository, cell_id
from repository_rules import text_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from repository import Package

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", flags=re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", flags=re.MULTILINE)
PUBLIC_NAMES = re.compile(r"^#+ (?:public )?names$(.*?)(?=^#+ |\Z)", flags=re.I | re.M | re.S)  # noqa: FURB167

MATRIX = re.compile(r"(<!-- matrix -->\n)(.*?)(<!-- /matrix -->)", flags=re.DOTALL)

COLUMNS = ("python", "torch", "transformers", "resolution")
"""What the table of tested versions shows by itself; all else that a cell names is in its last column."""
OTHER_NAMES = {"vllm": "vLLM", "ray": "Ray"}


def main() -> None:
    """Check every Markdown file of the repository in the current directory."""
    repository = Repository.read(Path.cwd())
    if "--write" in sys.argv[1:]:
        write_matrix(repository)
    pages = [path for path in text_files(repository) if path.suffix == ".md"]
    complaints = [
        *(complaint for page in pages for complaint in check_links(page)),
        *(complaint for package in repository.packages.values() for complaint in check_public_names(package)),
        *check_matrix(repository),
        *(complaint for page in documents(repository) for complaint in check_blocks(repository, page)),
    ]
    for complaint in complaints:
        print(complaint.replace(f"{repository.root}/", ""))
    if complaints:
        sys.exit(f"{len(complaints)} errors in documents")
    print(f"{len(pages)} pages: every link leads somewhere, every public name is in its table")
    blocks = [block for page in documents(repository) for block in blocks_of(page) if block.is_code]
    unrun = [block for block in blocks if block.mark.not_run]
    print(f"{len(blocks)} code blocks: tests run {len(blocks) - len(unrun)}, and {len(unrun)} say why none can")
    if "--blocks" in sys.argv[1:]:
        print("\n".join(left_out(unrun)).replace(f"{repository.root}/", ""))


def check_links(page: Path) -> Iterator[str]:
    """Find the relative links of one page that lead nowhere, and placeholders that were never replaced."""
    for placeholder in re.findall(r"^[A-Z]+(?:_[A-Z]+)*$", FENCE.sub("", page.read_text()), flags=re.MULTILINE):
        yield f"{page}:1: {placeholder} looks like a placeholder that was never filled in"
    for target in LINK.findall(CODE_SPAN.sub("", FENCE.sub("", page.read_text()))):
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            yield f"{page}:1: the link {target!r} leads to no file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text()):
            yield f"{page}:1: the link {target!r} leads to no heading of {file.name}"


def anchors(markdown: str) -> set[str]:
    """Return the anchors of a page: its headings as GitHub spells them; the second of the same name is `name-1`."""
    seen: dict[str, int] = {}
    found = set()
    for heading in HEADING.findall(FENCE.sub("", markdown)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if slug in seen else slug)
        seen[slug] = seen.get(slug, 0) + 1
    return found


def check_public_names(package: Package) -> Iterator[str]:
    """Find differences between the README's table and the package's exports."""
    readme = package.root / "README.md"
    if not readme.is_file():
        yield f"{package.root}/README.md:1: {package.name} has no README"
        return
    listed, mentioned = table_names(readme.read_text())
    source = package.root / "src" / package.import_name
    exported = top_level(source / "__init__.py").exported
    if exported and not listed:
        yield f"{readme}:1: no table under the heading 'Public names', but {len(exported)} names are exported"
        return
    for name in sorted(exported - mentioned):
        yield f"{readme}:1: the table of public names lacks {name}"
    for name in sorted(listed - exported):
        if not exists(source, name.removeprefix(f"{package.import_name}.").split(".")):
            yield f"{readme}:1: the table of public names has {name}, which {package.import_name} does not"


def check_matrix(repository: Repository) -> Iterator[str]:
    """Find out whether the root README's table of tested versions differs from the matrix."""
    readme = repository.root / "README.md"
    match MATRIX.search(readme.read_text()):
        case None:
            yield f"{readme}:1: no table of tested versions between '<!-- matrix -->' and '<!-- /matrix -->'"
        case found if found[2] != (made := matrix_table(repository)):
            differing = "; ".join(sorted({*found[2].splitlines()} ^ {*made.splitlines()}))
            again = "make the table again with python scripts/check_docs.py --write"
            yield f"{readme}:1: the tested versions and the matrix differ: {again}. Differing lines: {differing}"


def write_matrix(repository: Repository) -> None:
    """Make the root README's table of tested versions again."""
    readme = repository.root / "README.md"
    made = matrix_table(repository)
    readme.write_text(MATRIX.sub(lambda found: f"{found[1]}{made}{found[3]}", readme.read_text()))


def matrix_table(repository: Repository) -> str:
    """Return the versions of the cells that ran, a row for each package, and the cells that never ran."""
    lines = ["| package | Python | torch | transformers | others |", "|---|---|---|---|---|"]
    missing = []
    for package in repository.packages.values():
        ran = [cell for cell in package.cells if cell not in package.never_run]
        columns = [_versions(ran, name) for name in ("python", "torch", "transformers")]
        names = [name for name in dict.fromkeys(name for cell in ran for name in cell) if name not in {*COLUMNS}]
        others = [f"{OTHER_NAMES.get(name, name)} {_versions(ran, name)}" for name in names]
        others += ["all that it needs at its floor"] * any("resolution" in cell for cell in ran)
        lines.append(f"| {' | '.join([package.name, *columns, '; '.join(others) or '–'])} |")
        if package.never_run:
            missing.append(f"- {package.name}: {', '.join(f'`{cell_id(cell)}`' for cell in package.never_run)}")
    heading = ["", "Cells that **never ran**, or not to their end:", ""] if missing else []
    return "\n".join([*lines, *heading, *missing, ""])


def _versions(cells: list[dict[str, str]], name: str) -> str:
    found = {cell[name] for cell in cells if name in cell}
    return ", ".join(sorted(found, key=Version)) or "–"


def table_names(markdown: str) -> tuple[set[str], set[str]]:
    """Return the code in the first column of the table "Public names", and in all of it; calls without arguments."""
    section = PUBLIC_NAMES.search(markdown)
    rows = [line for line in section[1].splitlines() if line.startswith("|")] if section else []
    return code_names(row.split("|")[1] for row in rows), code_names(rows)


def code_names(texts: Iterable[str]) -> set[str]:
    """The names with which the code spans in `texts` begin."""
    return {re.split(r"[\s(=:\[]", span.strip("`"))[0] for text in texts for span in CODE_SPAN.findall(text)}


def exists(source: Path, parts: list[str]) -> bool:
    """Return whether the package in the folder `source` has `module`, `module.name` or `name`."""
    first, *rest = parts
    if (source / first).is_dir():
        return not rest or exists(source / first, rest)
    if (source / f"{first}.py").is_file():
        return not rest or rest[0] in top_level(source / f"{first}.py").defined
    return not rest and first in top_level(source / "__init__.py").defined


class Names(NamedTuple):
    """The names of a module."""

    defined: set[str]
    """Names that it defines or imports at its top."""
    exported: set[str]
    """Its `__all__`, if that is a literal."""


def top_level(file: Path) -> Names:
    """Return the names of one module, read without importing it."""
    names = Names(set(), set())
    for node in ast.parse(file.read_text()).body if file.is_file() else []:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.defined.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names.defined.update(alias.asname or alias.name for alias in node.names)
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                names.exported.update(ast.literal_eval(value))
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.defined.add(name)
    return names


if __name__ == "__main__":
    main()
