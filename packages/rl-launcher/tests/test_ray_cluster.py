"""A cluster that a run starts: a slow start is tried again, and folders of killed runs are removed."""

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest

from rl_launcher.ray import cluster
from rl_launcher.ray.cluster import ClusterError, RayRuntime, remove_abandoned_folders
from rl_launcher.ray.placement import EnginePlace, Placement, RankPlace
from rl_launcher.schema import ClusterConfig

SLOW = "The current node timed out during startup. This could happen because some of the raylet failed to startup"
OWN_A_FOLDER = """
import sys
from rl_launcher.ray import cluster
cluster.tempfile.gettempdir = lambda: sys.argv[1]
cluster.os.access = lambda *_: False
folder = cluster._TemporaryFolder()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def ray(monkeypatch, tmp_path):
    """A module in Ray's place whose `init` raises what is in `errors`, one a call."""
    module = ModuleType("ray")
    module.errors, module.folders, module.num_shutdowns = [], [], 0
    module.is_initialized = lambda: False
    module._private = SimpleNamespace(worker=SimpleNamespace(_worker_logs_enabled=True))

    def init(*_, _temp_dir=None, **__):
        module.folders.append(_temp_dir)
        if module.errors:
            raise module.errors.pop(0)

    def shutdown():
        module.num_shutdowns += 1

    module.init, module.shutdown = init, shutdown
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setattr(cluster.os, "access", lambda *_: False)
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(tmp_path))
    return module


@pytest.fixture
def runtime(tmp_path):
    placement = Placement(
        num_slots=(1,),
        device="cpu",
        colocated=True,
        ranks=(RankPlace(rank=0, node=0, slot=0),),
        engines=(EnginePlace(engine=0, slots=((0, 0),)),),
    )
    runtime = RayRuntime(ClusterConfig(runtime="ray"), placement, run_dir=tmp_path)
    yield runtime
    runtime._folder.remove()


def folders_in(path):
    return sorted(str(folder) for folder in path.glob("rl-ray-*"))


def test_a_start_that_was_too_slow_for_ray_is_tried_again_in_a_fresh_folder(ray, runtime, tmp_path):
    ray.errors = [Exception(SLOW), Exception(SLOW)]
    runtime._connect(until=float("inf"))
    assert len(set(ray.folders)) == 3
    assert ray.num_shutdowns == 2
    assert folders_in(tmp_path) == [ray.folders[-1]]
    assert not ray._private.worker._worker_logs_enabled


def test_a_cluster_that_never_starts_is_a_refusal_and_leaves_nothing(ray, runtime, tmp_path, monkeypatch):
    ray.errors = [Exception(SLOW)] * 9
    now = iter([0.0, 30.0, 60.0, 90.0, 120.0, 150.0])  # each attempt took Ray's 30 seconds
    monkeypatch.setattr(cluster.time, "monotonic", lambda: next(now))
    with pytest.raises(
        ClusterError, match=r"could not be started here: The current node .* \(attempt 5; no other begins"
    ):
        runtime._connect(until=100.0)
    assert len(ray.folders) == 5, "as many as begin within start_timeout_s, and not three"
    assert folders_in(tmp_path) == []


def test_a_cluster_whose_import_was_interrupted_is_closed_without_importing_it_again(runtime, monkeypatch):
    broken = ModuleType("ray")  # as Python leaves it: is_initialized and all else are missing
    monkeypatch.setitem(sys.modules, "ray", broken)
    runtime.close()
    runtime._folder = SimpleNamespace(remove=lambda: None)


def test_no_attempt_begins_after_the_start_timeout_and_other_errors_are_not_tried_again(ray, runtime):
    ray.errors = [Exception(SLOW)]
    with pytest.raises(ClusterError, match=r"attempt 1; no other begins after cluster\.start_timeout_s=600"):
        runtime._connect(until=0.0)
    ray.errors = [ValueError("no such option")]
    with pytest.raises(ClusterError, match="no such option"):
        runtime._connect(until=float("inf"))
    assert len(ray.folders) == 2


def test_the_folder_of_a_killed_run_is_removed_by_the_next_and_that_of_a_living_one_stays(tmp_path):
    command = [sys.executable, "-c", OWN_A_FOLDER, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as living:
        gone, stays = killed.stdout.readline().strip(), living.stdout.readline().strip()
        nobodys = tmp_path / "rl-ray-of-a-test"
        nobodys.mkdir()
        assert set(folders_in(tmp_path)) == {gone, stays, str(nobodys)}
        killed.kill()
        killed.wait()
        remove_abandoned_folders(tmp_path)
        assert set(folders_in(tmp_path)) == {stays, str(nobodys)}
        living.kill()
