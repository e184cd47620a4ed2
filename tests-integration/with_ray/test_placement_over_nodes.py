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

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "placement_over_nodes.py"
VLLM = "policy.generation.backend=vllm"
TENSOR, PIPELINE = (f"policy.generation.vllm_cfg.{name}_parallel_size" for name in ("tensor", "pipeline"))
UNEQUAL = ["cluster.num_nodes=2", "cluster.gpus_per_node=[4, 2]"]  # the raylets are in the other order
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
