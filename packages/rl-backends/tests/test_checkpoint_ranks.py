"""Claims about checkpoints over ranks: any mesh reads what another wrote, and all are told what fails on one."""

import json
from pathlib import Path

import pytest

from rl_backends.checkpoints.loading import load_checkpoint
from rl_backends.checkpoints.saving import find_latest, save_checkpoint

KILLS = ["data not begun", "data half written", "index", "state", "marker", "rename", "named"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, start_program):
    folder = tmp_path_factory.mktemp("checkpoints")
    program = Path(__file__).parent / "programs" / "checkpoints.py"
    process = start_program(program, str(folder))
    try:
        assert process.wait(timeout=600) == 0
    finally:
        process.kill()
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """What every rank found in an act."""
    codes = json.loads((folder / "codes.json").read_text())
    assert codes["two"] == [0, 0]
    assert codes["four"] == [0, 0, 0, 0]
    assert codes["one"] == [0]

    def found(phase, act):
        return [json.loads(path.read_text()) for path in sorted(folder.glob(f"{phase}.{act}.*.json"))]

    return found


@pytest.mark.parametrize("act", ["write FSDP", "write TP", "write fused TP", "write MoE"])
def test_a_run_resumed_on_its_mesh_is_the_run_that_never_stopped_bit_for_bit(found, act):
    for rank in found("two", act):
        assert rank["version"] == 2
        assert rank["rng"]
        assert rank["differ when loaded"] == []
        assert rank["differ two steps on"] == []


@pytest.mark.parametrize(
    ("phase", "act"),
    [
        ("four", "FSDP"),  # 2 -> 4 ranks
        ("one", "FSDP"),  # -> 1
        ("four", "TP to FSDP"),
        ("two", "read fused"),  # TP2 -> FSDP2: sharding has permuted the rows of fused weights
        ("four", "both"),  # TP2 -> FSDP2 x TP2
        ("one", "both"),  # -> 1
        ("two", "read MoE"),
        ("two", "replicas"),
    ],
)
def test_another_mesh_gets_weights_and_moments_bit_for_bit_and_takes_the_same_steps(found, phase, act):
    ranks = found(phase, act)
    assert len(ranks) == {"one": 1, "two": 2, "four": 4}[phase]
    for rank in ranks:
        assert rank["version"] == 2
        assert rank["differ"] == []
        assert rank["distance"] < 1e-6


def test_experts_of_several_ranks_come_back_on_the_same_mesh_and_on_one_rank(found):
    for rank in found("experts on two", "write"):
        assert (rank["differ when loaded"], rank["differ two steps on"]) == ([], [])
    [rank] = found("experts on one", "read")
    assert rank["differ"] == []
    assert rank["distance"] < 1e-6


@pytest.mark.parametrize(("phase", "act"), [("two", "replicas"), ("four", "both")])
def test_what_several_ranks_hold_is_written_once(found, phase, act):
    for rank in found(phase, act):
        assert rank["numbers"] == {"weights": rank["parameters"], "exp_avg": rank["parameters"]}


def test_a_checkpoint_is_safetensors_and_json_and_no_pickle(found):
    names = found("four", "FSDP")[0]["files"]
    ranks = [f"rank-0000{rank}-of-00004.safetensors" for rank in range(4)]
    assert names == ["checkpoint.json", *ranks, "state.json", "tensors.json"]


@pytest.mark.parametrize("act", ["full", "full later"])
def test_a_full_disk_on_one_rank_is_an_error_on_all_and_leaves_the_checkpoint_before_it(found, act):
    for rank in found("two", act):
        assert "step-2 was not written: rank 1: OSError: " in rank["error"]
        assert rank["returned first"] == (act == "full later")
        assert rank["kept"] == ["step-1"]
        assert rank["differ"] == []
        assert rank["then"] == ["step-1", "step-2b"]


def test_a_failure_that_nobody_waited_for_is_raised_by_the_next_save_on_all_ranks(found):
    for rank in found("two", "next save"):
        assert "step-1 was not written: rank 1: OSError" in rank["error"]
        assert rank["complete"] == ["step-3"]


def test_a_damaged_file_that_one_rank_finds_is_refused_by_all(found):
    for rank in found("two", "damaged"):
        assert "rank-00001-of-00002.safetensors: damaged" in rank["error"]
        assert rank["changed"] == []


def test_a_schedule_that_one_rank_refuses_stands_where_it_stood_on_all(found):
    for rank in found("two", "refused schedule"):
        assert "the stage is over by then" in rank["error"]
        assert (rank["steps"], rank["changed"]) == (0, [])


def test_all_ranks_know_what_was_pruned(found):
    for rank in found("two", "pruned"):
        assert rank == {"removed": ["step-1", "step-2"], "kept": ["step-3"]}


def test_every_rank_is_told_in_words_what_failed_on_another(found):
    first, second = found("two", "together")
    assert (first["fine"], second["fine"]) == (1, 2)
    assert first["one fails"] == "RankError: rank 1 failed: ValueError: näher als erlaubt"
    assert second["one fails"] == "ValueError: näher als erlaubt"
    assert first["rank 0 fails"] == "OSError: no room"
    assert second["rank 0 fails"] == "RankError: rank 0 failed: OSError: no room"
    assert first["timeout of the host's group"] == "0:03:00"
    assert first["texts"] == second["texts"] == ["", "zweiter"]


def test_a_rank_that_is_killed_leaves_the_others_an_error_and_the_checkpoint_before_it(folder, found):
    assert json.loads((folder / "codes.json").read_text())["killed"] == [0, -9]
    [survivor] = found("killed", "killed")
    assert "step-2 was not written: RuntimeError" in survivor["error"]
    assert survivor["kept"] == ["step-1"]


@pytest.mark.parametrize("point", KILLS)
def test_a_process_killed_while_it_saves_leaves_the_last_complete_checkpoint(world, folder, point):
    codes = json.loads((folder / "codes.json").read_text())
    assert codes[f"kill {point}"] == [-25 if point == "data half written" else -9]  # SIGXFSZ, SIGKILL
    parent = folder / "kills" / point
    left = sorted(path.name for path in parent.iterdir())
    expected = "step-2" if point == "named" else "step-1"
    assert left == (["step-1", "step-2"] if point == "named" else [".step-2.checkpoint-unfinished", "step-1"])
    assert find_latest(parent) == parent / expected
    model = world.make_model("Qwen3", seed=3)
    assert load_checkpoint(model, None, parent / expected, optimizer=False).version == int(expected[-1])
    save_checkpoint(model, None, parent / "step-3", version=3)
    assert sorted(path.name for path in parent.iterdir()) == sorted({"step-1", expected, "step-3"})
