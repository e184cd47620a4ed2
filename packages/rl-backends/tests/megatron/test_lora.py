"""Claims about adapters on Megatron: the steps, files and merged weights are those of the DTensor backend's."""

import functools

import pytest
import torch

from rl_backends import CheckpointError, DTensorBackend, DTensorConfig, ModelError, OptimizerConfig
from rl_backends.config import LoraConfig
from rl_backends.megatron.config import MegatronConfig

ADAMW = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)
ALL, SOME = LoraConfig(rank=4, alpha=8), LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "v_proj", "down_proj"))
TP, PP, EP = (f"{name}_model_parallel_size" for name in ("tensor", "pipeline", "expert"))
VP, SP = "virtual_pipeline_model_parallel_size", {"sequence_parallel": True}
CASES = {  # family, adapters, ranks, configuration
    "1": ("Qwen3", ALL, 1, {}),
    "1, some, layers recomputed": ("Qwen3", SOME, 1, {"recompute_granularity": "full"}),
    "TP2": ("Qwen3", ALL, 2, {TP: 2}),
    "TP2+SP, packed, some": ("Qwen3", SOME, 2, {TP: 2, **SP, "sequence_packing": True}),
    "PP2": ("Qwen3", ALL, 2, {PP: 2, "micro_batch_size": 2}),
    "PP2, 2 chunks": ("Qwen3, 4 layers", ALL, 2, {PP: 2, VP: 2, "micro_batch_size": 2}),
    "CP2": ("Qwen3", SOME, 2, {"context_parallel_size": 2}),
    "DP2, distributed optimizer": ("Qwen3", ALL, 2, {"use_distributed_optimizer": True}),
    "EP2": ("Qwen3Moe", ALL, 2, {EP: 2}),
    "EP2 within TP2+SP": ("Qwen3Moe", ALL, 2, {EP: 2, TP: 2, **SP}),
}
QUICK = ("TP2+SP, packed, some", "PP2", "PP2, 2 chunks")
CASES_OR_SLOW = [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def make_model(world, family):
    name, _, layers = family.partition(", ")
    return world.make_model(name, pad_token_id=None, num_hidden_layers=4 if layers else 2)


def three_steps(world, backend):
    """Log-probabilities and norms on the way."""
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend.start_training(ADAMW, num_steps=3)
    found = []
    for _ in range(3):
        backend.forward_backward(examples, loss)
        norm = backend.optim_step()
        found.append(torch.cat([torch.tensor([norm]), backend.logp(examples).flatten()]))
    return torch.stack(found)


@pytest.fixture(scope="module")
def truth(world, tmp_path_factory, on_ranks_once):
    """What the DTensor backend comes to on one rank, and a folder with its adapter and its merged model."""
    made = {}

    def of(family, config):
        if (family, config) not in made:
            folder = tmp_path_factory.mktemp("dtensor")

            def run(rank):
                backend = DTensorBackend(make_model(world, family), DTensorConfig(lora_cfg=config), seed=5)
                before = backend.logp(world.make_examples())
                steps = three_steps(world, backend)
                backend.save_adapter(folder / "adapter", base_model_name="base")
                backend.save_pretrained(folder / "merged")
                return before, steps

            made[family, config] = *on_ranks_once(run, ranks=1)[0], folder
        return made[family, config]

    return of


@pytest.mark.parametrize("case", CASES_OR_SLOW)
def test_steps_adapters_and_merged_weights_are_those_of_the_dtensor_backend(world, tmp_path, on_ranks, truth, case):
    from safetensors.torch import load_file

    family, lora, ranks, config = CASES[case]
    before, steps, folder = truth(family, lora)
    merged = load_file(folder / "merged" / "model.safetensors")

    def run(rank):
        import transformers

        from rl_backends.megatron.backend import MegatronBackend

        examples = world.make_examples()
        backend = MegatronBackend(make_model(world, family), MegatronConfig(lora_cfg=lora, **config), seed=5)
        torch.testing.assert_close(three_steps(world, backend), steps, rtol=1e-5, atol=1e-5)
        backend.save_adapter(tmp_path / "adapter", base_model_name="base")
        backend.save_pretrained(tmp_path / "merged")
        reference = backend.freeze_reference(without_adapters=True)
        torch.testing.assert_close(reference.logp(examples), before, rtol=1e-5, atol=1e-5)
        copied = backend.freeze_reference()
        assert torch.equal(copied.logp(examples), backend.logp(examples))
        if family != "Qwen3Moe":
            weights = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged").state_dict()
            for held in backend.shards():
                for box in held.boxes():
                    torch.testing.assert_close(
                        box.of_local(held.local), box.of_whole(weights[held.name]), rtol=1e-5, atol=1e-5
                    )
        backend.close()

    on_ranks(run, ranks=ranks)
    ours, theirs = (load_file(each / "adapter" / "adapter_model.safetensors") for each in (tmp_path, folder))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (tmp_path / "adapter" / "adapter_config.json").read_text() == (
        folder / "adapter" / "adapter_config.json"
    ).read_text()
    torch.testing.assert_close(load_file(tmp_path / "merged" / "model.safetensors"), merged, rtol=1e-5, atol=1e-5)


def test_a_folder_gives_the_adapters_that_a_model_in_memory_gets_and_resumes(world, tmp_path, on_ranks):
    make_model(world, "Qwen3").save_pretrained(tmp_path / "model")

    def run(rank):
        from rl_backends.megatron.backend import MegatronBackend

        examples = world.make_examples()
        config = MegatronConfig(lora_cfg=ALL, **{TP: 2})
        backend = MegatronBackend.from_pretrained(str(tmp_path / "model"), config, seed=5)
        steps = three_steps(world, backend)
        backend.save_checkpoint(tmp_path / "checkpoint")
        logp = backend.logp(examples)
        assert "LoRA on 14 layers: " in backend.explain()
        backend.close()
        backend = MegatronBackend(make_model(world, "Qwen3"), config, seed=5)
        torch.testing.assert_close(three_steps(world, backend), steps, rtol=1e-6, atol=1e-6)
        backend.close()
        backend = MegatronBackend(make_model(world, "Qwen3"), config, seed=7)
        backend.start_training(ADAMW, num_steps=3)
        backend.load_checkpoint(tmp_path / "checkpoint")
        assert torch.equal(backend.logp(examples), logp)
        backend.close()

    on_ranks(run, ranks=2)


RESUMED = {  # ranks, configuration
    "1": (1, {}),
    "TP2, bfloat16": (2, {TP: 2, "precision": "bfloat16"}),
    "DP2, distributed optimizer": (2, {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("case", RESUMED)
def test_a_checkpoint_of_adapters_holds_no_frozen_weight_and_goes_on_from_the_same_base_alone(
    world, tmp_path, on_ranks, case
):
    ranks, config = RESUMED[case]
    lora = LoraConfig(rank=4, alpha=8, base_dtype=config.get("precision", "float32"))

    def run(rank):
        from rl_backends.megatron.backend import MegatronBackend

        examples = world.make_examples()
        loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())

        def start(*, seed):
            model = world.make_model("Qwen3", seed=seed, pad_token_id=None)
            backend = MegatronBackend(model, MegatronConfig(lora_cfg=lora, **config), seed=seed)
            backend.start_training(ADAMW, num_steps=4)
            return backend

        def step(backend):
            backend.forward_backward(examples, loss)
            return backend.optim_step()

        backend = start(seed=0)
        step(backend)
        backend.save_checkpoint(tmp_path / "step-1")
        expected = step(backend), backend.logp(examples)
        backend.close()

        resumed = start(seed=0)
        with torch.no_grad():
            for held in resumed._distributed.adapters.trainable():
                held.parameter.fill_(7.0)
        resumed.load_checkpoint(tmp_path / "step-1")
        assert (step(resumed), resumed.version) == (expected[0], 2)
        assert torch.equal(resumed.logp(examples), expected[1])
        resumed.close()

        other = start(seed=1)
        before = [parameter.clone() for parameter in other.model.parameters()]
        with pytest.raises(CheckpointError, match="frozen weights that they were trained on are not those of this"):
            other.load_checkpoint(tmp_path / "step-1")
        assert all(map(torch.equal, other.model.parameters(), before))
        other.close()

    on_ranks(run, ranks=ranks)
    held = "".join(path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*.safetensors"))
    assert "weights/model.layers.0.self_attn.q_proj.lora_A.default.weight" in held
    assert "base_layer" not in held
    assert "weights/lm_head.weight" not in held


@pytest.mark.parametrize("family", ["Qwen3", pytest.param("Qwen3Moe", marks=pytest.mark.slow)])
def test_adapters_saved_by_one_backend_go_on_in_the_other(world, tmp_path, on_ranks, family):
    config = {TP: 2} if family == "Qwen3" else {EP: 2}

    def run(rank):
        from rl_backends.megatron.backend import MegatronBackend

        examples = world.make_examples()

        def start(kind, *, seed):
            if kind == "dtensor":
                return DTensorBackend(make_model(world, family), DTensorConfig(lora_cfg=ALL), seed=seed)
            return MegatronBackend(make_model(world, family), MegatronConfig(lora_cfg=ALL, **config), seed=seed)

        for one, other in (("dtensor", "megatron"), ("megatron", "dtensor")):
            backend = start(one, seed=5)
            three_steps(world, backend)
            backend.save_checkpoint(tmp_path / one)
            logp = backend.logp(examples)
            backend.close()
            backend = start(other, seed=6)
            backend.start_training(ADAMW, num_steps=3)
            backend.load_checkpoint(tmp_path / one)
            torch.testing.assert_close(backend.logp(examples), logp, rtol=1e-5, atol=1e-5)
            backend.close()

    on_ranks(run, ranks=2)


def test_what_has_no_adapters_or_cannot_have_them_is_refused(world, imported):
    from rl_backends.megatron.backend import MegatronBackend

    with pytest.raises(ValueError, match="Transformer Engine's read their weights past torch"):
        MegatronConfig(lora_cfg=ALL, device="cuda")
    with pytest.raises(ValueError, match="use_dora=True is the DTensor backend's"):
        MegatronConfig(lora_cfg=LoraConfig(use_dora=True))
    with pytest.raises(ValueError, match=r"lora_cfg\.base_dtype='float32' with precision='bfloat16'"):
        MegatronConfig(lora_cfg=ALL, precision="bfloat16")
    backend = MegatronBackend(make_model(world, "Qwen3"), MegatronConfig())
    for what in (
        lambda: backend.save_adapter("adapter", base_model_name="base"),
        lambda: backend.freeze_reference(without_adapters=True),
    ):
        with pytest.raises(ModelError, match="this policy has no adapters"):
            what()
    backend.close()
