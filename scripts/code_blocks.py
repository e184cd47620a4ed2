"""The code blocks of the documents, and the marks that say how each is tested.

A block in a language (python, sh, yaml, toml) is code, and `scripts/run_code_blocks.py` runs it as it is written. A
mark on the line above it, an HTML comment that no reader sees, says otherwise:

    <!-- block: given grpo_loop.py -->       after tests-integration/documents/grpo_loop.py, with its names
    <!-- block: given pipeline.py, ranks 2 -->   the same on two ranks, under torchrun
    <!-- block: nightly -->                  takes long: run with the tests that are marked slow
    <!-- block: exits 0 or 1 -->             each command of the block ends with one of these codes, not only with 0
    <!-- block: run by packages/rl-refit/tests/test_x.py::test_y -->    a test of its own runs it
    <!-- block: not run: needs a GPU -->     it cannot run here, for one of `REASONS`; more after a second colon

`<!-- blocks: ... -->` is the mark of every block below it that has none. A block without a language or in `text` is
what a program prints, or a figure; text that is a Python program is refused.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from repository import Repository

CODE = ("python", "sh", "bash", "yaml", "toml")
OUTPUT = ("", "text")
REASONS = {
    "needs a GPU": "no machine of the checks has one",
    "needs a cluster": "several machines, Ray, SLURM or Kubernetes",
    "needs the Internet": "downloads a model or a data set, or clones a repository",
    "needs vLLM": "on a CPU vLLM is in an environment of its own, where tests of its sink and engines run",
    "needs another project": "commands or files of another project, which is not installed here",
    "needs an extra": "a package that only a session of its own installs",
    "publishes": "changes what others see",
    "trains for long": "as it stands it trains a model of yours for hours",
}
"""Why a block may be left out."""

BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>```|~~~)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    flags=re.MULTILINE | re.DOTALL,
)
MARK = re.compile(r"<!-- block: ([^\n]*?) -->\s*\Z")
PAGE_MARK = re.compile(r"<!-- blocks: ([^\n]*?) -->")
GIVEN = "tests-integration/documents"


@dataclass(frozen=True, kw_only=True)
class Mark:
    """How one block is tested."""

    given: str | None = None
    ranks: int = 1
    nightly: bool = False
    exits: tuple[int, ...] = (0,)
    run_by: str | None = None
    not_run: str | None = None

    @classmethod
    def read(cls, text: str) -> Mark:
        """Read the text of a mark; ValueError if it says something else than the list above."""
        if text.startswith("not run: "):
            reason = text.removeprefix("not run: ")
            if reason.partition(":")[0] not in REASONS:
                raise ValueError(f"{reason!r} begins with none of the reasons {', '.join(REASONS)}")
            return cls(not_run=reason)
        given: str | None = None
        run_by: str | None = None
        ranks, nightly = 1, False
        exits: tuple[int, ...] = (0,)
        for word in filter(None, text.split(", ")):
            if word.startswith("exits "):
                exits = tuple(int(code) for code in word.removeprefix("exits ").split(" or "))
                continue
            match word.rsplit(" ", 1):
                case ["given", name]:
                    given = name
                case ["ranks", number]:
                    ranks = int(number)
                case ["run by", test]:
                    run_by = test
                case ["nightly"]:
                    nightly = True
                case _:
                    raise ValueError(f"{word!r} is no mark: see the top of scripts/code_blocks.py")
        return cls(given=given, ranks=ranks, exits=exits, run_by=run_by, nightly=nightly)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    """The line of the fence, from 1."""
    language: str
    text: str
    """Without the indentation of a list."""
    mark: Mark
    shown: str | None
    """The text block right below it: what it prints; a line `…` stands for lines that are left out."""

    @property
    def place(self) -> str:
        """Where it is, as `page:line`."""
        return f"{self.page}:{self.line}"

    @property
    def is_code(self) -> bool:
        """Whether it is something to run, and not what something prints."""
        return self.language in CODE

    @property
    def is_run_here(self) -> bool:
        """Whether `run_code_blocks.py` runs it."""
        return self.is_code and not (self.mark.run_by or self.mark.not_run)

    @property
    def commands(self) -> list[list[str]]:
        """The commands of a block of a shell, a list of words each, without comments."""
        text = re.sub(r"(^|\s)#[^\n]*", r"\1", self.text.replace("\\\n", " "))
        lexer = shlex.shlex(text, posix=True, punctuation_chars="&;|\n")
        lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
        commands: list[list[str]] = [[]]
        for word in lexer:
            if set(word) <= set("&;|\n"):
                commands.append([])
            else:
                commands[-1].append(word)
        return [words for words in commands if words]


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order. ValueError names the place of a mark that cannot be read."""
    text = page.read_text(encoding="utf-8")
    found = []
    matches = [*BLOCK.finditer(text)]
    for match, following in itertools.zip_longest(matches, matches[1:]):
        before = text[: match.start()]
        line = before.count("\n") + 1
        own = MARK.search(before)
        of_page = PAGE_MARK.findall(before)
        try:
            mark = Mark.read(own[1] if own else of_page[-1] if of_page else "")
        except ValueError as error:
            raise ValueError(f"{page}:{line}: {error}") from None
        indent = match["indent"]
        lines = [each.removeprefix(indent) for each in match["text"].splitlines(keepends=True)]
        language = match["language"].strip()
        prints = following and following["language"] == "text" and not text[match.end() : following.start()].strip()
        shown = following["text"] if prints else None
        found.append(Block(page=page, line=line, language=language, text="".join(lines), mark=mark, shown=shown))
    return found


