"""Claims about rows that are dealt before they are sent: each rank gets its own, and no number changes."""

import dataclasses
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch

from rl_backends.batching.dealing import RowDealing, in_order
from rl_backends.errors import BatchError
from rl_parallel_plans import TopKLogp

PROGRAM = Path(__file__).parent / "programs" / "dealing.py"
ROWS = 7
TWO = {
    "FSDP2": ("dtensor", {}, ROWS),
    "TP2": ("dtensor", {"tensor_parallel_size": 2}, ROWS),
    "CP2": ("dtensor", {"context_parallel_size": 2, "sequence_packing": True}, ROWS),
    "PP2": ("dtensor", {"pipeline_parallel_size": 2, "sequence_packing": True}, ROWS),
    "a mixture": ("dtensor", {"router_aux_loss_coef": 0.1}, ROWS),
    "fewer rows than ranks": ("dtensor", {}, 1),
}
FOUR = {"CP2 x DP2": ("dtensor", {"context_parallel_size": 2, "sequence_packing": True}, ROWS)}
NIGHTLY = os.environ.get("PARITY", "quick") != "quick"  # as for the tables of parity
if NIGHTLY:
    FOUR |= {"TP2 x DP2": ("dtensor", {"tensor_parallel_size": 2}, ROWS)}
if list(metadata.distributions(name="megatron-core")):
    TWO |= {"Megatron DP2": ("megatron", {}, ROWS)}
    TWO |= {"Megatron PP2": ("megatron", {"pipeline_model_parallel_size": 2}, ROWS)}
    if NIGHTLY:
        FOUR |= {"Megatron TP2 x DP2": ("megatron", {"tensor_model_parallel_size": 2}, ROWS)}


def launch(start_program, folder, meshes, ranks):
    logs = [folder / f"{rank}.log" for rank in range(ranks)]
    task = {"folder": str(folder), "ranks": ranks, "meshes": meshes}
    processes = [start_program(PROGRAM, {**task, "rank": rank}, log=log) for rank, log in enumerate(logs)]
    try:
        codes = [process.wait(500) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


@pytest.fixture(scope="module")
def results(start_program, tmp_path_factory):
    """By mesh, what each rank has seen."""
    two = launch(start_program, tmp_path_factory.mktemp("two"), TWO, 2)
    four = launch(start_program, tmp_path_factory.mktemp("four"), FOUR, 4)
    return {name: [rank[name] for rank in ranks] for ranks in (two, four) for name in ranks[0]}


@pytest.mark.parametrize("mesh", [*TWO, *FOUR])
def test_steps_on_dealt_rows_are_those_on_the_whole_batch_bit_for_bit(results, mesh):
    for seen in results[mesh]:
        assert seen["whole"].keys() == seen["dealt"].keys()
        for name, value in seen["whole"].items():
            assert torch.equal(seen["dealt"][name], value), name
        assert seen["dealt"]["logp 0"].shape[0] == (1 if mesh == "fewer rows than ranks" else ROWS)
        assert not torch.equal(seen["whole"]["logp 0"], seen["whole"]["logp 1"])


@pytest.mark.parametrize("mesh", [*TWO, *FOUR])
def test_a_rank_is_given_its_own_rows_and_so_are_those_that_share_them(results, mesh):
    by_rank = {}
    for seen in results[mesh]:
        assert seen["held"] == len(seen["rows"])
        by_rank.setdefault(seen["rank"], []).append(seen["rows"].tolist())
    (num_ranks,) = {seen["num_ranks"] for seen in results[mesh]}
    assert sorted(by_rank) == [*range(num_ranks)]
    assert all(rows == alike[0] for alike in by_rank.values() for rows in alike)
    if mesh == "fewer rows than ranks":
        assert {tuple(alike[0]) for alike in by_rank.values()} == {(0,)}
        return
    assert {row for alike in by_rank.values() for row in alike[0]} == {*range(ROWS)}
    if num_ranks > 1:
        assert max(len(alike[0]) for alike in by_rank.values()) < ROWS


@pytest.mark.parametrize("mesh", [mesh for mesh in (*TWO, *FOUR) if "DP2" in mesh or "FSDP2" in mesh])
def test_another_ranks_rows_and_those_of_other_batches_are_refused_on_every_rank(results, mesh):
    for seen in results[mesh]:
        assert "these rows were dealt to data-parallel rank" in seen["refused"]["another's"]
        assert seen["refused"]["of other batches"].startswith(("BatchError: ", "RankError: "))
        assert "different batches" in seen["refused"]["of other batches"]


def dealing(rank=0, num_ranks=2, rows=2):
    return RowDealing(rank=rank, num_ranks=num_ranks, micro_batch_size=rows, token_multiple=1, vocabulary_size=67)


def test_rows_are_dealt_by_length_and_units_are_never_parted(world):
    examples = world.make_examples(rows=8, kind=world.Pairs)
    dealt = dealing().deal(examples)
    assert [each.rank for each in dealt] == [0, 1]
    for each in dealt:
        assert torch.equal(each.rows[0::2] + 1, each.rows[1::2])
        assert torch.equal(each.examples.tokens, examples.tokens[each.rows])
        assert torch.equal(each.examples.weight, examples.weight[each.rows])
        assert torch.equal(each.lengths, examples.lengths)
    tokens = [int(each.examples.lengths.sum()) for each in dealt]
    assert max(tokens) - min(tokens) <= 2 * int(examples.lengths.max())


def test_the_driver_refuses_what_ranks_would_refuse_in_rows_of_the_batch(world):
    examples = world.make_examples(rows=6)
    examples.tokens[4, 2] = 67
    with pytest.raises(BatchError, match="row 4: token 2 has the id 67"):
        dealing().deal(examples)


def test_rows_that_were_dealt_by_other_rules_are_refused(world):
    dealt = dealing(num_ranks=3).deal(world.make_examples(rows=6))
    with pytest.raises(BatchError, match="was given other rows than it computes"):
        dealing().cut_of(dealt[0])


def test_values_of_dealt_rows_come_back_in_order(world):
    examples = world.make_examples(rows=5)
    dealt = dealing().deal(examples)
    counted = []
    for rank, each in enumerate(dealt):
        _, own = dealing(rank=rank).cut_of(each)
        values = torch.zeros(each.examples.tokens.shape, dtype=torch.int64)
        for microbatch in own:
            if microbatch.counted:
                values[microbatch.rows] = each.examples.tokens[microbatch.rows]
        counted.append(values)
    assert torch.equal(in_order(dealt, counted), examples.tokens)
    top = [TopKLogp(logp=each.float(), token_ids=each) for each in counted]
    assert torch.equal(in_order(dealt, top).token_ids, examples.tokens)


def test_what_is_dealt_is_smaller_than_the_batch(world):
    examples = world.make_examples(rows=64, width=200)

    def num_bytes(batch):
        return sum(getattr(batch, field.name).nbytes for field in dataclasses.fields(batch))

    sent, whole = [num_bytes(each.examples) for each in dealing().deal(examples)], num_bytes(examples)
    assert whole <= sum(sent) <= 1.05 * whole
    assert max(sent) < 0.6 * whole
