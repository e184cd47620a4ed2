"""Runs that are killed in the midst of a save or of a step: the next one goes on as if nothing had happened."""

import functools
import os
import shutil
import signal
from datetime import timedelta

import kill_program
import pytest
import torch
import torch.distributed as dist
from forked import RanksFailedError
from kill_program import KILLED, LAYOUTS, STEPS, train

from rl_backends.checkpoints.saving import find_latest
from rl_backends.rank_agreement import gather_text

RANKS = {layout: 1 if layout == "alone" else 2 for layout in LAYOUTS}


@pytest.fixture(scope="module")
def whole(world, on_ranks_once, tmp_path_factory):
    """`whole(layout)`: what each rank of a run found that nobody killed, and the folder of its checkpoints."""

    @functools.cache
    def whole(layout):
        folder = tmp_path_factory.mktemp("whole")
        return on_ranks_once(lambda rank: train(world, layout, folder), ranks=RANKS[layout]), folder

    return whole


@pytest.fixture
def killed(world, on_ranks, tmp_path):
    """`killed(layout, arm)`: the checkpoints of a run that was, and what its ranks said at their end."""
    folders = iter(range(100))

    def killed(layout, arm, **options):
        folder = tmp_path / f"killed{next(folders)}"
        folder.mkdir()
        with pytest.raises(RanksFailedError) as failed:
            on_ranks(lambda rank: train(world, layout, folder, arm=arm, **options), ranks=RANKS[layout])
        return folder, str(failed.value)

    return killed


@pytest.fixture
def goes_on(world, on_ranks, whole):
    """`goes_on(layout, folder, first=2)`: the next run is what is left of one that nobody killed, bit for bit."""

    def goes_on(layout, folder, *, first):
        for found, expected in zip(
            on_ranks(lambda rank: train(world, layout, folder), ranks=RANKS[layout]), whole(layout)[0], strict=True
        ):
            assert (found["latest"], found["first"]) == (f"step-{first}", first)
            assert found["curve"] == expected["curve"][first:]
            torch.testing.assert_close(found["weights"], expected["weights"], rtol=0, atol=0)
        assert {path.name for path in folder.iterdir()} == {f"step-{step}" for step in range(1, STEPS + 1)}

    return goes_on


@pytest.mark.parametrize(
    "asynchronous",
    [pytest.param(False, id="save", marks=pytest.mark.slow), pytest.param(True, id="asynchronous save")],
)
def test_a_kill_at_any_moment_of_a_save_leaves_the_checkpoint_before_or_the_new_one(
    world, on_ranks, killed, goes_on, tmp_path, asynchronous
):
    def moments(rank):
        calls = []
        train(world, "alone", tmp_path / "counted", arm=kill_program.counted(calls))
        return calls

    (calls,) = on_ranks(moments, ranks=1)
    named = calls.index("rename") + 1
    assert len(calls) > named > 4  # data, index, state and marker come before, and a folder's names after
    for moment in [1, named, named + 1] if asynchronous else range(1, len(calls) + 1):
        folder, told = killed("alone", kill_program.in_save(moment), asynchronous=asynchronous)
        assert "rank 0 ended with code -9" in told
        complete = KILLED if moment > named else KILLED - 1
        assert find_latest(folder).name == f"step-{complete}"
        assert {path.name for path in folder.iterdir() if path.name[0] != "."} == {
            f"step-{step}" for step in range(1, complete + 1)
        }
        if moment in {named, named + 1}:  # the others left the same
            goes_on("alone", folder, first=complete)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("layout", "victim", "moment", "complete", "asynchronous"),
    [
        pytest.param("DP2", 1, 1, KILLED - 1, False, marks=pytest.mark.slow),
        ("PP2", 1, 1, KILLED - 1, True),
        pytest.param("DP2", 0, 6, KILLED - 1, False, marks=pytest.mark.slow),
        ("PP2", 0, 7, KILLED, True),
    ],
    ids=["before its file is whole", "before its file is whole, later", "before it has a name", "when it has one"],
)
def test_a_rank_that_is_killed_in_a_save_ends_all_and_the_next_run_goes_on(
    killed, goes_on, layout, victim, moment, complete, asynchronous
):
    arm = kill_program.in_save(moment)
    folder, told = killed(
        layout,
        lambda step, backend: arm(step, backend) if dist.get_rank() == victim else None,
        asynchronous=asynchronous,
    )
    ended_by_an_error(told, victim)
    assert find_latest(folder).name == f"step-{complete}"
    goes_on(layout, folder, first=complete)


def ended_by_an_error(told, victim):
    """The other rank, and soon."""
    assert f"rank {victim} ended with code -9" in told
    assert f"rank {1 - victim} ended with code 1\n" in told
    assert "still ran" not in told
    assert "behind" not in told.split("---")[0]
    last = told.split(f"--- rank {1 - victim} ---")[1].split("--- rank")[0].rstrip().splitlines()[-1]
    assert "Error" in last, told


@pytest.mark.parametrize("where", ["backward", "update"])
def test_a_process_that_is_killed_in_a_step_has_lost_this_step_alone(killed, goes_on, where):
    folder, told = killed("alone", kill_program.in_step(where))
    assert "rank 0 ended with code -9" in told
    goes_on("alone", folder, first=KILLED)


@pytest.mark.parametrize(
    ("layout", "victim", "where"),
    [
        ("DP2", 1, "before gradients meet"),
        pytest.param("DP2", 1, "update", marks=pytest.mark.slow),
        pytest.param("PP2", 0, "forward", marks=pytest.mark.slow),
        ("PP2", 1, "backward"),
    ],
)
def test_a_rank_that_is_killed_in_a_step_ends_all_and_the_next_run_goes_on(killed, goes_on, layout, victim, where):
    folder, told = killed(layout, kill_program.in_step(where, rank=victim))
    ended_by_an_error(told, victim)
    goes_on(layout, folder, first=KILLED)


@pytest.mark.parametrize(
    ("layout", "where"), [("DP2", "before gradients meet"), pytest.param("PP2", "forward", marks=pytest.mark.slow)]
)
def test_a_rank_that_hangs_is_waited_for_no_longer_than_the_deadline(world, on_ranks, tmp_path, layout, where):
    timeout_s = 40.0  # all else waits for each other as long, on a machine that is busy

    def with_a_deadline(rank):
        dist.barrier()  # both have joined, and nobody tears a connection that the other still makes
        dist.destroy_process_group()
        deadline, rendezvous = timedelta(seconds=timeout_s), f"file://{tmp_path / 'again'}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=deadline)
        processes = [int(process) for process in gather_text(str(os.getpid()))]
        arm = kill_program.in_step(where, kill_program.stop, rank=1)
        try:
            train(world, layout, tmp_path, arm=arm, timeout_s=timeout_s)
        except Exception:
            os.kill(processes[1], signal.SIGKILL)  # as a launcher ends the others, when one has failed
            raise

    with pytest.raises(RanksFailedError) as failed:
        on_ranks(with_a_deadline, ranks=2)
    ended_by_an_error(str(failed.value), 1)
    assert "Timed out" in str(failed.value)
    assert find_latest(tmp_path).name == f"step-{KILLED}"
