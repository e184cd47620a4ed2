"""One optimizer step, forward_backward and optim_step: this backend against a plain loop of transformers and torch.

Same model, same batch, same process, one after the other in every round, in changing order; the median over rounds of
how many times as fast each was, in wall time and in CPU seconds, which a busy machine changes less. The plain loop runs
all rows at once, padded to the longest, with an attention mask and full logits. The backend runs them padded as well,
all at once (`padded`), cut by a budget of tokens (`dynamic`), and laid end to end (`packed`).

    python benchmarks/forward_backward.py [--device cuda --precision bfloat16 --models 3]

The last line is JSON with every figure, and whether the bars hold: padded at least as fast as the plain loop on even
rows, and the best layout 1.5 times as fast on ragged ones, in CPU seconds (in wall time on a GPU).
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
import transformers
from workloads import MODELS, SHAPES, Examples, make_examples, mean_loss, plain_step

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

EVEN_BAR, RAGGED_BAR = 1.0, 1.5
ROWS = {"quickstart, 0.4 M": 64, "hidden 256, 4 layers, V 16k": 16, "hidden 1024, 16 layers, V 128k": 64}
ROUNDS = {"quickstart, 0.4 M": 21, "hidden 256, 4 layers, V 16k": 5, "hidden 1024, 16 layers, V 128k": 9}
Figures = dict[str, dict[str, float]]


def arguments() -> argparse.Namespace:
    """As the head of this file tells."""
    parser = argparse.ArgumentParser(description="one optimizer step against a plain loop")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--models", type=int, default=2, help="how many of the models, smallest first")
    parser.add_argument("--scale", type=int, default=1, help="makes rows so many times as long")
    parser.add_argument("--budget", type=int, default=1024, help="tokens of a microbatch, dynamic and packed")
    return parser.parse_args()


def layouts(budget: int) -> dict[str, dict[str, object]]:
    """How the backend cuts a batch."""
    return {
        "padded": {"micro_batch_size": 64},
        "dynamic": {"micro_batch_tokens": budget},
        "packed": {"micro_batch_tokens": budget, "sequence_packing": True},
    }


def main() -> None:
    """Time everything, print a table and the figures."""
    chosen = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, object] = {"torch": torch.__version__, "transformers": transformers.__version__, **vars(chosen)}
    bars: dict[str, bool] = {}
    print(f"{'model':<32} {'rows':<10} {'tokens':>7} {'plain':>10}  {'padded':>22} {'dynamic':>22} {'packed':>22}")
    for name in list(MODELS)[: chosen.models]:
        steps = candidates(name, chosen)
        for shape, (shortest, longest) in SHAPES.items():
            lengths = {"shortest": shortest * chosen.scale, "longest": longest * chosen.scale}
            examples = make_examples(MODELS[name].vocabulary, rows=ROWS[name], **lengths)
            measured = timed(steps, examples, rounds=ROUNDS[name], device=chosen.device)
            figures[f"{name}, {shape}"] = measured
            bars[f"{name}, {shape}"] = holds(measured, shape, chosen.device)
            print(line(name, shape, examples, measured), flush=True)
    print("each: milliseconds of a step, and its speed as a multiple of the plain loop's by CPU / by wall time")
    print(json.dumps({**figures, "bars": bars, "ok": all(bars.values())}))


def candidates(name: str, chosen: argparse.Namespace) -> dict[str, Callable[[Examples], object]]:
    """An optimizer step of each kind, all on copies of one model."""
    dtype = getattr(torch, chosen.precision)
    model = MODELS[name].make().to(chosen.device)
    steps: dict[str, Callable[[Examples], object]] = {}
    for layout, config in layouts(chosen.budget * chosen.scale).items():
        options = {"device": chosen.device, "precision": chosen.precision, **config}
        backend = DTensorBackend(copy.deepcopy(model), DTensorConfig(**options))
        backend.start_training(OptimizerConfig(lr=1e-4), num_steps=10_000)

        def step(examples: Examples, backend: DTensorBackend = backend) -> None:
            backend.forward_backward(examples, mean_loss(examples))
            backend.optim_step()

        steps[layout] = step
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    return {"plain": lambda examples: plain_step(model, optimizer, examples, dtype=dtype), **steps}


def timed(
    steps: dict[str, Callable[[Examples], object]], examples: Examples, *, rounds: int, device: str
) -> dict[str, dict[str, float]]:
    """Median seconds of each, wall and CPU, the order turning with every round."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds + 1):
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            found[name].append(seconds(lambda name=name: steps[name](examples), device))
    rounds_of = {name: each[1:] for name, each in found.items()}  # the first round warms up
    return {name: summary(each, rounds_of["plain"], int(examples.lengths.sum())) for name, each in rounds_of.items()}


def summary(each: list[tuple[float, float]], plain: list[tuple[float, float]], num_tokens: int) -> dict[str, float]:
    """Medians of seconds, and of the speed in multiples of the plain loop's in the same round."""
    wall_s = statistics.median(wall for wall, _ in each)
    return {
        "wall_s": wall_s,
        "cpu_s": statistics.median(cpu for _, cpu in each),
        "tokens_per_s": num_tokens / wall_s,
        "speed_wall": statistics.median(by_hand / ours for (by_hand, _), (ours, _) in zip(plain, each, strict=True)),
        "speed_cpu": statistics.median(by_hand / ours for (_, by_hand), (_, ours) in zip(plain, each, strict=True)),
    }


def seconds(function: Callable[[], object], device: str) -> tuple[float, float]:
    """Wall and CPU seconds of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def holds(measured: Figures, shape: str, device: str) -> bool:
    """The bar of a shape."""
    kind = "speed_cpu" if device == "cpu" else "speed_wall"
    if shape == "even":
        return measured["padded"][kind] >= EVEN_BAR
    return max(each[kind] for each in measured.values()) >= RAGGED_BAR


def line(name: str, shape: str, examples: Examples, measured: Figures) -> str:
    """One line of the table."""
    cells = [
        f"{1e3 * each['wall_s']:>7.1f} ms {each['speed_cpu']:>4.2f}/{each['speed_wall']:<4.2f} x"
        for each in (measured[layout] for layout in ("padded", "dynamic", "packed"))
    ]
    plain = f"{1e3 * measured['plain']['wall_s']:>7.1f} ms"
    return f"{name:<32} {shape:<10} {int(examples.lengths.sum()):>7} {plain:>10}  {' '.join(f'{c:>22}' for c in cells)}"


if __name__ == "__main__":
    main()
