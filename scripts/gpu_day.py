"""What a GPU does with this checkout, in at most nine minutes: every `gpu` test, and the benchmarks that matter.

    python scripts/gpu_day.py                      on a machine with an NVIDIA GPU
    python scripts/gpu_day.py --dry-run            on a CPU: the same programs at toy sizes, so that typos show before
    python scripts/gpu_day.py --parts logp refit   some parts only

It runs from the checkout, with the torch that is installed, and without network. Every part is a process of its own
with a deadline: one that fails, hangs or finds something missing is named, with its reason, and the others go on.
Writes `benchmarks/results/gpu-<name>-<date>.json` and prints a table in Markdown; a dry run writes only to `--out`.
"""

# It runs with whatever torch is installed, and has no one set of types.
# mypy: ignore-errors

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
BUDGET_S = 540.0
OLDEST_TORCH = (2, 11)
Figures = dict[str, Any]


class Missing(Exception):  # noqa: N818 - not an error: the part is skipped, with this reason
    """Something that a part needs is not installed."""


def need(module: str) -> None:
    """Skip the part if `module` is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Missing(f"{module} is not installed")


# -- Measuring -----------------------------------------------------------------------------------


def seconds(function: Callable[[], object], device: str, *, rounds: int = 5) -> float:
    """Median seconds of one call, after one that warms up."""
    times = []
    for _ in range(rounds + 1):
        synchronize(device)
        start = time.perf_counter()
        function()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def synchronize(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


@contextlib.contextmanager
def peak_bytes(device: str) -> Iterator[Figures]:
    """Fill a dict with `peak_bytes`: the most that tensors took beyond what they held before; None on a CPU."""
    import torch

    found: Figures = {"peak_bytes": None}
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    yield found
    if device == "cuda":
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before


def make_model(*, dry_run: bool, device: str = "cpu", dtype: str = "float32", vocabulary: int = 32_000) -> Any:
    """Return a Qwen3 with random weights: 0.6 billion parameters, or a toy in a dry run."""
    import torch
    import transformers

    hidden, layers, heads = (64, 2, 4) if dry_run else (1280, 24, 20)
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=min(vocabulary, 512) if dry_run else vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=hidden // heads,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.device(device):
        return transformers.Qwen3ForCausalLM(config).to(getattr(torch, dtype)).eval()


def workloads() -> Any:
    """Return the module with batches and the plain loop that the benchmarks of rl-backends use."""
    path = HERE / "packages/rl-backends/benchmarks/workloads.py"
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules["workloads"] = module
    spec.loader.exec_module(module)
    return module


def take_steps(device: str, *, dry_run: bool, steps: int = 4, **options: Any) -> Figures:
    """Take optimizer steps of SFT in bfloat16, and return seconds, tokens per second, MFU and peak of the last ones."""
    from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

    module = workloads()
    model = make_model(dry_run=dry_run, device="cpu" if options.get("cpu_offload") else device)
    config = DTensorConfig(device=device, precision="bfloat16", sequence_packing=True, **options)
    rows, longest = (4, 16) if dry_run else (32, 1024)
    examples = module.make_examples(model.config.vocab_size, rows=rows, shortest=longest // 4, longest=longest)
    with peak_bytes(device) as peak:
        backend = DTensorBackend(model, config)
        backend.start_training(OptimizerConfig(lr=1e-4), num_steps=100)

        def step() -> None:
            backend.forward_backward(examples, module.mean_loss(examples))
            backend.optim_step()

        step_s = seconds(step, device, rounds=steps)
    tokens = int(examples.lengths.sum())
    metrics = backend.metrics()
    backend.close()
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "mfu": metrics.mfu if metrics else None,
        **peak,
    }


# -- The parts, in the order in which they run ---------------------------------------------------


def parity(device: str, *, dry_run: bool) -> Figures:  # noqa: ARG001 - small in any case
    """Log-probabilities of the backend in float32 against plain transformers on the CPU."""
    import torch

    from rl_backends import DTensorBackend, DTensorConfig

    torch.set_float32_matmul_precision("highest")
    model = make_model(dry_run=True)
    examples = workloads().make_examples(model.config.vocab_size, rows=4, shortest=4, longest=32)
    with torch.no_grad():
        logits = model(input_ids=examples.tokens, use_cache=False).logits[:, :-1]
    expected = logits.log_softmax(-1).gather(-1, examples.tokens[:, 1:, None])[..., 0]
    backend = DTensorBackend(model, DTensorConfig(device=device))
    found = backend.logp(examples).cpu()
    backend.close()
    real = examples.trainable[:, 1:]
    error = (found[:, -expected.shape[1] :] - expected)[real].abs().max().item()
    if not error < 1e-4:
        raise SystemExit(f"logp on {device} differ from transformers on the CPU by {error:.2e}")
    return {"largest_error": error}


def logp(device: str, *, dry_run: bool) -> Figures:
    """linear_logp against log_softmax over full logits, and Liger's loss: forward and backward, bfloat16."""
    import torch

    from rl_parallel_plans import linear_logp

    tokens, hidden, vocabulary = (64, 32, 512) if dry_run else (8192, 2048, 131_072)
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, hidden, device=device, dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def full() -> torch.Tensor:
        return (x @ head.T).float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    methods = {"log_softmax": lambda: full().sum(), "linear_logp": lambda: linear_logp(x, head, targets).sum()}
    if device == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        liger = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        methods["liger"] = lambda: -liger(head, x, targets)
    figures: Figures = {} if "liger" in methods else {"liger": "skipped: liger_kernel is not installed, or no GPU"}
    gradients = {}
    for name, method in methods.items():

        def both(method: Callable[[], Any] = method) -> None:
            x.grad = head.grad = None
            method().backward()

        with peak_bytes(device) as peak:
            time_s = seconds(both, device)
        assert x.grad is not None
        gradients[name] = x.grad.float()
        figures |= {f"{name}_s": time_s, f"{name}_peak_bytes": peak["peak_bytes"]}
    error = (gradients["linear_logp"] - gradients["log_softmax"]).norm() / gradients["log_softmax"].norm()
    figures["gradient_error"] = error.item()
    if not error < 0.05:
        raise SystemExit(f"the gradients of linear_logp differ from log_softmax by {error:.1%}")
    return figures


