"""The folder of a run: what it refuses, in which words, and that a refusal leaves nothing behind."""

import errno
import os
import subprocess
import sys

import pytest

from rl_observe import RunDirectory, RunDirectoryError
from rl_observe.run_directory import describe


def test_a_new_directory_is_made_with_its_parents_and_holds_nothing(tmp_path):
    run = RunDirectory.create(tmp_path / "runs" / "today" / "first")
    assert run.path == tmp_path / "runs" / "today" / "first"
    assert list(run.path.iterdir()) == []


def test_an_empty_directory_that_exists_is_taken(tmp_path):
    assert RunDirectory.create(str(tmp_path)).path == tmp_path


def test_every_file_of_a_run_lies_inside_it_under_a_name_of_its_own(tmp_path):
    run = RunDirectory(tmp_path)
    names = ["recipe", "metrics", "tensorboard", "samples", "summary", "versions", "model", "report"]
    paths = [getattr(run, name) for name in names]
    assert all(path.parent == tmp_path for path in paths)
    assert len(set(paths)) == len(names)


def test_a_directory_that_holds_something_is_refused_by_name_and_left_as_it_was(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(
        RunDirectoryError, match=r"not empty \(it holds metrics.jsonl\); choose another run_dir=… or delete it"
    ):
        RunDirectory.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_in_the_way_is_refused_wherever_in_the_path_it_stands(tmp_path):
    (tmp_path / "note").write_text("mine")
    with pytest.raises(RunDirectoryError, match="is a file, and a run needs a directory"):
        RunDirectory.create(tmp_path / "note")
    with pytest.raises(RunDirectoryError, match="a parent of the path is a file, not a directory"):
        RunDirectory.create(tmp_path / "note" / "run")
    assert (tmp_path / "note").read_text() == "mine"


def test_a_link_to_nowhere_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunDirectoryError, match="choose another run_dir=…"):
        RunDirectory.create(tmp_path / "link")


def test_parents_that_were_made_are_gone_when_the_last_folder_cannot_be(tmp_path):
    with pytest.raises(RunDirectoryError, match="a name in the path is too long"):
        RunDirectory.create(tmp_path / "new" / "newer" / ("x" * 5000))
    assert list(tmp_path.iterdir()) == []


def test_a_parent_without_permission_is_refused_with_its_name(tmp_path):
    # The superuser may write everywhere, so the attempt is made by a process that is not.
    script = (
        "import os, sys\n"
        "from rl_observe import RunDirectory, RunDirectoryError\n"
        "os.getuid() or os.setuid(65534)\n"
        "try:\n"
        "    RunDirectory.create(sys.argv[1])\n"
        "except RunDirectoryError as error:\n"
        "    print(error)\n"
    )
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    answer = subprocess.run(
        [sys.executable, "-c", script, str(locked / "run")], capture_output=True, text=True, check=True, timeout=240
    )
    assert "cannot be written: permission denied" in answer.stdout
    assert "choose another run_dir=…" in answer.stdout
    assert list(locked.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "no space is left on the device"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EACCES, "permission denied"),
    ],
)
def test_the_reasons_of_the_operating_system_are_said_in_words(code, words):
    assert describe(OSError(code, os.strerror(code), "/runs/first")) == f"{words} (/runs/first)"


def test_a_reason_without_our_own_words_keeps_those_of_the_system():
    assert describe(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_an_earlier_run_is_found_again(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.recipe.write_text("seed: 0\n")
    assert RunDirectory.open(tmp_path / "run") == run


def test_what_is_no_run_is_not_opened(tmp_path):
    with pytest.raises(RunDirectoryError, match="does not exist"):
        RunDirectory.open(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirectoryError, match="is a file"):
        RunDirectory.open(tmp_path / "file")
    with pytest.raises(RunDirectoryError, match=r"none of recipe.yaml, metrics.jsonl, summary.json"):
        RunDirectory.open(tmp_path)
