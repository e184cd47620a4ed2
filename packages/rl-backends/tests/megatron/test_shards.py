"""Claims about `shards()`: every rank's own memory under Hugging Face's names, and nothing gathered to get there."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from rl_backends import OptimizerConfig
from rl_backends.megatron.config import MegatronConfig

LAYOUTS = {
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def make_model(world, layout, *, tied=True):
    family, other = ("Qwen3Moe", MIXTURE) if layout == "EP2" else ("Qwen2", {})
    return world.make_model(family, pad_token_id=None, tie_word_embeddings=tied, **other)


def one_rank(world, layout, folder, rank):
    from rl_backends.megatron.backend import MegatronBackend

    backend = MegatronBackend(make_model(world, layout), MegatronConfig(**LAYOUTS[layout]))
    with Collectives() as collectives:
        shards = backend.shards()
        told = [describe(shard) for shard in shards]
    addresses = [shard.local.data_ptr() for shard in shards]
    backend.start_training(OptimizerConfig(lr=1e-2), num_steps=1)
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend.forward_backward(examples, loss)
    backend.optim_step()
    backend.save_pretrained(folder / layout)
    after = backend.shards()
    found = {
        "shards": told,
        "collectives": collectives.called,
        "same memory": [shard.local.data_ptr() for shard in after] == addresses,
        "after the step": [[shard.name, shard.local.clone()] for shard in after],
    }
    backend.close()
    return found


def describe(shard):
    return {
        "name": shard.name,
        "shape": list(shard.shape),
        "local": shard.local.clone(),
        "boxes": [[list(box.offsets), list(box.sizes), list(box.local_offsets)] for box in shard.boxes()],
        "contiguous": all(box.of_local(shard.local).is_contiguous() for box in shard.boxes()),
    }


class Collectives:
    """Names of the functions of torch.distributed that were called."""

    NAMES = (
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "broadcast",
        "barrier",
        "reduce",
    )

    def __enter__(self):
        self.called, self._real = [], {name: getattr(dist, name) for name in self.NAMES}
        for name in self.NAMES:
            setattr(dist, name, functools.partial(self._call, name))
        return self

    def __exit__(self, *_):
        for name, real in self._real.items():
            setattr(dist, name, real)

    def _call(self, name, *arguments, **options):
        self.called.append(name)
        return self._real[name](*arguments, **options)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of models as they are after the step, by layout."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def found(layout, world, folder, on_ranks_once):
    return on_ranks_once(functools.partial(one_rank, world, layout, folder), ranks=2)


def slices(offsets, sizes):
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def test_names_and_shapes_are_those_of_hugging_face_and_every_tensor_is_somewhere(found, layout, world):
    expected = {name: list(parameter.shape) for name, parameter in make_model(world, layout).named_parameters()}
    told = {shard["name"]: shard["shape"] for each in found for shard in each["shards"]}
    assert told == expected


def test_boxes_are_the_numbers_of_the_whole_tensor_in_contiguous_memory(found, layout, world):
    weights = {name: parameter.detach() for name, parameter in make_model(world, layout).named_parameters()}
    for shard in itertools.chain.from_iterable(each["shards"] for each in found):
        assert shard["contiguous"], shard["name"]
        for offsets, sizes, local_offsets in shard["boxes"]:
            here, there = shard["local"][slices(local_offsets, sizes)], weights[shard["name"]][slices(offsets, sizes)]
            assert torch.equal(here, there), shard["name"]


def test_matrices_that_are_cut_are_held_once_and_no_rank_holds_a_tensor_twice(found, layout, world):
    counts = {name: torch.zeros(p.shape, dtype=torch.int) for name, p in make_model(world, layout).named_parameters()}
    for each in found:
        own = {name: torch.zeros_like(count) for name, count in counts.items()}
        for shard in each["shards"]:
            for offsets, sizes, _ in shard["boxes"]:
                own[shard["name"]][slices(offsets, sizes)] += 1
        for name, count in own.items():
            assert count.max() <= 1, name
            counts[name] += count
    for name, count in counts.items():
        replicated = {"TP2": count.ndim < 2 and "bias" not in name, "PP2": False, "EP2": "experts" not in name}[layout]
        assert (count == (2 if replicated else 1)).all(), name


def test_nothing_is_gathered(found):
    assert [each["collectives"] for each in found] == [[], []]


def test_the_memory_stays_and_holds_the_weights_of_the_latest_step(found, layout, world, folder):
    import transformers

    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / layout)
    weights = {name: parameter.detach() for name, parameter in saved.named_parameters()}
    first = {name: parameter.detach() for name, parameter in make_model(world, layout).named_parameters()}
    assert any(not torch.equal(weights[name], first[name]) for name in weights)
    for each in found:
        assert each["same memory"]
        boxes = {shard["name"]: [] for shard in each["shards"]}
        for shard in each["shards"]:
            boxes[shard["name"]].append(shard["boxes"])
        for name, local in each["after the step"]:
            for offsets, sizes, local_offsets in boxes[name].pop(0):
                assert torch.equal(local[slices(local_offsets, sizes)], weights[name][slices(offsets, sizes)]), name
