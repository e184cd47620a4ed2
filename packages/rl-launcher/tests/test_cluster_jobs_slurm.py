"""Claims about the SLURM script: it is executed, with `srun` and `scontrol` that start real processes on this machine.

The stand-ins treat signals as SLURM's do: srun hands SIGUSR1 on, and turns SIGTERM into SIGKILL of a whole step.
"""

import contextlib
import importlib.util
import json
import os
import random
import shlex
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rl_launcher.cluster_jobs import ClusterJob, RayPorts, SlurmOptions, render_slurm
from rl_launcher.errors import Refusal

DEADLINE_S = 120.0
SRUN = """
    import json, os, signal, subprocess, sys, uuid
    from pathlib import Path

    words = sys.argv[1:]
    options = [words.pop(0) for _ in range(len(words)) if words and words[0].startswith("--")]
    nodes = next(o.partition("=")[2] for o in options if o.startswith("--nodelist=")).split(",")
    folder = Path(os.environ["SHIMS"])
    with (folder / "calls").open("a") as calls:
        calls.write(json.dumps({"srun": options, "command": words[0], "last": words[-1].splitlines()[-1]}) + chr(10))
    step, tasks, told = uuid.uuid4().hex, [], []

    def kill_all(*_):
        told.append(True)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"STEP={step}".encode() in (process / "environ").read_bytes().split(bytes(1))
                if mine and int(process.name) != os.getpid():
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue  # it is gone, or not ours

    # Before the tasks: what one of them does may be answered by a signal at once.
    signal.signal(signal.SIGTERM, kill_all)
    signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
    for node in nodes:
        environment = {**os.environ, "STEP": step, "SLURMD_NODENAME": node, "SLURM_CPUS_ON_NODE": "2"}
        tasks.append(subprocess.Popen(words, env=environment))
    if told:
        kill_all()  # those that were not there yet
    codes = [task.wait() for task in tasks]
    kill_all()  # SLURM leaves nothing of a step behind
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """
    import os, sys
    from pathlib import Path

    if sys.argv[1:3] == ["show", "hostnames"]:
        print("\\n".join(sys.argv[3].split(",")))
    else:
        with (Path(os.environ["SHIMS"]) / "requeued").open("a") as file:
            file.write(" ".join(sys.argv[1:]) + chr(10))
"""
# Instead of python: Ray and the wait for it do nothing, and a run ends as RUN_ENDS says.
PYTHON = """
    import json, os, signal, socket, sys, time
    from pathlib import Path

    folder, module, words = Path(os.environ["SHIMS"]), sys.argv[2], sys.argv[3:]
    with (folder / "started").open("a") as file:
        file.write(json.dumps([module, *words, os.environ.get("RAY_AUTH_MODE"), os.getcwd()]) + chr(10))
    if module == "ray.scripts.scripts":
        server = socket.socket()
        if "--head" in words:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", int(words[words.index("--port") + 1])))
            server.listen()
        signal.pause()
    while module == "rl_launcher.cluster_jobs.wait_for_nodes":
        if (folder / "started").read_text().count("ray.scripts.scripts") >= 2:
            sys.exit()
        time.sleep(0.05)
    if module == "rl_launcher":
        ends = os.environ.get("RUN_ENDS", "0")
        def save(*_):
            (folder / "saved").touch()
            sys.exit(130)
        if ends == "told":
            signal.signal(signal.SIGTERM, save)
            (folder / "running").touch()
            signal.pause()
        sys.exit(int(ends))
"""
GETENT = """
    print("127.0.0.1       STREAM node1")
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder of stand-ins for SLURM's commands, and the environment of a job on node1 and node2."""
    shims = tmp_path / "shims"
    shims.mkdir()
    for name, source in {"srun": SRUN, "scontrol": SCONTROL, "getent": GETENT, "fake-python": PYTHON}.items():
        executable(shims / name, source)
    (tmp_path / "shared").mkdir()
    yield {
        **os.environ,
        "PATH": f"{shims}:{os.environ['PATH']}",
        "SHIMS": str(shims),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node1,node2",
    }
    deadline = time.monotonic() + 180  # Ray's agents notice by and by that nobody is left
    while left := left_behind(shims):
        if time.monotonic() > deadline:
            for process, _ in left:
                os.kill(process, signal.SIGKILL)
            raise AssertionError(left)
        time.sleep(0.2)


