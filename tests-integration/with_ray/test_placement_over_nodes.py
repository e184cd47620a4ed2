"""What a placement says is where Ray's actors are: on raylets of unequal size, with an engine on several of them."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import json
import subprocess
import sys
from pathlib import Path

import torch

from rl_backends.least_memory import host_bytes

GIB = 2**30
PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "placement_over_nodes.py"
VLLM = "policy.generation.backend=vllm"
TENSOR, PIPELINE = (f"policy.generation.vllm_cfg.{name}_parallel_size" for name in ("tensor", "pipeline"))
UNEQUAL = ["cluster.num_nodes=2", "cluster.gpus_per_node=[4, 2]"]  # the raylets are in the other order
STAGE = "grpo={max_num_steps: 2, optimizer: {lr: 0.1}}"
TRAINED = [*UNEQUAL, VLLM, f"{TENSOR}=2", STAGE]
SOON = "cluster.start_timeout_s=5"
RUNS = {
    "over nodes": {"overrides": [*UNEQUAL, VLLM, f"{TENSOR}=2", f"{PIPELINE}=3"]},
    "separate": {
        "overrides": [
            *UNEQUAL,
            VLLM,
            f"{TENSOR}=2",
            "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}",
        ]
    },
    "trainer": {
        "overrides": ["cluster.num_nodes=2", "cluster.gpus_per_node=[2, 1]", "policy.dtensor_cfg.device=cpu"],
        "train": True,
    },
    # A billion weights: 16 GB with gradients and AdamW, of which each of six ranks holds 2.5 GiB.
    "memory as it is": {"overrides": TRAINED, "memory": {}},
    "memory that suffices": {
        "overrides": TRAINED,
        "memory": {str(gpus): {"gpu_bytes": 3 * GIB} for gpus in (2, 4)},
    },
    "a node with small GPUs": {
        "overrides": TRAINED,
        "memory": {"4": {"gpu_bytes": 3 * GIB}, "2": {"gpu_bytes": 2 * GIB}},
    },
    "a host without room": {"overrides": TRAINED, "memory": {"4": {"host_bytes": 8 * GIB}}},
    "a container's /dev/shm": {"overrides": TRAINED, "memory": {"2": {"shm_bytes": 16 * 2**20}}},
    "processes on CPUs": {
        "overrides": ["cluster.num_nodes=2", "cluster.gpus_per_node=[2, 1]", "policy.dtensor_cfg.device=cpu", STAGE],
        "memory": {str(gpus): {"host_bytes": 14 * GIB} for gpus in (2, 4)},
    },
    "too small": {"overrides": ["cluster.num_nodes=2", "cluster.gpus_per_node=4", SOON]},
    "in use": {"overrides": [*UNEQUAL, SOON], "hogs": [0, 1]},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the actors of each run said, on raylets with 2 and 4 GPUs."""
    task = {"folder": str(tmp_path_factory.mktemp("run")), "nodes": [2, 4], "runs": list(RUNS.values())}
    command = [sys.executable, str(PROGRAM), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(RUNS, map(json.loads, lines), strict=True))


def sizes(run, places):
    """How many GPUs the raylet has on which each of some places is."""
    return [run["raylets"][place["node"]] for place in places]


def test_the_nodes_of_a_running_cluster_are_seen_without_taking_part(seen):
    assert sorted(seen["over nodes"]["there"]) == [2, 4]  # the slower to start may be the last


def test_nodes_are_found_by_what_each_must_have(seen):
    run = seen["over nodes"]
    assert run["gpus"] == [["0", "1", "2", "3"], ["0", "1"]]
    assert sizes(run, run["trainers"]) == [4, 4, 4, 4, 2, 2]
    assert [place["visible"] for place in run["trainers"]] == [["0", "1", "2", "3"]] * 4 + [["0", "1"]] * 2
    assert "node 0  ranks 0-3 on GPUs 0-3; engine 0 stages 0-1 on GPUs 0-3" in run["text"]
    assert "node 1  ranks 4-5 on GPUs 0-1; engine 0 stage 2 on GPUs 0-1" in run["text"]


def test_the_ranks_of_an_engine_on_several_nodes_get_the_gpus_of_the_plan_in_its_order(seen):
    run = seen["over nodes"]
    (ranks,) = run["engine_ranks"]
    assert sizes(run, ranks) == [4, 4, 4, 4, 2, 2]
    assert [place["reserved"] for place in ranks] == [["0"], ["1"], ["2"], ["3"], ["0"], ["1"]]
    assert sizes(run, run["engines"]) == [4], "its actor is where its first rank is"
    assert {place["sockets"] for place in ranks} == {"/tmp"}, "and not the folder of the engine, which is on its node"