def check_blocks(repository: Repository, page: Path) -> Iterator[str]:
    """Find blocks of one page of which nobody can say how they are tested, and marks that say what is not so."""
    try:
        blocks = blocks_of(page)
    except ValueError as error:
        yield str(error)
        return
    for block in blocks:
        if block.language not in (*CODE, *OUTPUT):
            yield f"{block.place}: a block in {block.language!r} is tested by nothing: use one of {', '.join(CODE)}"
        elif not block.is_code and is_program(block.text):
            yield f"{block.place}: this text is a Python program: fence it with ```python, so that it is run"
        elif block.is_code:
            yield from _check_mark(repository, block)


def _check_mark(repository: Repository, block: Block) -> Iterator[str]:
    if (name := block.mark.given) and not (repository.root / GIVEN / name).is_file():
        yield f"{block.place}: there is no {GIVEN}/{name}"
    if test := block.mark.run_by:
        path, _, function = test.partition("::")
        file = repository.root / path
        if not file.is_file():
            yield f"{block.place}: it is run by {test}, and there is no such file"
            return
        source = file.read_text(encoding="utf-8")
        defined = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}
        if function not in defined:
            yield f"{block.place}: it is run by {test}, and {path} has no such function"
        if block.page.name not in source:
            yield f"{block.place}: it is run by {test}, and {path} reads no {block.page.name}"
    if block.language == "python":
        try:
            ast.parse(block.text)
        except SyntaxError as error:
            yield f"{block.place}: this is no Python: {error}"


def is_program(text: str) -> bool:
    """Return whether a text is Python that does something: imports, defines or assigns."""
    try:
        statements = ast.parse(text).body
    except (SyntaxError, ValueError):
        return False
    return any(not isinstance(each, ast.Expr | ast.AnnAssign) for each in statements)


def documents(repository: Repository) -> list[Path]:
    """Return the pages whose blocks are tested: READMEs, references, CONTRIBUTING, and what is in docs/."""
    patterns = ("*.md", "docs/**/*.md", "examples/*.md", "packages/*/*.md", "packages/*/benchmarks/**/*.md")
    tracked = set(repository.git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"))
    found = sorted({path for pattern in patterns for path in repository.root.glob(pattern)})
    return [path for path in found if str(path.relative_to(repository.root)) in tracked and path.name != "CHANGELOG.md"]


def left_out(blocks: list[Block]) -> list[str]:
    """Return a line for each reason for which blocks are not run, with their places."""
    lines = []
    for reason, meaning in REASONS.items():
        places = [block.place for block in blocks if (block.mark.not_run or "").partition(":")[0] == reason]
        if block_list := ", ".join(places):
            lines.append(f"  {reason} ({meaning}): {len(places)}: {block_list}")
    return lines