def refit(device: str, *, dry_run: bool) -> Figures:
    """A refit between two processes of one device, by CUDA IPC there, against a copy of the same tensors."""
    import torch
    import torch.multiprocessing

    from rl_refit import ModuleSource, Refit, Rendezvous

    layers, width = (4, 64) if dry_run else (16, 4096)
    policy = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    copy = [torch.empty_like(parameter) for parameter in policy.parameters()]

    def copy_all() -> None:
        with torch.no_grad():
            for target, parameter in zip(copy, policy.parameters(), strict=True):
                target.copy_(parameter)

    copy_s = seconds(copy_all, device)
    rounds = 6
    with tempfile.TemporaryDirectory() as directory:
        address = f"file://{directory}/store"
        context = torch.multiprocessing.get_context("spawn")
        engine = context.Process(target=receive_refits, args=(address, device, layers, width, rounds))
        engine.start()
        try:
            meeting = Rendezvous(address, num_sources=1, num_sinks=1, source_rank=0)
            sender = Refit(source=ModuleSource(policy), rendezvous=meeting)
            times = []
            for version in range(1, rounds + 1):
                start = time.perf_counter()
                sender(version=version)
                times.append(time.perf_counter() - start)
            engine.join(60)
        finally:
            if engine.is_alive():
                engine.kill()
    if engine.exitcode != 0:
        raise SystemExit(f"the engine's process ended with {engine.exitcode}")
    nbytes = sum(parameter.nbytes for parameter in policy.parameters())
    refit_s = statistics.median(times[2:])
    return {"bytes": nbytes, "copy_s": copy_s, "refit_s": refit_s, "refit_over_copy": refit_s / copy_s}