def test_separate_engines_have_the_last_gpus_of_each_node(seen):
    run = seen["separate"]
    assert sizes(run, run["trainers"]) == [4, 4]
    assert sizes(run, run["engines"]) == [4, 2]
    assert [place["visible"] for place in run["engines"]] == [["2", "3"], ["0", "1"]]


def test_ranks_on_unequal_nodes_count_those_of_their_own_node(seen):
    told = seen["trainer"]["environments"]
    assert [each["RANK"] for each in told] == ["0", "1", "2"]
    assert [each["LOCAL_RANK"] for each in told] == ["0", "1", "0"]
    assert [each["LOCAL_WORLD_SIZE"] for each in told] == ["2", "2", "1"]
    assert {each["WORLD_SIZE"] for each in told} == {"3"}
    assert len({each["MASTER_ADDR"] for each in told}) == 1
    assert [each["met"] for each in told] == [3] * 3
    assert told[0]["node"] == told[1]["node"] != told[2]["node"]


def test_nodes_are_asked_for_their_memory_by_a_task_on_each(seen):
    run = seen["memory as it is"]
    assert [node["host_bytes"] for node in run["measured"]] == [host_bytes()] * 2
    assert all(node["shm_bytes"] > 0 for node in run["measured"])
    assert run["gpus"] == [], "GPUs of which nothing is known are not checked"
    assert seen["memory that suffices"]["gpus"] == [["A GPU", 3 * GIB]] * 6


def test_a_node_whose_gpus_are_too_small_is_refused_by_name_with_the_phase(seen):
    lacking = seen["a node with small GPUs"]["lacking"]
    assert "node 1 (raylet-2) lacks memory of each of its GPUs (A GPU) while training" in lacking
    assert "it needs at least 2.5 GiB (weights, gradients and optimizer 2.5 GiB a rank) and has 2.0 GiB" in lacking
    assert "node 0" not in lacking
    assert "more GPUs or nodes (cluster.gpus_per_node, cluster.num_nodes)" in lacking


def test_host_memory_and_shared_memory_of_each_node_are_compared_with_what_is_placed_there(seen):
    host = seen["a host without room"]["lacking"]
    assert "node 0 (raylet-4) lacks host memory while generating: it needs at least 9.9 GiB" in host
    assert "4 x weights, gradients and optimizer" in host
    assert "and has 8.0 GiB" in host
    assert "node 1" not in host
    shm = seen["a container's /dev/shm"]["lacking"]
    assert "node 1 (raylet-2) lacks /dev/shm while refitting: it needs at least 32 MiB" in shm
    assert "and has 16 MiB" in shm
    assert "--shm-size" in shm
    cpu = seen["processes on CPUs"]["lacking"]
    assert "node 0 (raylet-" in cpu
    assert "lacks host memory while training and generating" in cpu
    assert "2 x weights, gradients and optimizer 5.0 GiB a rank, 2 x weights of an engine 3.7 GiB a rank" in cpu


def test_a_cluster_that_is_too_small_is_refused_with_the_node_and_what_it_lacks(seen):
    refused = seen["too small"]["refused"]
    assert "2 nodes with 4 GPUs and 4 CPUs each (cluster.num_nodes=2, gpus_per_node=4" in refused
    assert "node 1 of the run has no node in the cluster" in refused
    assert "is 2 GPUs short of 4" in refused


def test_a_cluster_that_another_run_holds_part_of_is_refused_with_that(seen):
    assert "other runs hold part of them" in seen["in use"]["refused"]


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("vllm") is None, reason="the engine is vLLM's, which is not installed here")
@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"vLLM's Ray executor is for GPUs, one for each stage of two; here are {torch.cuda.device_count()}",
)
def test_an_engine_on_two_nodes_generates_with_every_version_of_the_trainer(tmp_path):
    task = {"folder": str(tmp_path), "nodes": [1, 1], "generate": True}
    done = subprocess.run([sys.executable, str(PROGRAM), json.dumps(task)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["verified"] == ["every byte"] * 2
    assert seen["versions"] == [0, 1]
    assert seen["tokens"] == [seen["expected"]] * 2, "those of the model that was sent"