def left_behind(shims):
    """Processes of the job that are still there, with their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone, or not ours
            if f"SHIMS={shims}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((int(process.name), (process / "cmdline").read_bytes()))
    return found


def executable(path, source):
    path.write_text(f"#!{sys.executable}\n{textwrap.dedent(source)}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def free_ports(number):
    """Ports that are free now, and that the system gives to nobody: those it would are somebody's connection soon."""
    found = []
    for port in random.SystemRandom().sample(range(30000, 32768), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
        if len(found) == number:
            return found
    raise AssertionError("no port is free")


def options(tmp_path, **changes):
    gcs, client, dashboard = free_ports(3)
    # Both machines are this one, so that what is fixed on a cluster must be free here; workers stay below the system's.
    ports = RayPorts(
        gcs=gcs,
        client=client,
        dashboard=dashboard,
        node_manager=0,
        object_manager=0,
        min_worker=20002,
        max_worker=29999,
    )
    return SlurmOptions(
        **{
            "time": "01:00:00",
            "shared_dir": str(tmp_path / "shared"),
            "python": str(tmp_path / "shims" / "fake-python"),
            "ports": ports,
            "join_timeout_s": 300,
            **changes,
        }
    )


def job(**changes):
    return ClusterJob(
        **{"recipe": "my recipe.yaml", "run_dir": "runs/a", "num_nodes": 2, "gpus_per_node": 0, **changes}
    )


def write_script(tmp_path, text):
    script = tmp_path / "run.sbatch"
    script.write_text(text)
    return script


def finish(script, environment, deadline_s=DEADLINE_S):
    # To files: a process that is left behind must fail the test, and not hold a pipe open.
    with (script.parent / "out").open("w+") as out, (script.parent / "err").open("w+") as err:
        done = subprocess.run(
            ["bash", script], env=environment, stdout=out, stderr=err, timeout=deadline_s, check=False
        )
    done.stdout, done.stderr = ((script.parent / name).read_text() for name in ("out", "err"))
    return done


def calls(tmp_path, name="started"):
    return [json.loads(line) for line in (tmp_path / "shims" / name).read_text().splitlines()]


def wait_until(condition, process):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_run_gets_a_head_a_worker_its_arguments_and_its_exit_code_back(tmp_path, cluster):
    script = write_script(tmp_path, render_slurm(job(overrides=("seed=1 2",)), options(tmp_path)))
    done = finish(script, {**cluster, "RUN_ENDS": "1"})
    assert done.returncode == 1, done.stderr
    started = calls(tmp_path)
    (head,) = [words for words in started if "--head" in words]
    (worker,) = [words for words in started if words[0] == "ray.scripts.scripts" and "--head" not in words]
    (run,) = [words for words in started if words[0] == "rl_launcher"]
    shared = str(tmp_path / "shared")
    assert head[head.index("--dashboard-host") + 1] == "127.0.0.1"
    assert worker[worker.index("--address") + 1] == f"127.0.0.1:{head[head.index('--port') + 1]}"
    assert run[1:] == ["run", "my recipe.yaml", "seed=1 2", "cluster.address=auto", "token", shared]
    assert not (tmp_path / "shims" / "requeued").exists()
    assert [entry.name for entry in (tmp_path / "shared").iterdir()] == ["runs"]
    assert not list((tmp_path / "shared" / "runs").iterdir())


def test_the_limit_saves_and_queues_again_and_then_the_run_is_resumed(tmp_path, cluster):
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path)))
    process = subprocess.Popen(
        ["bash", script], env={**cluster, "RUN_ENDS": "told"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until((tmp_path / "shims" / "running").exists, process)
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, errors
    assert (tmp_path / "shims" / "saved").exists()
    assert (tmp_path / "shims" / "requeued").read_text() == "requeue 7\n"

    run = tmp_path / "shared" / "runs" / "a"
    run.mkdir()
    (run / "recipe.yaml").touch()
    assert finish(script, {**cluster, "SLURM_RESTART_COUNT": "1"}).returncode == 0
    ran = [call for call in calls(tmp_path) if call[0] == "rl_launcher"]  # Ray's own calls come in any order
    assert ran[-1][:3] == ["rl_launcher", "resume", str(run)]


@pytest.mark.parametrize(
    ("number", "restarts"), [(signal.SIGTERM, "0"), (signal.SIGUSR1, "3")], ids=["told to end", "again and again"]
)
def test_what_was_told_to_end_or_was_queued_often_enough_is_saved_and_not_queued_again(
    tmp_path, cluster, number, restarts
):
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path, max_requeues=3)))
    environment = {**cluster, "RUN_ENDS": "told", "SLURM_RESTART_COUNT": restarts}
    process = subprocess.Popen(["bash", script], env=environment, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "shims" / "running").exists, process)
    process.send_signal(number)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert (tmp_path / "shims" / "saved").exists()
    assert not (tmp_path / "shims" / "requeued").exists()


