"""Claims about optimizers on two ranks: they take the steps of one process, and decide alike about bad gradients."""

import contextlib
import importlib.util
import math
import os
import signal
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parent / "programs" / "optimizers.py"
RANKS = 2
FSDP, TP = (2, 1), (1, 2)
# Gradients are clipped nowhere: a norm that was reduced in another order differs in its last bit.
ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None, "final_lr_ratio": 0.5}
CLIPPED = {**ADAMW, "max_grad_norm": 1.0}
MUON = {**ADAMW, "name": "muon", "muon": {}}
FP32_MUON = {**MUON, "muon": {"dtype": "float32", "adjust_lr_fn": "original", "nesterov": False}}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}

STEPS = {
    "AdamW, FSDP": {"family": "Qwen3", "mesh": FSDP, "optimizer": ADAMW},
    "AdamW, TP": {"family": "Qwen3", "mesh": TP, "optimizer": ADAMW},
    "AdamW, TP, tied": {"family": "Qwen2", "mesh": TP, "optimizer": {**ADAMW, "implementation": "foreach"}},
    "AdamW, clipped": {"family": "Qwen3", "mesh": FSDP, "optimizer": CLIPPED},
    "Muon, FSDP": {"family": "Qwen3", "mesh": FSDP, "optimizer": MUON},
    "Muon, TP": {"family": "Qwen3", "mesh": TP, "optimizer": MUON},
    "Muon, experts, FSDP": {"family": "Qwen3Moe", "mesh": FSDP, "optimizer": FP32_MUON, "model": MOE},
    "Muon, experts, TP": {"family": "Qwen3Moe", "mesh": TP, "optimizer": FP32_MUON, "model": MOE},
    "Muon, fused rows in the order of the ranks": {"family": "Phi3", "mesh": TP, "optimizer": FP32_MUON},
}
LARGE = {"vocab_size": 256}  # shards of fewer than 4096 elements keep their moments in fp32
EIGHT_BITS = {
    "8 bits, FSDP": {"family": "Qwen3", "mesh": FSDP, "optimizer": {**ADAMW, "name": "adamw_8bit"}, "model": LARGE},
    "8 bits, TP": {"family": "Qwen3", "mesh": TP, "optimizer": {**ADAMW, "name": "adamw_8bit"}, "model": LARGE},
}
HAS_TORCHAO = importlib.util.find_spec("torchao") is not None
BADS = {
    "raise, FSDP": {"mesh": FSDP, "bad": "model.layers.1.mlp.up_proj.weight", "on_nonfinite_gradient": "raise"},
    "skip, FSDP": {"mesh": FSDP, "bad": "model.layers.1.mlp.up_proj.weight", "on_nonfinite_gradient": "skip"},
    "skip, TP": {"mesh": TP, "bad": "model.layers.0.self_attn.o_proj.weight", "on_nonfinite_gradient": "skip"},
    "skip, TP, one of two copies": {"mesh": TP, "bad": "model.norm.weight", "on_nonfinite_gradient": "skip"},
}

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("optimizers_program", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(tmp_path_factory, start_program):
    """What each rank wrote; one launch runs all cases."""
    steps = {**STEPS, **(EIGHT_BITS if HAS_TORCHAO else {})}
    cases = {name: {"claim": "steps", **case} for name, case in steps.items()}
    cases |= {name: {"claim": "nan", "family": "Qwen3", **case} for name, case in BADS.items()}
    cases["forward"] = {"claim": "forward", "family": "Qwen3", "mesh": FSDP}
    for implementation in IMPLEMENTATIONS:
        cases[implementation] = {"claim": "meshes", "family": "Qwen3", "implementation": implementation}
    folder = tmp_path_factory.mktemp("ranks")
    process = start_program(PROGRAM, {"cases": cases, "ranks": RANKS, "folder": str(folder)})
    try:
        assert process.wait(timeout=600) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and its ranks with it
            os.killpg(process.pid, signal.SIGKILL)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(RANKS)]


def plain_steps(program, model, options):
    """The same gradients, by torch's own optimizers on plain parameters; the weights and the norms."""
    decay = options["weight_decay"]
    parameters = dict(model.named_parameters())
    layers = {name for name in parameters if ".layers." in name}
    groups = {(muon, matrix): [] for muon in (False, True) for matrix in (False, True)}
    for name, parameter in parameters.items():
        groups[options.get("name") == "muon" and parameter.ndim > 1 and name in layers, parameter.ndim > 1].append(
            parameter
        )
    adamw = torch.optim.AdamW(
        [
            {"params": groups[False, True], "weight_decay": decay},
            {"params": groups[False, False], "weight_decay": 0.0},
        ],
        lr=options["lr"],
        fused=options.get("implementation") != "foreach",
    )
    muon = OneByOneMuon(groups[True, True], decay=decay, **options.get("muon", {}))
    norms = []
    for step in range(3):
        for name, parameter in parameters.items():
            parameter.grad = program.known_gradient(name, parameter.shape, step=step)
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters.values()])
        norms.append(norm.item())
        if options["max_grad_norm"] is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters.values(), options["max_grad_norm"], norm)
        lr = options["lr"] * (1.0 - 0.5 * step / 2)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        muon.step(lr)
    return {name: parameter.detach() for name, parameter in parameters.items()}, norms


