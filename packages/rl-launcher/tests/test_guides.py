"""The guides in docs/ run as they stand: their files are written, and their commands end as the text says."""

import importlib
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^ *```(\w+)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ENDS = {"diagnose": {0, 1}, "replay": {0, 1}}
"""Exit codes of commands that may find something, or lack what they would need, by name; all others end with 0."""


def blocks_of(guide):
    """What each block is written in, and its lines without the indentation of a list."""
    for kind, text in BLOCK.findall((DOCS / guide).read_text()):
        lines = text.splitlines()
        indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
        yield kind, [line[indent:] for line in lines]


def run(line, monkeypatch):
    """Carry one command out in this process; return its exit code."""
    program, *arguments = shlex.split(line)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
        else:
            importlib.import_module(f"{program.replace('-', '_')}.cli").main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("guide", ["own-data-and-reward.md", pytest.param("debugging.md", marks=pytest.mark.slow)])
def test_a_guide_runs_as_it_stands(guide, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    commands = []
    for kind, lines in blocks_of(guide):
        if kind in {"python", "yaml"}:
            name = re.fullmatch(r"# (\w+\.(?:py|yaml))", lines[0])[1]
            (tmp_path / name).write_text("\n".join(lines) + "\n")
            continue
        for line in filter(None, lines):
            code = run(line, monkeypatch)
            output = capsys.readouterr()
            assert code in ENDS.get(line.split()[1], {0}), f"{line}\n{output.out}\n{output.err}"
            commands.append(line)
    assert len(commands) >= 6