def test_a_node_that_gives_up_ends_the_job_before_the_time_for_joining_does(tmp_path, cluster):
    python = tmp_path / "python"
    # Ray is one that fails; the wait for it is the real one.
    python.write_text(
        "#!/bin/bash\n[[ $2 == rl_launcher.cluster_jobs.wait_for_nodes ]] || exit 3\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path, python=str(python), join_timeout_s=1000)))
    done = finish(script, cluster)
    assert done.returncode == 1, done.stderr
    assert "not all nodes have joined" in done.stderr
    assert "its Ray ended with exit code 3" in done.stderr


def test_a_failed_run_is_not_queued_again(tmp_path, cluster):
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path)))
    assert finish(script, {**cluster, "RUN_ENDS": "2"}).returncode == 2
    assert not (tmp_path / "shims" / "requeued").exists()


def test_a_missing_variable_another_number_of_nodes_and_no_shared_folder_are_reported(tmp_path, cluster):
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path, env=("HF_TOKEN", "NCCL_DEBUG=a b"))))
    cluster.pop("HF_TOKEN", None)
    missing = finish(script, cluster)
    assert missing.returncode == 2
    assert "HF_TOKEN is not set; export it before sbatch" in missing.stderr
    fewer = finish(script, {**cluster, "HF_TOKEN": "x", "SLURM_JOB_NODELIST": "node1"})
    assert fewer.returncode == 2
    assert "needs 2 nodes, and the job has 1: node1" in fewer.stderr
    elsewhere = write_script(tmp_path, render_slurm(job(), options(tmp_path, shared_dir=str(tmp_path / "none"))))
    assert f"there is no {tmp_path / 'none'} here" in finish(elsewhere, cluster).stderr


def test_setup_that_fails_on_a_node_ends_the_job_with_its_name(tmp_path, cluster):
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path, setup="false")))
    done = finish(script, cluster)
    assert done.returncode == 2
    assert "setup failed on" in done.stderr


NASTY = "a'b\"c $(touch x) `touch x`; touch x #\n{{ job }} {% raw %} \\"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1), min_size=2),
)
@example([NASTY, NASTY])
@example(["a", "~nobody-has-this-name"])
def test_no_value_breaks_out_of_its_quotes(words):
    recipe, run_dir, *overrides = words
    script = render_slurm(
        ClusterJob(recipe=recipe, run_dir=run_dir, num_nodes=1, gpus_per_node=8, overrides=tuple(overrides)),
        SlurmOptions(time="1", shared_dir="/" + recipe, setup=run_dir, env=(f"A={recipe}",), container=run_dir),
        file=recipe,
    )
    values = script.split("# ---- What this job runs.")[1].split("\n", 1)[1].split("# ---- End of the values.")[0]
    show = r"printf '%s\0' " + '"$SETUP" "$A" "$SHARED_DIR" "${CONTAINER[0]}" "${ARGUMENTS[@]}"'
    done = subprocess.run(["bash", "-c", values + show], capture_output=True, check=True, timeout=DEADLINE_S)
    heard = done.stdout.decode().split("\0")[:-1]
    assert heard[:2] == [run_dir, recipe]
    assert heard[2] == str(Path("/" + recipe))
    assert heard[3] == f"--container-image={run_dir}"
    assert heard[4:] == [recipe, *overrides, "cluster.address=auto"]
    head = script.split("set -uo pipefail")[0].splitlines()
    assert all(not line or line.startswith("#") for line in head)


