"""Tests of code_blocks.py: marks, what needs none, and what is refused."""

import pytest

from code_blocks import REASONS, Mark, blocks_of, check_blocks, documents, is_program, left_out
from repository import Repository


@pytest.fixture
def page(root):
    return root / "packages/wall/README.md"


def complaints(root, page):
    return [complaint.replace(f"{root}/", "") for complaint in check_blocks(Repository.read(root), page)]


def test_a_block_without_a_mark_is_run_and_one_in_text_is_what_it_prints(root, page):
    page.write_text("# wall\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n- so:\n\n  ```sh\n  wall up\n  ```\n")
    program, text, command = blocks_of(page)
    assert (program.line, program.is_run_here, program.shown) == (3, True, "1\n")
    assert not text.is_code
    assert command.commands == [["wall", "up"]]
    assert complaints(root, page) == []


def test_a_mark_on_the_line_above_says_how_and_a_mark_of_the_page_holds_below_it(page):
    page.write_text(
        "# wall\n\n```sh\na\n```\n\n<!-- blocks: nightly -->\n\n```sh\nb\n```\n\n"
        "<!-- block: given x.py, ranks 2, exits 0 or 1 -->\n```sh\nc\n```\n"
    )
    assert [block.mark for block in blocks_of(page)] == [
        Mark(),
        Mark(nightly=True),
        Mark(given="x.py", ranks=2, exits=(0, 1)),
    ]


@pytest.mark.parametrize("mark", ["not run: too tired", "not run", "sometimes", "ranks two"])
def test_a_mark_that_says_no_known_reason_is_refused_with_its_place(root, page, mark):
    page.write_text(f"# wall\n\n<!-- block: {mark} -->\n```sh\nwall up\n```\n")
    (complaint,) = complaints(root, page)
    assert complaint.startswith("packages/wall/README.md:4: ")


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("```js\nf()\n```", "a block in 'js' is tested by nothing"),
        ("```text\nimport wall\nwall.up()\n```", "fence it with ```python"),
        ("```python\nwall(\n```", "this is no Python"),
        (
            "<!-- block: given nothing.py -->\n```python\nup()\n```",
            "there is no tests-integration/documents/nothing.py",
        ),
        ("<!-- block: run by tests/test_no.py::test_it -->\n```sh\nup\n```", "there is no such file"),
        ("<!-- block: run by packages/wall/test_it.py::test_other -->\n```sh\nup\n```", "has no such function"),
        ("<!-- block: run by packages/wall/test_it.py::test_it -->\n```sh\nup\n```", "reads no README.md"),
    ],
)
def test_what_no_test_runs_is_refused(root, page, block, said):
    (root / "packages/wall/test_it.py").write_text("def test_it(): ...\n")
    page.write_text(f"# wall\n\n{block}\n")
    assert [each for each in complaints(root, page) if said in each]


def test_commands_lose_their_comments_and_go_on_over_lines(page):
    page.write_text("```sh\n# first\nA=1 wall up \\\n  --high   # so\nwall 'in two\n lines' && wall down &\n```\n")
    (block,) = blocks_of(page)
    assert block.commands == [["A=1", "wall", "up", "--high"], ["wall", "in two\n lines"], ["wall", "down"]]


def test_figures_and_output_are_no_programs():
    assert is_program("x = f()\n")
    assert is_program("with f() as x:\n    ...\n")
    assert not is_program("step 1: loss 4.177\n")
    assert not is_program("{'torch.bfloat16'}\n")


def test_what_is_left_out_is_listed_by_reason_with_its_places(root, git, page):
    reason = next(iter(REASONS))
    page.write_text(f"# wall\n\n<!-- block: not run: {reason}: of this kind -->\n```sh\nwall up\n```\n")
    git("add", ".")
    (line,) = left_out([block for each in documents(Repository.read(root)) for block in blocks_of(each)])
    assert reason in line
    assert line.endswith("packages/wall/README.md:4")
