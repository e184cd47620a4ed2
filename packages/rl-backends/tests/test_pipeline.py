"""Claims about layers over ranks: what two stages save, resume, load and read is what one process does.

That their steps are those of one plain process is in the table of parity.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

PROGRAM = Path(__file__).parent / "programs" / "pipeline.py"
CONFIG = {"pipeline_parallel_size": 2, "sequence_packing": True, "micro_batch_size": 2}


@pytest.fixture(scope="module")
def folder(start_program, tmp_path_factory):
    """What two ranks have written."""
    folder = tmp_path_factory.mktemp("pipeline")
    logs = [folder / f"{rank}.log" for rank in range(2)]
    tasks = [{"rank": rank, "folder": str(folder), "config": CONFIG} for rank in range(2)]
    ranks = [start_program(PROGRAM, task, log=log) for task, log in zip(tasks, logs, strict=True)]
    try:
        codes = [rank.wait(500) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return folder


def weights(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.fixture(scope="module")
def alone(world, folder):
    """The same steps in one process, from its own model and from the checkpoint of two stages."""
    spec = importlib.util.spec_from_file_location("pipeline_program", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    config = {**CONFIG, "pipeline_parallel_size": 1}
    examples, found = world.make_examples(), {}
    for name, seed in (("went-on", 0), ("resumed", 1)):
        backend = program.backend_of(world.make_model("Qwen3", tie_word_embeddings=True, seed=seed), config)
        if name == "resumed":
            backend.load_checkpoint(folder / "checkpoint")
        else:
            found["sums"], found["norm"] = program.step(world, backend, examples)
        program.step(world, backend, examples)
        found |= {name: {key: p.detach().clone() for key, p in backend.model.named_parameters()}}
        found |= {"logp": backend.logp(examples), "entropy": backend.entropy(examples)}
        found["topk"] = backend.topk_logits(examples, 3).logp
        backend.close()
    return found


def test_a_run_that_resumed_is_the_run_that_never_stopped_bit_for_bit(folder):
    assert_same_bits(weights(folder / "resumed"), weights(folder / "went-on"))


def test_one_process_goes_on_from_the_checkpoint_of_two_stages(folder, alone):
    saved = weights(folder / "went-on")
    for name, tensor in alone["resumed"].items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-5, atol=1e-6)


def test_a_saved_folder_is_whole_and_stages_load_it_bit_for_bit(folder, alone):
    saved = weights(folder / "went-on")
    assert saved.keys() == alone["went-on"].keys()
    assert_same_bits(weights(folder / "loaded"), saved)


def test_every_rank_reads_what_one_process_reads(folder, alone):
    for rank in range(2):
        found = torch.load(folder / f"{rank}.pt", weights_only=True)
        for name in ("logp", "entropy", "topk"):
            torch.testing.assert_close(found[name], alone[name], rtol=1e-5, atol=1e-5)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        for name, value in alone["sums"].items():
            torch.testing.assert_close(found["sums"][name], value, rtol=1e-5, atol=1e-6)


def test_a_loss_that_raises_on_the_last_stage_is_raised_on_all_and_changes_nothing(folder):
    said = [torch.load(folder / f"{rank}.pt", weights_only=True)["failed"] for rank in range(2)]
    assert said == ["RankError: rank 1 failed: ZeroDivisionError: no rewards", "ZeroDivisionError: no rewards"]
    assert_same_bits(weights(folder / "after-failure"), weights(folder / "went-on"))