def receive_refits(address: str, device: str, layers: int, width: int, rounds: int) -> None:  # noqa: PLR0917
    """Be the engine of `refit`, in a process of its own."""
    import torch

    from rl_refit import ModuleSink, Refit, Rendezvous

    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False, device=device) for _ in range(layers)))
    meeting = Rendezvous(address, num_sources=1, num_sinks=1, sink_rank=0)
    receiver = Refit(sink=ModuleSink(model), rendezvous=meeting)
    for _ in range(rounds):
        receiver.receive(timeout_s=120)


def engine(device: str, *, dry_run: bool) -> Figures:
    """Tokens per second of the embedded engine, with 256 rollouts at once."""
    from rl_generation import Sampling, TransformersEngine

    model = make_model(dry_run=dry_run, device=device, dtype="float32" if dry_run else "bfloat16")
    prompts = [[1, *range(3, 3 + 8 + number % 8)] for number in range(4 if dry_run else 32)]
    sampling = Sampling(max_new_tokens=8 if dry_run else 128, n=2 if dry_run else 8)
    sampler = TransformersEngine(model, stop_token_ids=[2], pad_token_id=0, continuous_batching="required")
    count = 0

    def generate() -> None:
        nonlocal count
        count = sum(len(rollout.tokens) for rollout in sampler.generate(prompts, sampling))

    time_s = seconds(generate, device, rounds=2)
    return {"rollouts": len(prompts) * sampling.n, "tokens": count, "tokens_per_s": count / time_s}


def training(device: str, *, dry_run: bool) -> Figures:
    """Steps of SFT in bfloat16: packed; and with layers recomputed."""
    figures = {
        "packed": take_steps(device, dry_run=dry_run, micro_batch_tokens=64 if dry_run else 8192),
        "recomputed": take_steps(
            device, dry_run=dry_run, micro_batch_tokens=64 if dry_run else 8192, activation_checkpointing="selective"
        ),
    }
    return flat(figures)


def lora(device: str, *, dry_run: bool) -> Figures:
    """The same steps with adapters instead of all weights."""
    need("peft")
    from rl_backends import LoraConfig

    return take_steps(device, dry_run=dry_run, micro_batch_tokens=64 if dry_run else 8192, lora_cfg=LoraConfig(rank=8))


def offload(device: str, *, dry_run: bool) -> Figures:
    """The same steps with weights and optimizer state in host memory."""
    budget = 64 if dry_run else 8192
    return take_steps(device, dry_run=dry_run, steps=2, micro_batch_tokens=budget, cpu_offload=device == "cuda")


def kernels(device: str, *, dry_run: bool) -> Figures:
    """The same steps with compiled layers, and with the kernels that this machine has."""
    from rl_backends import KernelsConfig

    if device == "cuda":
        need("triton")
    budget = 64 if dry_run else 8192
    figures: Figures = {"plain": take_steps(device, dry_run=dry_run, steps=2, micro_batch_tokens=budget)}
    if device == "cuda":
        figures["compile"] = take_steps(device, dry_run=dry_run, steps=2, micro_batch_tokens=budget, compile=True)
    for field, value in (("attention", "flex"), ("attention", "flash"), ("loss", "liger"), ("mlp", "liger")):
        try:
            config = KernelsConfig(**{field: value})
            figures[f"{field}_{value}"] = take_steps(
                device, dry_run=dry_run, steps=2, micro_batch_tokens=budget, kernels=config
            )
        except (ImportError, TypeError, ValueError) as refused:  # the choice cannot run here, and says why
            figures[f"{field}_{value}"] = f"skipped: {str(refused).splitlines()[0][:200]}"
    return flat(figures)


