"""Claims about checkpoints of Megatron over ranks: any layout goes on from what another wrote, bit for bit."""

import functools
import json

import pytest
import torch
from safetensors import safe_open

from rl_backends import OptimizerConfig
from rl_backends.megatron.config import MegatronConfig

# megatron-core 0.16 names collectives as torch did before 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),  # what it says of its own calls
]

LAYOUTS = {
    "alone": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp2 in chunks": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "dp2": (2, {"use_distributed_optimizer": True}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2 shared": (2, {"expert_model_parallel_size": 2, "use_distributed_optimizer": True}),
    "tp2 dp2": (4, {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True}),
}
SIZES = {"Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}}
OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)


class Run:
    """A backend on a layout, in training."""

    def __init__(self, world, family, layout, *, seed, precision="float32", **sizes):
        from rl_backends.megatron.backend import MegatronBackend

        model = world.make_model(family, seed=seed, **SIZES.get(family, {}), **sizes)
        self.backend = MegatronBackend(model, MegatronConfig(precision=precision, **LAYOUTS[layout][1]))
        self.backend.start_training(OPTIMIZER, num_steps=10)

    def step(self, *, times=1):
        """Steps along gradients that are a function of each weight, and so the same on every layout."""
        from rl_backends.megatron.cpu_compat import cpu_compat

        backend, optimizers = self.backend, self.backend._optimizers
        for _ in range(times):
            backend.version += 1
            with cpu_compat(), torch.no_grad():
                for parameter in backend.model.parameters():
                    parameter.main_grad.copy_(1e-2 * torch.sin(parameter.float() * backend.version))
                optimizers.inner.prepare_grads()
            optimizers.step()
            optimizers.zero_grad()
        return self


def numbers_in(folder):
    """Every tensor of a checkpoint, whole, put together without help of what is tested; those of this process apart."""
    found = {}
    for name, entry in json.loads((folder / "tensors.json").read_text()).items():
        if name.startswith("rng/"):
            continue
        found[name] = torch.full(entry["shape"], float("nan"), dtype=getattr(torch, entry["dtype"]))
        for box in entry["boxes"]:
            with safe_open(folder / box["file"], framework="pt") as file:
                part = file.get_tensor(f"{name}@{','.join(map(str, box['offsets']))}")
            ends = (start + size for start, size in zip(box["offsets"], box["sizes"], strict=True))
            found[name][tuple(slice(*each) for each in zip(box["offsets"], ends, strict=True))] = part
    return found


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.fixture(scope="module")
def written(on_ranks_once, world, tmp_path_factory):
    """`written(family, layout)`: a folder with `saved`, a checkpoint after two steps, and `after`, two steps later."""

    @functools.cache
    def written(family, layout, **options):
        folder = tmp_path_factory.mktemp("written")

        def write(rank):
            run = Run(world, family, layout, seed=0, **options).step(times=2)
            run.backend.save_checkpoint(folder / "saved", extra={"family": family})
            run.step(times=2).backend.save_checkpoint(folder / "after")
            run.backend.close()

        on_ranks_once(write, ranks=LAYOUTS[layout][0])
        return folder

    return written


@pytest.mark.parametrize(
    ("family", "source", "target", "options"),
    [
        ("Qwen3", "tp2 dp2", "pp2", {"precision": "bfloat16"}),
        ("Llama", "pp2", "pp2", {"precision": "bfloat16", "tie_word_embeddings": True}),
        ("Llama", "pp2 in chunks", "pp2", {"precision": "bfloat16", "num_hidden_layers": 4}),
        ("Llama", "pp2", "pp2 in chunks", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
        ("Qwen3Moe", "ep2", "ep2 shared", {}),
        ("Qwen3Moe", "ep2", "alone", {}),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("Qwen3", "tp2", "alone", {}),
                ("Qwen3", "tp2", "pp2", {}),
                ("Qwen3", "dp2", "alone", {}),
                ("Qwen3", "tp2 dp2", "tp2", {"precision": "bfloat16"}),
                ("Llama", "pp2", "tp2 dp2", {"precision": "bfloat16", "tie_word_embeddings": True}),
                ("Qwen3Moe", "ep2 shared", "alone", {"precision": "bfloat16"}),
            )
        ),
    ],
    ids=lambda value: " ".join(map(str, value.values())) or "float32" if isinstance(value, dict) else value,
)
def test_any_layout_goes_on_from_what_another_wrote_bit_for_bit(
    on_ranks, world, written, tmp_path, family, source, target, options
):
    folder = written(family, source, **options)

    def read(rank):
        run = Run(world, family, target, seed=1, **options)
        state = run.backend.load_checkpoint(folder / "saved")
        weights = {name: tensor.clone() for name, tensor in run.backend._gatherer.tensors()}
        run.backend.save_checkpoint(tmp_path / "again")
        run.step(times=2).backend.save_checkpoint(tmp_path / "after")
        run.backend.close()
        return {"version": state.version, "extra": state.extra, "weights": weights}

    ranks = on_ranks(read, ranks=LAYOUTS[target][0])
    saved = numbers_in(folder / "saved")
    for rank in ranks:
        assert (rank["version"], rank["extra"]) == (2, {"family": family})
    dtype = getattr(torch, options.get("precision", "float32"))
    assert_same(
        {f"weights/{name}": weight for name, weight in ranks[0]["weights"].items()},
        {name: weight.to(dtype) for name, weight in saved.items() if name.startswith("weights/")},
    )
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}  # masters, where the model has 16 bits
    assert_same(numbers_in(tmp_path / "again"), saved)
    assert_same(numbers_in(tmp_path / "after"), numbers_in(folder / "after"))
