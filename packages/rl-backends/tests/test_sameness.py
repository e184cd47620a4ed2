"""Claims about what must be the same: models and batches on every rank, and the numbers of a reference."""

from pathlib import Path

import pytest
import torch

from rl_backends import DTensorBackend, DTensorConfig

PROGRAM = Path(__file__).parent / "programs" / "sameness.py"
MESHES = ("FSDP2", "HSDP", "TP2")
MODELS = {
    "seed": "every rank must be given the same weights, and model.embed_tokens.weight of rank 1 is not what rank 0 has",
    "one number": "model.norm.weight of rank 1 is not what rank 0 has",
    "buffer": "model.rotary_emb.inv_freq of rank 1 is not what rank 0 has",
    "layers": "the same model, and these are different ones: rank 0: LlamaForCausalLM of 14 tensors",
    "meta": "rank 1: LlamaForCausalLM of 23 tensors, 19816 numbers, float32, on the meta device",
    "logits": "LlamaForCausalLM gives log-probabilities from its own logits that differ by",
}
OTHER_BATCHES = "every rank must be given the whole batch, and the ranks were given different ones (rank 0: {} rows"
BATCHES = {
    "half": OTHER_BATCHES.format(3),
    "tokens": OTHER_BATCHES.format(6),
    "lengths": OTHER_BATCHES.format(6),
    "trainable": OTHER_BATCHES.format(6),
    "too large": "row 3: token 4 has the id 67, and the model's ids are from 0 to 66",
    "negative": "row 5: token 0 has the id -1, and the model's ids are from 0 to 66",
    "no rows": "the batch has no rows (B=0)",
}
MIXTURE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}


@pytest.fixture(scope="module")
def results(tmp_path_factory, start_program):
    folder = tmp_path_factory.mktemp("sameness")
    processes = [start_program(PROGRAM, {"rank": rank, "folder": str(folder)}) for rank in range(2)]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_with_other_models_are_refused_in_the_same_words(results, mesh, name):
    first, second = (result[f"{mesh}, model, {name}"] for result in results)
    assert first == second
    assert first.startswith("ModelError: ")
    assert MODELS[name] in first


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("call", ["logp", "forward_backward"])
@pytest.mark.parametrize("name", BATCHES)
def test_batches_that_differ_or_cannot_be_read_are_refused_on_every_rank(results, mesh, call, name):
    first, second = (result[f"{mesh}, {call}, {name}"] for result in results)
    assert first == second
    assert first.startswith("BatchError: ")
    assert BATCHES[name] in first


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    ("name", "what"), [("same", "nothing"), ("others", "different ones"), ("none", "different ones")]
)
def test_ranks_that_ask_about_other_words_are_refused_on_every_rank(results, mesh, name, what):
    first, second = (result[f"{mesh}, words, {name}"] for result in results)
    assert first == second
    assert what in first


@pytest.mark.parametrize("mesh", MESHES)
def test_a_backend_computes_as_ever_after_it_has_refused(world, results, mesh):
    expected = world.plain_logp(world.make_model("Llama").eval(), world.make_examples(rows=6)).detach()
    for result in results:
        torch.testing.assert_close(result[f"{mesh}, logp"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offload", [False, True])
def test_a_reference_has_the_buffers_of_the_policy_also_those_changed_since(world, tmp_path, offload):
    model = world.make_model("Glm4Moe", **MIXTURE)
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).copy_(torch.tensor([3.0, -3.0, 1.0, 0.0]))
    model.save_pretrained(tmp_path / "model")
    examples = world.make_examples()
    policy = DTensorBackend.from_pretrained(str(tmp_path / "model"), DTensorConfig())
    loaded = policy.freeze_reference(offload=offload)
    before = policy.logp(examples)
    torch.testing.assert_close(loaded.logp(examples), before)
    policy.model.get_buffer(bias).neg_()
    policy.model.model.rotary_emb.register_buffer("inv_freq", policy.model.model.rotary_emb.inv_freq * 0.5)
    changed = policy.freeze_reference(offload=offload)
    after = policy.logp(examples)
    assert float((after - before).abs().max()) > 1e-3
    torch.testing.assert_close(changed.logp(examples), after)
    torch.testing.assert_close(loaded.logp(examples), before)