def forecast(device: str, *, dry_run: bool) -> Figures:
    """Predicted memory of a training step (on fake tensors) against what the GPU then held."""
    import torch

    from rl_parallel_plans.forecast.memory import memory

    rows, length = (2, 16) if dry_run else (8, 1024)
    with torch.device("meta"):
        shape = make_model(dry_run=dry_run, device="meta")
    report = memory(shape, batch_size=rows, sequence_length=length, optimizer="adamw_fused", param_dtype=None)
    figures: Figures = {"predicted_bytes": report.peak.num_bytes}
    if device == "cuda":
        from rl_parallel_plans import linear_logp

        torch.cuda.reset_peak_memory_stats()
        model = make_model(dry_run=dry_run, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        ids = torch.randint(3, 1000, (rows, length), device=device)
        for _ in range(2):
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
            (-linear_logp(states[:, :-1], model.lm_head, ids[:, 1:]).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
        figures["measured_bytes"] = torch.cuda.max_memory_allocated()
    return figures


def share_of_digits(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """A reward in which answers of a model that has learned nothing differ, too: the run would stop without signal."""
    return [len({*said} & {*right}) / len({*right}) for said, right in zip(completions, answer, strict=True)]


def run(device: str, *, dry_run: bool) -> Figures:
    """An entire run of the launcher: SFT, then GRPO, in bfloat16 on a GPU, with a refit after every step."""
    import transformers

    import rl_launcher
    from rl_launcher.quickstart.tiny_model import character_tokenizer

    tokenizer = character_tokenizer()
    model = make_model(dry_run=dry_run, vocabulary=len(tokenizer))
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    training_config = {"device": device, "precision": "bfloat16" if device == "cuda" else "float32"}
    steps = 2 if dry_run else 20
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        result = rl_launcher.train(
            "quickstart",
            model=model,
            tokenizer=tokenizer,
            reward=share_of_digits,
            run_dir=f"{directory}/run",
            policy={"dtensor_cfg": training_config},
            sft={"max_num_steps": steps, "batch_size": 8 if dry_run else 128, "optimizer": {"warmup_steps": 1}},
            grpo={
                "max_num_steps": steps,
                "steps_per_generation": 1,
                "num_prompts": 2 if dry_run else 32,
                "optimizer": {"warmup_steps": 1},
            },
            evaluation={"every": steps, "max_prompts": 8 if dry_run else 200},
        )
        total_s = time.perf_counter() - start
        lines = (Path(result.run_dir) / "metrics.jsonl").read_text().splitlines()
    numbers: dict[str, list[float]] = {}
    for line in lines:
        for name, value in json.loads(line).items():
            if isinstance(value, int | float) and re.search(r"mfu|tokens_per_s|_s$|seconds", name):
                numbers.setdefault(name, []).append(float(value))
    medians = {name: statistics.median(values) for name, values in numbers.items()}
    return {"total_s": total_s, "steps": 2 * steps, **medians}


def gpu_tests(device: str, *, dry_run: bool) -> Figures:  # noqa: ARG001 - the tests know theirs
    """Every test that is marked `gpu`; a dry run collects them."""
    files: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("packages/*/tests/**/test_*.py")):
        if "pytest.mark.gpu" in path.read_text() and "vllm" not in path.parts:
            files.setdefault(path.relative_to(HERE).parts[1], []).append(str(path.relative_to(HERE)))
    counts = {}
    for name, marked in files.items():
        options = ["--collect-only"] if dry_run else ["--maxfail=20"]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *options, *marked]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "")
        counts[name] = last.strip("= ")
        if done.returncode not in {0, 5}:
            print(done.stdout[-4000:], file=sys.stderr)
            counts[name] = f"FAILED: {counts[name]}"
    if failed := [name for name, verdict in counts.items() if verdict.startswith("FAILED")]:
        raise SystemExit(f"gpu tests failed in {', '.join(failed)}: {counts}")
    return counts


def flat(figures: Figures) -> Figures:
    """Join the names of nested figures."""
    found: Figures = {}
    for name, value in figures.items():
        inner = {f"{name}_{key}": each for key, each in value.items()} if isinstance(value, dict) else {name: value}
        found |= inner
    return found


PARTS: dict[str, tuple[Callable[..., Figures], float]] = {  # the function, and its share of the budget in seconds
    "parity": (parity, 40),
    "logp": (logp, 40),
    "refit": (refit, 50),
    "engine": (engine, 50),
    "training": (training, 70),
    "forecast": (forecast, 50),
    "run": (run, 90),
    "lora": (lora, 40),
    "offload": (offload, 60),
    "kernels": (kernels, 80),
    "gpu_tests": (gpu_tests, 240),
}


# -- Running them --------------------------------------------------------------------------------


