"""Tests of repository_rules.py: each rule finds its violation, and leaves the rest alone."""

import re
from pathlib import Path

import pytest

from repository import Repository
from repository_rules import check_code, check_fragments, check_text, check_upper_bounds, check_workflows

PATH = Path("example.py")
HERE = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "source",
    [
        "def token_logprobs(x): ...",
        "old_logp = 1",
        "def f(ref_log_probs): ...",
        "class InferenceEngine: ...\ninference_engine = 1",
        "self.trajectories = []",
        "def update_weights(): ...",
        "happenings = []",
        "global_step = 1",
        "def f(teacher_model): ...",
    ],
)
def test_a_name_with_another_word_than_the_table_has_is_reported(source):
    assert len(list(check_code(PATH, source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "logp_old = output.logprobs",
        "request(prompt_logprobs=1)",
        "from there import get_logprobs_from_vocab_parallel_logits",
        "def get_logprobs_from_vocab_parallel_logits(): ...",
        "logp_ref, refit, engine = 1, 2, 3",
    ],
)
def test_names_of_other_projects_and_the_words_of_the_table_pass(source):
    assert list(check_code(PATH, source)) == []


def test_long_files_and_functions_are_not_counted():
    assert list(check_code(PATH, "def long():\n" + "    x = 1\n" * 2000)) == []


def test_paths_of_one_machine_and_registries_are_reported():
    for directory in ("home", "root", "tmp", "opt", "work"):
        assert len(list(check_text(PATH, f"open('/{directory}/file')"))) == 1
    assert list(check_text(Path("tests/test_x.py"), "setenv('HOME', '/home/ada')")) == []
    assert len(list(check_text(PATH, "--index-url https://" + "pypi" + ".org/simple"))) == 1
    assert list(check_text(PATH, "packages/home/here, https://example.org/home/page, ~/home/x, a/tmp/b")) == []


def test_a_changed_package_needs_a_fragment(root, git):
    repository = Repository.read(root)
    source = root / "packages/wall/src/wall/__init__.py"
    fragment = root / "packages/wall/changelog.d/+first.added.md"
    fragment.unlink()
    source.write_text("height = 2\n")
    assert list(check_fragments(repository)) == []  # nothing is released, so nobody has to be told
    git("tag", "wall/v0.1.0")
    assert "wall changed since 0.1.0" in next(check_fragments(repository))
    fragment.write_text("Be higher.\n")
    assert list(check_fragments(repository)) == []


def test_a_fragment_of_no_known_kind_would_be_lost(root):
    (root / "packages/wall/changelog.d/+height.feature.md").write_text("Be higher.\n")
    assert "added, changed, deprecated, removed, fixed" in next(check_fragments(Repository.read(root)))


def test_an_upper_bound_needs_a_probe_and_a_probe_a_bound(root):
    assert not list(check_upper_bounds(Repository.read(HERE)))
    pyproject, tools = root / "packages/roof/pyproject.toml", root / "pyproject.toml"
    tools.write_text(re.sub(r"^megatron-core = .*\n", "", tools.read_text(), flags=re.MULTILINE))
    assert not list(check_upper_bounds(Repository.read(root)))  # siblings are bounded by their own rule
    pyproject.write_text(pyproject.read_text().replace("pytest>=8", "pytest>=8,<10").replace("rich", "rich~=14.1"))
    complaints = list(check_upper_bounds(Repository.read(root)))
    assert ["rich~=14.1" in complaints[0], "pytest>=8,<10" in complaints[1], len(complaints)] == [True, True, 2]
    record = '[tool.upper-bounds]\nrich = "14.2: boxes are round"\npytest = "it broke"\nwood = "1.0: rots"\n'
    tools.write_text(tools.read_text().replace("[tool.upper-bounds]\n", record))
    complaints = list(check_upper_bounds(Repository.read(root)))
    assert ["pytest>=8,<10" in complaints[0], "has wood" in complaints[1], len(complaints)] == [True, True, 2]


def test_a_workflow_pins_actions_by_commit_and_packages_by_hash(root):
    assert not list(check_workflows(Repository.read(HERE)))
    folder = root / ".github/workflows"
    folder.mkdir(parents=True)
    commit = "08c6903cd8c0fde910a37f88322edcfb5dd907a8"
    pinned = f"- uses: a/b@{commit} # v5\n- run: pip install --require-hashes -r x\n"
    (folder / "ci.yml").write_text(f"- uses: a/b@v5\n{pinned}- run: pip install nox\n")
    complaints = list(check_workflows(Repository.read(root)))
    assert ["a/b@v5 is not pinned" in complaints[0], "ci.yml:4:" in complaints[1], len(complaints)] == [True, True, 2]
