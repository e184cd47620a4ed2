"""Claims about loading and exporting on ranks: every mesh holds bit for bit what `from_pretrained` gives."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Phi3": {},
    "Qwen3Moe": MIXTURE,
}
SHAPES = {"FSDP2": [2, 1], "TP2": [1, 2], "FSDP2 x TP2": [2, 2]}


def files(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def exported(world, tmp_path_factory, start_program):
    """Original folders in bfloat16, and what each mesh made of them."""
    folder = tmp_path_factory.mktemp("ranks")
    originals = {}
    for family, overrides in FAMILIES.items():
        originals[family] = str(folder / family)
        world.make_model(family, vocab_size=66, **overrides).to(torch.bfloat16).save_pretrained(originals[family])
    task = {
        "folder": str(folder),
        "families": originals,
        "shapes": list(SHAPES.values()),
        "big": str(folder / "big"),
    }
    process = start_program(Path(__file__).with_name("programs") / "loading.py", task)
    try:
        assert process.wait(timeout=600) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # and the ranks that it was forked into
    return folder


@pytest.mark.parametrize("mesh", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_that_was_loaded_sharded_is_exported_with_the_same_tensors(exported, family, mesh):
    """That each shard equalled `from_pretrained`'s weights was asserted on the ranks."""
    again = exported / f"{family}-{'x'.join(map(str, SHAPES[mesh]))}-bfloat16"
    original, found = files(exported / family), files(again)
    assert found.keys() == original.keys()
    torch.testing.assert_close(found, original, rtol=0, atol=0)
    index = json.loads((again / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    written = sorted(file.name for file in again.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == written
    assert written == [f"model-{at:05}-of-{len(written):05}.safetensors" for at in range(1, len(written) + 1)]
    for name in ("config.json", "generation_config.json"):
        assert json.loads((again / name).read_text()) == json.loads((exported / family / name).read_text())


@pytest.mark.parametrize("mesh", SHAPES)
def test_every_rank_writes_its_share_of_the_files_and_no_other(exported, mesh):
    name = "x".join(map(str, SHAPES[mesh]))
    ranks = range(SHAPES[mesh][0] * SHAPES[mesh][1])
    written = [json.loads((exported / f"Llama-{name}-files-of-rank{rank}.json").read_text()) for rank in ranks]
    there = sorted(path.name for path in (exported / f"Llama-{name}-bfloat16").glob("*.safetensors"))
    assert sorted(file for files in written for file in files) == there
    assert max(map(len, written)) - min(map(len, written)) <= 1


def test_transformers_loads_an_export(exported):
    import transformers

    for family in FAMILIES:
        model = transformers.AutoModelForCausalLM.from_pretrained(exported / f"{family}-2x2-bfloat16")
        original = transformers.AutoModelForCausalLM.from_pretrained(exported / family)
        torch.testing.assert_close(model.state_dict(), original.state_dict(), rtol=0, atol=0)


def test_no_rank_ever_holds_the_model(exported):
    """Peaks of resident memory on two ranks, pages of mapped files among them: float32 from files in bfloat16.

    Half of the model and half of its files are three quarters of `whole`. A rank that held the model would have the
    whole beside its half, and all of the files: two times `whole`.
    """
    for rank in range(2):
        report = json.loads((exported / f"big-rank{rank}.json").read_text())
        assert report["whole"] / 2 < report["loaded"] < report["whole"]
        assert report["exported"] < report["whole"]
