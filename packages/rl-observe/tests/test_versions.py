"""What a run says it was made with."""

import importlib.metadata
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rl_observe import collect_versions


def git(folder, *arguments):
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org", "-c", "commit.gpgsign=false"]
    answer = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return answer.stdout.strip()


def test_versions_are_those_that_are_installed_and_none_for_what_is_not(tmp_path):
    versions = collect_versions(tmp_path)
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == importlib.metadata.version("torch")
    assert all(versions[name] is None or versions[name] == importlib.metadata.version(name) for name in ("rl-refit",))
    moment = datetime.fromisoformat(str(versions["collected_at"]))
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 3600


def test_nothing_is_collected_but_what_is_listed(tmp_path):
    versions = collect_versions(tmp_path)
    ours = {
        f"rl-{name}"
        for name in ("launcher", "observe", "algorithms", "generation", "backends", "refit", "parallel-plans")
    }
    theirs = {"python", "torch", "transformers", "tokenizers", "megatron-core", "vllm", "ray", "packages"}
    machine = {"platform", "cpu", "cpu_count", "memory_bytes", "gpus", "gpu_driver"}
    code = {"git_commit", "git_dirty", "git_diff_stat"}
    assert set(versions) == {"collected_at"} | theirs | ours | machine | code
    assert json.loads(json.dumps(versions)) == versions


def test_the_commit_is_named_and_a_changed_file_makes_it_dirty(tmp_path, monkeypatch):
    monkeypatch.setattr("rl_observe.provenance._GIT_TIMEOUT_S", 60.0)  # a busy machine keeps no 2 s
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-qm", "first")
    clean = collect_versions(tmp_path)
    assert (clean["git_commit"], clean["git_dirty"]) == (git(tmp_path, "rev-parse", "HEAD"), False)
    (tmp_path / "file").write_text("two")
    dirty = collect_versions(tmp_path)
    assert dirty["git_dirty"] is True
    assert "1 insertion(+), 1 deletion(-)" in dirty["git_diff_stat"]
    assert clean["git_diff_stat"] is None


def test_outside_a_repository_the_commit_is_unknown(tmp_path):
    versions = collect_versions(tmp_path)
    assert versions["git_commit"] is None
    assert versions["git_dirty"] is None


def test_the_machine_and_every_package_are_named(tmp_path):
    versions = collect_versions(tmp_path)
    assert versions["packages"]["torch"] == importlib.metadata.version("torch")
    assert list(versions["packages"]) == sorted(versions["packages"])
    assert isinstance(versions["gpus"], list)
    assert (versions["gpu_driver"] is None) == (versions["gpus"] == [])


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has /proc")
def test_the_memory_of_the_machine_is_known_on_linux(tmp_path):
    assert collect_versions(tmp_path)["memory_bytes"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