def test_bash_parses_it_and_sbatch_gets_what_was_asked_for(tmp_path):
    asked = options(tmp_path, partition="gpu", account="me", grace_s=120, directives=("--qos=high",))
    text = render_slurm(job(gpus_per_node=8), asked)
    subprocess.run(["bash", "-n", write_script(tmp_path, text)], check=True, timeout=DEADLINE_S)
    directives = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert set(directives) == {
        "--job-name=rl-launcher",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=01:00:00",
        "--partition=gpu",
        "--account=me",
        "--signal=B:USR1@120",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--exclusive",
        "--mem=0",
        "--requeue",
        "--qos=high",
    }


def test_a_share_of_a_node_has_the_memory_that_the_recipe_needs(tmp_path):
    needs = job(memory_bytes=277 * 2**30 - 5)
    assert "#SBATCH --mem=277G\n" in render_slurm(needs, options(tmp_path, exclusive=False))
    entire = render_slurm(needs, options(tmp_path))
    assert "#SBATCH --mem=0\n" in entire, "all memory of its nodes"
    assert "# The recipe needs 277 GiB of host memory on each node." in entire
    given = render_slurm(needs, options(tmp_path, exclusive=False, directives=("--mem=300G",)))
    assert [line for line in given.splitlines() if "--mem" in line] == ["#SBATCH --mem=300G"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time": "soon"}, "time='soon' is not a time limit of sbatch"),
        ({"partition": "a b"}, "partition='a b' cannot follow #SBATCH"),
        ({"account": "a\n#SBATCH --wrap=x"}, "cannot follow #SBATCH"),
        ({"directives": ("qos",)}, "write it as --qos=high"),
        ({"shared_dir": "runs"}, "shared_dir='runs' must be absolute"),
        ({"env": ("HF_TOKEN=abc",)}, "pass it on by name alone: HF_TOKEN"),
        ({"env": ("1A=b",)}, "is no environment variable"),
        ({"mounts": ("a:b",)}, "there is none; set container"),
        ({"join_timeout_s": 0}, "join_timeout_s=0 must be >= 1"),
    ],
)
def test_what_sbatch_would_misread_is_refused(changes, words):
    with pytest.raises(Refusal, match=words):
        SlurmOptions(**{"time": "1:00", "shared_dir": "/shared", **changes})


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        ({"gcs": 80}, "ports.gcs=80"),
        ({"gcs": 8265}, "not all different"),
        ({"gcs": 10500}, "among the workers', 10002 to 10999"),
        ({"min_worker": 11000}, "must be below ports.max_worker"),
    ],
)
def test_ports_that_collide_are_refused(ports, words):
    with pytest.raises(Refusal, match=words):
        RayPorts(**ports)


REAL_RUN = """
    import json, os, sys
    import ray

    ray.init(address="auto", log_to_driver=False)
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    name = ray.remote(lambda: os.environ["SLURMD_NODENAME"])
    where = [
        ray.get(name.options(scheduling_strategy=strategy(node, False)).remote())
        for node in nodes
    ]
    with open("seen.json", "w") as file:
        json.dump({"machines": sorted(where), "asked": sys.argv[3:], "address": os.environ["RAY_ADDRESS"]}, file)
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_two_real_rays_join_by_a_token_and_the_run_reaches_both(tmp_path, cluster):
    run = tmp_path / "run.py"
    run.write_text(textwrap.dedent(REAL_RUN))
    python = tmp_path / "python"
    # Everything is real but the run, which only looks around.
    python.write_text(
        f"#!/bin/bash\nif [[ $2 == rl_launcher ]]; then exec {shlex.quote(sys.executable)} {shlex.quote(str(run))} "
        f'"${{@:2}}"; fi\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    script = write_script(tmp_path, render_slurm(job(), options(tmp_path, python=str(python))))
    # The system allows 107 characters for a socket's name; Ray's agents may write for a moment after its end.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as short:
        done = finish(script, {**cluster, "RAY_TMPDIR": short}, deadline_s=400)
    assert done.returncode == 0, done.stderr + done.stdout
    seen = json.loads((tmp_path / "shared" / "seen.json").read_text())
    assert seen["machines"] == ["node1", "node2"]
    assert seen["asked"] == ["my recipe.yaml", "cluster.address=auto"]
    assert not (tmp_path / "shared" / ".rl-launcher-slurm-7").exists()
