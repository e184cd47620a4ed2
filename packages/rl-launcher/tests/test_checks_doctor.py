"""Claims about the doctor: it tries in other processes, within deadlines, and its verdicts follow from that."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from rl_generation.vllm.processes import remove_abandoned
from rl_launcher.checks.doctor import (
    EXTRAS,
    NEEDS,
    PACKAGES,
    Diagnosis,
    installed_versions,
    match,
    matrix,
    render,
    verdicts,
)
from rl_launcher.checks.doctor_findings import (
    Finding,
    component,
    descriptors,
    disk,
    hub_cache,
    left_behind,
    memory,
    run_probe,
    shared_memory,
    torch,
)

PATIENCE_S = 200.0
PACKAGES_FOLDER = Path(__file__).resolve().parents[2]


def finding(name, state="works", **more):
    return Finding(name=name, state=state, checked="looked", result=more.pop("result", "so it is"), **more)


def everything(**states):
    names = {name for needed in NEEDS.values() for name in needed}
    return [finding(name, states.get(name, "works")) for name in sorted(names)]


def judged(findings, versions=()):
    return {verdict.feature: verdict for verdict in verdicts(findings, dict.fromkeys(versions, "1"))}


def test_the_shipped_matrix_is_that_of_every_package():
    pyprojects = {
        path.parent.name: tomllib.loads(path.read_text()) for path in PACKAGES_FOLDER.glob("*/pyproject.toml")
    }
    if not pyprojects:
        pytest.skip("the packages' sources are not beside this test")
    written = {
        name: [cell for cell in pyproject["tool"]["matrix"]["cells"] if not cell.get("never_run")]
        for name, pyproject in pyprojects.items()
    }
    assert matrix() == written, "write it again: it is `[tool.matrix]` of every pyproject.toml, less what never ran"
    for requirement in EXTRAS.values():
        package, extra = requirement.rstrip("]").split("[")
        assert extra in pyprojects[package]["project"]["optional-dependencies"], requirement


def test_versions_are_compared_by_what_a_cell_pins():
    cells = [{"python": "3.11", "torch": "2.1"}, {"python": "3.11", "torch": "2.13", "ray": "2.60"}]
    exact = match("p", cells, {"python": "3.11.7", "torch": "2.13.0+cpu", "ray": "2.60.0"})
    assert exact.cells == ("python 3.11, torch 2.13, ray 2.60",)
    # 2.13 is not a 2.1.
    other = match("p", cells[:1], {"python": "3.11.7", "torch": "2.13.0+cpu"})
    assert other.cells == ()
    assert other.differing == ("torch 2.13.0+cpu instead of 2.1",)
    assert installed_versions()["torch"]


def test_an_optional_component_that_is_not_installed_does_not_hide_a_cell():
    cells = [{"torch": "2.13", "transformers": "5.19"}, {"torch": "2.13", "transformers": "5.23", "ray": "2.60"}]
    installed = {"torch": "2.13.0", "transformers": "5.23.0"}
    assert match("p", cells, installed).cells == ("torch 2.13, transformers 5.23",)
    assert match("p", cells, {**installed, "ray": "2.50.1"}).differing == ("ray 2.50.1 instead of 2.60",)
    assert match("p", cells, {"torch": "2.13.0"}).differing == ("transformers not installed instead of 5.19",)


@pytest.mark.parametrize("more", [{}, {"ray": "2.60.0"}, {"megatron-core": "0.16.1"}], ids=["plain", "Ray", "Megatron"])
def test_each_newest_cell_is_a_tested_one_with_and_without_its_optional_components(more):
    # The environment of `nox -s dev`: the newest transformers, and neither vLLM nor, unless added, Ray and Megatron.
    installed = {"python": "3.11.9", "torch": "2.13.0+cpu", "transformers": "5.23.0", **more}
    for package, cells in matrix().items():
        assert match(package, cells, installed).differing == (), package


def test_torch_gloo_and_tensorboard_work_here():
    works, gpus = torch(PATIENCE_S)
    assert works.state == "works", works
    assert gpus.state in {"works", "absent"}
    gloo = component("gloo", {}, timeout_s=PATIENCE_S)
    assert (gloo.state, gloo.figures) == ("works", {"processes": 2})
    assert component("TensorBoard", {}, timeout_s=PATIENCE_S).state == "works"


def test_the_machine_is_looked_at(tmp_path, monkeypatch):
    for each in (shared_memory(PATIENCE_S), memory(), disk(tmp_path), descriptors(), hub_cache()):
        assert each.state in {"works", "limited"}, each
        assert each.figures
    assert shared_memory(PATIENCE_S, str(tmp_path / "none")).state == "broken"
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    cache = hub_cache()
    assert cache.figures["path"] == str(tmp_path / "hub" / "hub")
    assert "offline" in cache.result


def is_there(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_what_hangs_is_ended_with_all_that_it_started_and_what_crashes_is_told(tmp_path, monkeypatch):
    module, child = tmp_path / "rl_launcher_probe_for_test.py", tmp_path / "child"
    module.write_text(
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])\n"
        f"open({str(child)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(1000)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    class Begun(subprocess.Popen):
        """Its time begins when it hangs: who is killed before has started nothing."""

        def wait(self, timeout=None):
            deadline = time.monotonic() + PATIENCE_S
            while not (child.exists() and child.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            return super().wait(timeout)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Begun)
        answer = run_probe("imports", "rl_launcher_probe_for_test", timeout_s=1)
    assert answer.failure.startswith("no result in 1 s")
    deadline = time.monotonic() + 60
    while is_there(child.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "No module named 'nobody_has_this'" in run_probe("imports", "nobody_has_this", timeout_s=PATIENCE_S).failure
    module.write_text("import os; os.abort()")
    assert run_probe("imports", "rl_launcher_probe_for_test", timeout_s=PATIENCE_S).failure == "killed by SIGABRT"


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_ray_is_started_and_ended(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    found = component("Ray", installed_versions(), timeout_s=PATIENCE_S)
    assert found.state == "works", found
    assert found.figures["in_another_process"] is True


def test_all_is_ready_where_all_works():
    assert all(verdict.ready for verdict in judged(everything(), PACKAGES.values()).values())


def test_what_is_missing_is_named_with_what_brings_it():
    verdict = judged(everything(vLLM="absent", Ray="absent"))
    assert verdict["vLLM engines"].reasons == ("missing vLLM: pip install 'rl-launcher[vllm]'",)
    assert verdict["several ranks on this machine"].reasons == ("missing Ray: pip install 'rl-launcher[ray]'",)
    assert verdict["LoRA"].reasons == ("missing peft: pip install 'rl-backends[lora]'",)
    assert verdict["quickstart"].ready


def test_without_a_gpu_it_is_said_once():
    found = [each for each in everything(GPU="absent") if not each.name.startswith(("NCCL", "CUDA"))]
    assert judged(found)["training on several GPUs"].reasons == ("torch sees no GPU",)
    one = [each for each in everything() if each.name != "NCCL × 2"]
    assert judged(one)["training on several GPUs"].reasons == ("there is only one GPU",)


def diagnosis(findings):
    return Diagnosis(
        versions={"python": "3.11"},
        matches=(match("rl-refit", [{"torch": "2.13"}], {"torch": "2.12"}),),
        findings=tuple(findings),
        verdicts=tuple(verdicts(findings, {})),
    )


def test_what_is_installed_and_broken_is_an_exit_code_and_what_is_absent_is_not():
    assert diagnosis(everything(vLLM="absent", GPU="absent")).exit_code == 0
    assert diagnosis(everything(vLLM="broken")).exit_code == 1
    assert diagnosis(everything(torch="absent")).exit_code == 1


def test_the_screen_says_what_was_found_what_to_do_and_what_follows():
    found = everything(vLLM="broken")
    found[0] = finding(found[0].name, "limited", hint="give it more")
    console = Console(width=100, record=True, file=Path(os.devnull).open("w"))  # noqa: SIM115
    console.print(render(diagnosis(found)))
    console.file.close()
    text = console.export_text()
    for words in ("not tested with rl-refit: torch 2.12 instead of 2.13", "give it more", "quickstart:", "ready"):
        assert words in text
    assert "vLLM does not work: so it is" in text
    assert "Installed but not working: vLLM" in text


def test_the_doctor_imports_nothing_heavy_and_prints_one_line_of_json():
    # Nothing is tried, so that only what the doctor itself imports is there.
    code = (
        "import sys\n"
        "import rl_launcher.checks.doctor as d\n"
        "d._findings = lambda versions, timeout_s: ()\n"
        "from rl_launcher.checks.doctor import doctor\n"
        "code = doctor(json=True)\n"
        "print(code, [name for name in ('torch', 'ray', 'vllm', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    line, last = done.stdout.splitlines()
    assert json.loads(line)["exit_code"] == 1  # nothing was found, so nothing is ready
    assert last == "1 []"


KILLED_ENGINE = """
import sys
from multiprocessing import resource_tracker, shared_memory
from rl_generation.vllm.processes import EngineFolder
folder, memory = EngineFolder(), shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # as where Python's tracker was killed, too
folder.watch({})
folder._keeper.kill()  # and the process that would remove it
print(folder.path, f"/dev/shm/{memory.name.lstrip('/')}", flush=True)
sys.stdin.read()
"""


def test_doctor_finds_what_a_killed_engine_left_and_the_next_engine_removes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # where both look
    monkeypatch.setattr(tempfile, "tempdir", None)
    command = [sys.executable, "-c", KILLED_ENGINE]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as killed, subprocess.Popen(command, **pipes) as living:
        folders, files = zip(*(map(Path, each.stdout.readline().split()) for each in (killed, living)), strict=True)
        killed.kill()
        killed.wait()
        found = left_behind(PATIENCE_S)  # and what other tests have killed meanwhile
        assert found.state == "limited"
        assert [str(path) in found.figures["folders"] for path in folders] == [True, False]
        assert str(files[0]) not in found.figures["files"], "it is the next run's to remove"
        remove_abandoned()
        assert [path.exists() for path in (*folders, *files)] == [False, True, False, True]
        assert str(folders[0]) not in left_behind(PATIENCE_S).figures["folders"]
        living.communicate("")
