"""Claims about value and reward heads on Megatron: what they say, and its gradients, are those of one plain model."""

import functools
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from rl_backends import ModelError
from rl_backends.megatron.config import MegatronConfig

HERE = Path(__file__).parent
TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
MESHES = {
    "1": (1, {}),
    "1, packed": (1, {"sequence_packing": True, "micro_batch_size": 4}),
    "DP2, distributed optimizer": (2, {"use_distributed_optimizer": True}),
    "TP2": (2, {TP: 2}),
    "TP2+SP, packed": (2, {TP: 2, "sequence_parallel": True, "sequence_packing": True}),
    "PP2": (2, {PP: 2, "micro_batch_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
}


def module_of(path):
    name = f"of_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.mark.parametrize("mesh", MESHES)
def test_values_scores_and_their_gradients_are_those_of_one_plain_model(world, on_ranks, mesh):
    heads = module_of(HERE.parent / "programs" / "heads.py")
    plain = module_of(HERE.parent / "test_heads.py").plain_classifier
    ranks, config = MESHES[mesh]

    def run(rank):
        from rl_backends import OptimizerConfig
        from rl_backends.megatron.backend import MegatronBackend

        expected = plain(world, heads, family="Qwen3", rows=5)
        backend = MegatronBackend(heads.make_classifier("Qwen3"), MegatronConfig(**config))
        backend.start_training(OptimizerConfig(lr=1e-3), num_steps=4)
        examples = world.make_examples(rows=5)
        torch.testing.assert_close(backend.value(examples), expected["values"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backend.score(examples), expected["scores"], rtol=1e-5, atol=1e-5)
        for output, loss in heads.LOSSES.items():
            of_all = functools.partial(loss, num_tokens=examples.trainable.sum())
            sums = backend.forward_backward(examples, of_all, output=output)
            torch.testing.assert_close(sums["loss"].double(), expected[output]["loss"], rtol=1e-5, atol=1e-5)
            found = gradients_by_part(backend, expected[output]["gradients"])
            assert found
            backend._clear_gradient()
        with pytest.raises(ModelError, match="has no language-model head"):
            backend.logp(examples)
        backend.close()

    def gradients_by_part(backend, truth):
        from rl_backends.megatron.gradients import summed_gradients

        compared = 0
        model, optimizers = backend._distributed, backend._optimizers
        boxes = {(held.name, box.offsets): box for held in model.held for box in held.parts}
        for name, offsets, part in summed_gradients(model, optimizers):
            box = boxes.get((name, offsets))
            if box is not None and part.shape == torch.Size(box.sizes):  # a share of a distributed optimizer is not one
                torch.testing.assert_close(part, box.of_whole(truth[name]), rtol=1e-4, atol=1e-5, msg=name)
                compared += 1
        return compared

    on_ranks(run, ranks=ranks)


def test_a_reward_model_begins_from_a_language_models_folder_and_is_saved(world, tmp_path, on_ranks):
    import transformers

    world.make_model("Qwen3", pad_token_id=0).save_pretrained(tmp_path / "model")

    def run(rank):
        from rl_backends import DTensorBackend, DTensorConfig
        from rl_backends.megatron.backend import MegatronBackend

        asked = {"head": "sequence_classification", "new_head": True, "seed": 3}
        backend = MegatronBackend.from_pretrained(str(tmp_path / "model"), MegatronConfig(**{PP: 2}), **asked)
        backend.save_pretrained(tmp_path / "reward model")
        scores = backend.score(world.make_examples())
        backend.close()
        plain = DTensorBackend.from_pretrained(str(tmp_path / "model"), DTensorConfig(), **asked)
        torch.testing.assert_close(scores, plain.score(world.make_examples()), rtol=1e-5, atol=1e-5)
        plain.close()

    on_ranks(run, ranks=2)
    saved = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward model")
    assert saved.score.weight.abs().max() > 0