class OneByOneMuon:
    """torch's Muon over each matrix, those of every expert by themselves; in fp32 by the formula."""

    def __init__(self, parameters, *, decay, dtype="bfloat16", adjust_lr_fn="match_rms_adamw", nesterov=True):
        self.slices = [
            (parameter, index)
            for parameter in parameters
            for index in (range(parameter.shape[0]) if parameter.ndim == 3 else [None])
        ]
        self.matrices = [self.part(parameter.detach(), index) for parameter, index in self.slices]
        self.options = {"weight_decay": decay, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
        self.exact = dtype == "float32"
        self.torchs = torch.optim.Muon(self.matrices, **self.options) if self.matrices and not self.exact else None
        self.means = [torch.zeros_like(matrix) for matrix in self.matrices]

    @staticmethod
    def part(tensor, index):
        return tensor if index is None else tensor[index]

    def step(self, lr):
        for matrix, (parameter, index) in zip(self.matrices, self.slices, strict=True):
            matrix.grad = self.part(parameter.grad, index)
        if self.torchs is not None:
            self.torchs.param_groups[0]["lr"] = lr
            self.torchs.step()
        elif self.exact:
            for matrix, mean in zip(self.matrices, self.means, strict=True):
                self.step_in_fp32(matrix, mean, lr=lr)

    def step_in_fp32(self, matrix, mean, *, lr):
        mean.lerp_(matrix.grad, 0.05)
        x = mean / mean.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        rows, columns = matrix.shape
        matrix.mul_(1 - lr * self.options["weight_decay"]).sub_(x, alpha=lr * math.sqrt(max(1, rows / columns)))


@pytest.mark.parametrize("name", STEPS)
def test_two_ranks_take_the_optimizer_steps_of_one_plain_process(world, program, results, name):
    case = STEPS[name]
    expected, norms = plain_steps(program, world.make_model(case["family"], **case.get("model", {})), case["optimizer"])
    is_exact = case["optimizer"] not in (CLIPPED, FP32_MUON)
    tolerance = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-5, "atol": 1e-6}
    for result in (rank[name] for rank in results):
        torch.testing.assert_close(result["weights"], expected, **tolerance)
        assert result["norms"] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("name", ["Muon, FSDP", "Muon, TP", "Muon, fused rows in the order of the ranks"])
def test_ranks_share_the_work_of_muon(world, results, name):
    matrices = [
        each
        for layer, each in world.make_model(STEPS[name]["family"]).named_parameters()
        if each.ndim > 1 and ".layers." in layer
    ]
    counts = [rank[name]["orthogonalized"] for rank in results]
    assert sum(counts) == 3 * len(matrices)  # each once a step, on one rank
    assert abs(counts[0] - counts[1]) <= 3


@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao, of the extra 8bit, is not installed")
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_moments_in_8_bits_take_nearly_the_same_steps(world, program, results, name):
    case = EIGHT_BITS[name]
    expected, _ = plain_steps(program, world.make_model(case["family"], **case["model"]), case["optimizer"])
    for result in (rank[name] for rank in results):
        torch.testing.assert_close(result["weights"], expected, rtol=0, atol=0.3 * case["optimizer"]["lr"])
        apart = {name: not torch.equal(result["weights"][name], expected[name]) for name in expected}
        assert apart["lm_head.weight"]  # it is quantized
        torch.testing.assert_close(result["weights"]["model.norm.weight"], expected["model.norm.weight"])  # it is not


@pytest.mark.parametrize("name", BADS)
def test_a_nan_on_one_rank_stops_every_rank_alike(results, name):
    case = BADS[name]
    for result in (rank[name] for rank in results):
        assert result["unchanged"]
        assert result["cleared"]
        if case["on_nonfinite_gradient"] == "raise":
            assert "the gradient norm of step 2 is nan" in result["message"]
            assert case["bad"] in result["message"]
        else:
            assert (result["message"], result["skipped"], result["nonfinite"]) == ("", 1, [case["bad"]])


def test_weights_left_gathered_by_a_forward_do_not_outlive_the_step(world, program, results):
    model = world.make_model("Qwen3").eval()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.grad = program.known_gradient(name, parameter.shape, step=0)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0).step()
    with torch.no_grad():
        expected = model(input_ids=torch.arange(12).view(2, 6)).logits
    for result in (rank["forward"] for rank in results):
        assert result["norm"] == pytest.approx(norm.item(), rel=1e-6)
        torch.testing.assert_close(result["logits"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parameters_may_lie_on_several_meshes_or_none(program, results, implementation):
    model = program.three_matrices()
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        parameter.grad = program.known_gradient(name, parameter.shape, step=0)
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0).step()
    for result in (rank[implementation] for rank in results):
        assert result["norm"] == pytest.approx(norm.item(), rel=1e-6)
        torch.testing.assert_close(result["weights"], {name: p.detach() for name, p in parameters.items()})
        assert result["groups"] == 3