def main() -> int:
    """Run all parts; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path, help="where to write the JSON; default benchmarks/results/gpu-...json")
    parser.add_argument("--budget-s", type=float, help=f"seconds in all; default {BUDGET_S:g}, none in a dry run")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)  # in a process of its own
    chosen = parser.parse_args()
    device = "cpu" if chosen.dry_run else "cuda"
    if chosen.part:
        try:
            print(json.dumps(PARTS[chosen.part][0](device, dry_run=chosen.dry_run)))
        except Missing as reason:
            print(json.dumps({"skipped": str(reason)}))
        return 0
    machine = describe(dry_run=chosen.dry_run)
    budget = chosen.budget_s or (float("inf") if chosen.dry_run else BUDGET_S)
    began = time.monotonic()
    results: dict[str, Figures] = {}
    for name in chosen.parts:
        left = budget - (time.monotonic() - began)
        limit = min(left, 600.0 if chosen.dry_run else PARTS[name][1])  # a loaded machine is slow, and nothing waits
        results[name] = run_part(name, limit, dry_run=chosen.dry_run) if left > 5 else {"skipped": "no time was left"}
        print(f"{name}: {summary(results[name])}", flush=True)
    record = {**machine, "dry_run": chosen.dry_run, "seconds": round(time.monotonic() - began, 1), "parts": results}
    print(f"\n{table(record)}\n")
    out = chosen.out
    if out is None and not chosen.dry_run:
        slug = re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"]).lower()).strip("-")
        out = HERE / "benchmarks/results" / f"gpu-{slug}-{machine['date']}.json"
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))
    return int(any("failed" in each for each in results.values()))


def describe(*, dry_run: bool) -> Figures:
    """Return the machine and the versions, or exit where there is no GPU or its torch is too old."""
    import torch

    if not dry_run and not torch.cuda.is_available():
        sys.exit("torch sees no NVIDIA GPU: add --dry-run to run the same programs at toy sizes on the CPU")
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        sys.exit(f"torch {torch.__version__} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, the oldest supported")
    versions = {}
    for name in ("torch", "transformers", "vllm", "ray", "peft", "triton", "liger-kernel", "flash-attn", "torchao"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    gpu = "none (dry run)" if dry_run else torch.cuda.get_device_name()
    date = datetime.now(UTC).date().isoformat()
    return {"gpu": gpu, "date": date, "python": platform.python_version(), "versions": versions}


def run_part(name: str, limit_s: float, *, dry_run: bool) -> Figures:
    """Run one part in a process, and return its figures, or why there are none."""
    sources = os.pathsep.join(str(path) for path in sorted(HERE.glob("packages/*/src")))
    command = [sys.executable, __file__, "--part", name, *(["--dry-run"] if dry_run else [])]
    environment = {**os.environ, "PYTHONPATH": sources, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=HERE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"failed": f"killed after its {limit_s:.0f} s"}
    spent = {"seconds": round(time.monotonic() - start, 1)}
    if process.returncode:
        print(errors[-3000:], file=sys.stderr)
        reason = next((line for line in reversed(errors.splitlines()) if line.strip()), "no message")
        return {"failed": reason[:400], **spent}
    return {**json.loads(printed.strip().splitlines()[-1]), **spent}


def summary(figures: Figures) -> str:
    """Return the figures of one part in one line."""
    if reason := figures.get("skipped"):
        return f"skipped: {reason}"
    if reason := figures.get("failed"):
        return f"FAILED: {reason}"
    return ", ".join(f"{name} {shown(name, value)}" for name, value in figures.items() if name != "seconds")


def shown(name: str, value: object) -> str:
    """Return one figure for people."""
    if value is None:
        return "–"
    if name.endswith("bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.3g} GiB"
    if name.endswith("mfu") and isinstance(value, float):
        return f"{value:.1%}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(record: Figures) -> str:
    """Return the record as a table for the README."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    head = f"{record['gpu']}, {record['date']}, Python {record['python']}, {versions}:"
    rows = [f"| {name} | {summary(figures)} |" for name, figures in record["parts"].items()]
    return "\n".join([head, "", "| part | figures |", "|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
