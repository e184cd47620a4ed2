"""Claims about adapters over ranks: however the model is sharded, they are those of peft on one process."""

import importlib.util
from pathlib import Path

import pytest
import torch

DEFAULTS = {
    "model": {},
    "lora": {"rank": 4, "alpha": 8},
    "tied": False,
    "replicate": 1,
    "tp": 1,
    "sequence_parallel": False,
    "checkpointing": None,
    "dtypes": {},
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
CASES = {
    "fsdp": {"family": "Qwen3", "checkpointing": "full"},
    "hsdp": {"family": "Llama", "replicate": 2, "lora": {"rank": 3, "alpha": 6, "use_rslora": True}},
    "frozen-bfloat16": {
        "family": "Qwen3",
        "lora": {"rank": 4, "alpha": 8, "base_dtype": "bfloat16", "target_modules": ["layers.1.self_attn.*_proj"]},
        "dtypes": {"param_dtype": "float32", "reduce_dtype": "float32"},
    },
    "tensor-parallel-mixture": {"family": "Qwen3Moe", "model": MIXTURE, "tp": 2},
    "tensor-sequence-parallel-tied": {"family": "Gemma3", "tied": True, "tp": 2, "sequence_parallel": True},
    "tensor-parallel-fused": {"family": "Phi3", "tp": 2},
}
PROGRAM = Path(__file__).parent / "programs" / "lora.py"


def load_program():
    spec = importlib.util.spec_from_file_location("lora_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def program():
    return load_program()


@pytest.fixture(scope="module")
def results(tmp_path_factory, start_program):
    """Every case on two ranks, in one launch."""
    folder = tmp_path_factory.mktemp("lora")
    cases = {name: {**DEFAULTS, **case} for name, case in CASES.items()}
    tasks = [{"rank": rank, "ranks": 2, "folder": str(folder), "cases": cases} for rank in range(2)]
    processes = [start_program(PROGRAM, task) for task in tasks]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return {
        name: [torch.load(folder / name / f"rank{rank}.pt", weights_only=True) for rank in range(2)] for name in cases
    }


def plain(world, program, case):
    """peft on one process, with the same numbers."""
    import peft

    model = program.make_model(world, case)
    lora = case["lora"]
    if lora.get("base_dtype") == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    ends = {"Phi3": ["qkv_proj", "gate_up_proj"]}.get(case["family"], ["q_proj", "k_proj", "v_proj"])
    ends += ["o_proj"] if case["family"] == "Qwen3Moe" else ["o_proj", "down_proj"]
    ends += ["gate_proj", "up_proj"] if case["family"] in ("Qwen3", "Llama", "Gemma3") else []
    regex = r".*\.1\.self_attn\..*_proj" if "target_modules" in lora else None
    config = peft.LoraConfig(
        r=lora["rank"],
        lora_alpha=lora["alpha"],
        use_rslora=lora.get("use_rslora", False),
        target_modules=regex or ends,
    )
    peft.inject_adapter_in_model(config, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(program.adapter_value(name, parameter.shape))
    return model


def steps(program, model):
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **program.ADAMW)
    first = None
    for _ in range(program.STEPS):
        program.loss_of(model, torch.arange(len(program.TOKENS))).backward()
        first = first or {name: p.grad.clone() for name, p in trained.items()}
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: p.detach() for name, p in trained.items()}


def adapters_of(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


def frozen_of(tensors):
    return {name: tensor for name, tensor in tensors.items() if ".lora_" not in name}


@pytest.fixture(scope="module", params=CASES)
def compared(request, world, program, results):
    case = {**DEFAULTS, **CASES[request.param]}
    return case, plain(world, program, case), results[request.param]


def test_logp_gradients_and_three_steps_are_those_of_peft(program, compared):
    _, model, ranks = compared
    with torch.no_grad():
        logp = program.token_logp(model, program.TOKENS)
    gradients, adapters = steps(program, model)
    for result in ranks:
        torch.testing.assert_close(result["logp"], logp, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(result["gradients"], gradients, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(adapters_of(result["after"]), adapters, rtol=1e-4, atol=1e-5)


def test_training_leaves_the_frozen_weights_bit_for_bit(compared):
    case, model, ranks = compared
    dtype = getattr(torch, case["lora"].get("base_dtype", "float32"))
    loaded = {name: p.detach().to(dtype) for name, p in model.named_parameters() if ".lora_" not in name}
    for result in ranks:
        assert all(torch.equal(loaded[name], tensor) for name, tensor in frozen_of(result["before"]).items())
        torch.testing.assert_close(frozen_of(result["after"]), frozen_of(result["before"]), rtol=0, atol=0)


def test_without_adapters_the_policy_is_the_model_that_it_began_with(world, program, compared):
    case, _, ranks = compared
    model = program.make_model(world, case)
    if case["lora"].get("base_dtype") == "bfloat16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        logp = program.token_logp(model, program.TOKENS)
    for result in ranks:
        torch.testing.assert_close(result["reference"], logp, rtol=1e-5, atol=1e-5)
        assert (result["reference"] - result["logp"]).abs().max() > 1e-3


def test_merged_weights_are_computed_from_the_frozen_ones_in_float32(compared):
    case, _, ranks = compared
    scaling = case["lora"]["alpha"] / case["lora"]["rank"] ** (0.5 if case["lora"].get("use_rslora") else 1)
    for result in ranks:
        after = result["after"]
        layers = [name.removesuffix(".lora_A.default.weight") for name in after if ".lora_A." in name]
        assert len(layers) == {"Qwen3Moe": 8, "Phi3": 8}.get(
            case["family"], 4 if "target_modules" in case["lora"] else 14
        )
        for layer in layers:
            base = after[f"{layer}.base_layer.weight"]
            delta = after[f"{layer}.lora_B.default.weight"] @ after[f"{layer}.lora_A.default.weight"]
            expected = (base.float() + delta * scaling).to(base.dtype)
            half = torch.finfo(base.dtype).eps
            torch.testing.assert_close(result["merged"][f"{layer}.weight"], expected, rtol=2 * half, atol=1e-6)
            torch.testing.assert_close(result["exported"][f"{layer}.weight"], expected, rtol=2 * half, atol=1e-6)
        assert result["merged"].keys() == result["exported"].keys()
        assert not any("base_layer" in name or "lora" in name for name in result["merged"])


def test_merged_weights_stay_the_same_tensors_and_lie_where_the_frozen_ones_lie(compared):
    _, _, ranks = compared
    for result in ranks:
        assert result["same"]
        assert all(result["layout"].values())
        assert result["layout"]
    adapted = {n.replace(".base_layer", ""): t for n, t in ranks[0]["after"].items() if ".base_layer.weight" in n}
    held = sum(result["extra_bytes"] for result in ranks)
    assert held >= sum(tensor.nbytes for tensor in adapted.values())


def test_first_values_depend_on_the_seed_and_not_on_the_mesh(world, program, compared):
    from rl_backends.lora.inject import add_lora

    case, _, ranks = compared
    model = add_lora(program.make_model(world, case), program.lora_config(case["lora"]), seed=7)
    expected = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    for result in ranks:
        torch.testing.assert_close(result["first"], expected, rtol=0, atol=0)


def test_a_saved_adapter_has_the_bits_that_the_ranks_hold(compared):
    _, _, ranks = compared
    for result in ranks:
        torch.testing.assert_close(result["saved"], result["trained"], rtol=0, atol=0)
