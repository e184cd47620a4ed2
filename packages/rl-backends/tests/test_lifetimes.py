"""Claims about the life of backends under torchrun, and about which GPU is a rank's."""

import importlib.util
import socket
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from rl_backends import LoraConfig, process_group
from rl_backends.checkpoints import shards
from rl_backends.checkpoints.shards import tensor_digests
from rl_backends.lora.inject import add_lora
from rl_parallel_plans import named_shards

PROGRAM = Path(__file__).parent / "programs" / "lifetimes.py"
STACKED_EXPERTS = int(version("transformers").partition(".")[0]) >= 5


@pytest.fixture(scope="module")
def results(tmp_path_factory, start_program):
    folder = tmp_path_factory.mktemp("lifetimes")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(2):
        environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        task = {
            "environment": {**environment, "MASTER_PORT": str(port)},
            "result": str(folder / f"rank{rank}.pt"),
            "stacked_experts": STACKED_EXPERTS,
        }
        processes.append(start_program(PROGRAM, task, log=folder / f"rank{rank}.log"))
    try:
        codes = [process.wait(timeout=600) for process in processes]
        assert codes == [0, 0], "\n".join((folder / f"rank{rank}.log").read_text()[-2000:] for rank in range(2))
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


def test_backends_of_several_ranks_can_be_closed_and_made_anew_any_number_of_times(results, world):
    examples = world.make_examples()
    with torch.no_grad():
        tied = world.plain_logp(world.make_model("Qwen2", tie_word_embeddings=True).eval(), examples)
        fused = world.plain_logp(world.make_model("Phi3").eval(), examples)
    for result in results:
        for number, logp in enumerate(result["logp"]):
            torch.testing.assert_close(logp, fused if number % 2 else tied, rtol=1e-5, atol=1e-5)
        assert len(result["logp"]) == 8


def test_digests_of_frozen_weights_are_the_same_on_every_mesh(results, world):
    model = add_lora(world.make_model("Phi3"), LoraConfig(rank=2, base_dtype="bfloat16"))
    frozen = {name for name, each in model.named_parameters() if not each.requires_grad}
    alone = tensor_digests((each for each in named_shards(model) if each.name in frozen), group=None)
    assert len(set(alone.values())) == len(alone) > 10
    for result in results:
        assert result["frozen"] == [alone] * 3


def test_the_digest_of_a_shard_is_a_sum_over_places_of_the_whole_tensor_in_chunks_of_any_size(monkeypatch):
    whole = torch.arange(2 * 6 * 5 * 4, dtype=torch.float32).view(2, 6, 5, 4)
    alone = shards._digest(whole, (0, 0, 0, 0), whole.shape)
    boxes = [(0, slice(0, 2)), (0, slice(2, 6)), (1, slice(0, 6))]
    for chunk in (1 << 22, 7, 1):
        monkeypatch.setattr(shards, "CHUNK", chunk)
        assert shards._digest(whole, (0, 0, 0, 0), whole.shape) == alone
        sums = [
            shards._digest(whole[first : first + 1, rows, 1:], (first, rows.start, 1, 0), whole.shape)
            + shards._digest(whole[first : first + 1, rows, :1], (first, rows.start, 0, 0), whole.shape)
            for first, rows in boxes
        ]
        assert sum(sums) % 2**64 == alone
    swapped = whole.flip(0)
    assert shards._digest(swapped, (0, 0, 0, 0), whole.shape) != alone
    scalar = torch.tensor(3.0, dtype=torch.bfloat16)
    assert shards._digest(scalar, (), ()) != shards._digest(scalar + 1, (), ())


@pytest.mark.parametrize("kind", ["dora", "ends", "experts"])
def test_adapters_on_two_ranks_take_the_steps_of_one_process(results, world, kind):
    spec = importlib.util.spec_from_file_location("lifetimes_program", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    logp, squares = program.adapter_steps(world, world.make_examples(), kind)
    for number in range(3):
        for result in results:
            torch.testing.assert_close(result[kind][number][0], logp, rtol=1e-4, atol=1e-5)
        # FSDP and context parallelism shard the merged weights; copies of HSDP hold all of them.
        held = [result[kind][number][1] for result in results]
        assert (held[0] if number == 1 else sum(held)) == pytest.approx(squares, rel=1e-5)


def test_one_gpu_of_two_ranks_is_refused_on_both_before_nccl_is_used(results):
    for result in results:
        assert result["shared"].startswith("each rank needs a GPU of its own: ranks 0, 1 have GPU 0 of here. Start the")


def see_gpus(monkeypatch, num_gpus, *, environment, current=0):
    """A torch that sees `num_gpus`, in an environment of a launcher; returns the devices that are set."""
    chosen = []
    cuda = types.SimpleNamespace(
        device_count=lambda: num_gpus, current_device=lambda: current, set_device=chosen.append
    )
    monkeypatch.setattr(process_group, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: False)  # whatever another test left open
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return chosen


RANK_5_OF_8 = {"RANK": "5", "WORLD_SIZE": "8"}


def test_a_rank_without_local_rank_is_refused_where_it_sees_several_gpus(monkeypatch):
    see_gpus(monkeypatch, 8, environment=RANK_5_OF_8)
    with pytest.raises(
        ValueError, match=r"one of 8 ranks, which see 8 GPUs each.*set LOCAL_RANK \(it is SLURM_LOCALID"
    ):
        process_group.choose_gpu()


def test_a_local_rank_beyond_the_visible_gpus_is_refused_by_name(monkeypatch):
    see_gpus(monkeypatch, 2, environment={**RANK_5_OF_8, "LOCAL_RANK": "5"})
    with pytest.raises(ValueError, match="LOCAL_RANK=5, and this rank sees 2 GPUs, numbered from 0"):
        process_group.choose_gpu()


@pytest.mark.parametrize(
    ("num_gpus", "environment", "current", "expected"),
    [
        (8, {**RANK_5_OF_8, "LOCAL_RANK": "5"}, 0, [5]),
        (1, {**RANK_5_OF_8, "LOCAL_RANK": "5"}, 0, []),  # the launcher has made one GPU visible to each rank
        (8, {}, 0, []),  # a lone process
        (8, {**RANK_5_OF_8, "LOCAL_RANK": "5"}, 3, []),  # the user has chosen
    ],
)
def test_the_gpu_of_a_rank_is_that_of_its_local_rank(monkeypatch, num_gpus, environment, current, expected):
    chosen = see_gpus(monkeypatch, num_gpus, environment=environment, current=current)
    process_group.choose_gpu()
    assert chosen == expected


def test_a_process_group_of_the_users_has_its_gpu_set_too(monkeypatch, world):
    chosen = see_gpus(monkeypatch, 8, environment={"LOCAL_RANK": "2"})
    monkeypatch.setattr(process_group.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(process_group.dist, "get_world_size", lambda: 8)
    process_group.choose_gpu()
    assert chosen == [2]
