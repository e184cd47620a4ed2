"""The Megatron backend against the DTensor backend and a plain loop: a step, loading a model, and resuming.

Same model, same batch, same process, one after the other in every round, in changing order; medians over rounds. A step
is forward_backward and optim_step; the plain loop is `workloads`'. Loading is of a folder of safetensors: by
transformers alone, and by either backend. Saving and resuming are of weights and optimizer.

    python benchmarks/megatron_backend.py [--precision bfloat16 --models 1]

The last line is JSON with every figure.
"""

import argparse
import copy
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from forward_backward import ROWS, seconds, timed
from workloads import MODELS, SHAPES, Examples, make_examples, mean_loss, plain_step

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig
from rl_backends.megatron.backend import MegatronBackend
from rl_backends.megatron.config import MegatronConfig

ROUNDS = {"quickstart, 0.4 M": 25, "hidden 256, 4 layers, V 16k": 9}
SHAPE = "long tail"
BUDGET = 1024
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"micro_batch_size": 64},
    "packed": {"micro_batch_tokens": BUDGET, "sequence_packing": True},
}
BACKENDS: dict[str, tuple[Any, Any]] = {
    "DTensor": (DTensorBackend, DTensorConfig),
    "Megatron": (MegatronBackend, MegatronConfig),
}
Figures = dict[str, dict[str, float]]


def arguments() -> argparse.Namespace:
    """As the head of this file tells."""
    parser = argparse.ArgumentParser(description="the Megatron backend against the DTensor backend and a plain loop")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--models", type=int, default=2, choices=[1, 2], help="how many of the models, smallest first")
    return parser.parse_args()


def main() -> None:
    """Time everything, print tables and the figures."""
    chosen = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    releases = {name: version(name) for name in ("torch", "transformers", "megatron-core")}
    figures: dict[str, Any] = {**releases, **vars(chosen)}
    for name in list(ROUNDS)[: chosen.models]:
        figures[name] = {
            "step": steps(name, chosen.precision),
            "loading": loading(name, chosen.precision),
            "resuming": resuming(name, chosen.precision),
        }
        print("\n".join([name, *lines(figures[name])]), flush=True)
    print(json.dumps(figures))


def backend_of(kind: str, model: torch.nn.Module, **config: Any) -> Any:
    """A backend in training, on a copy of the model."""
    backend_type, config_type = BACKENDS[kind]
    backend = backend_type(copy.deepcopy(model), config_type(**config))
    backend.start_training(OptimizerConfig(lr=1e-4), num_steps=10_000)
    return backend


def steps(name: str, precision: str) -> Figures:
    """Medians of an optimizer step of each kind and layout."""
    model = MODELS[name].make()
    shortest, longest = SHAPES[SHAPE]
    examples = make_examples(MODELS[name].vocabulary, rows=ROWS[name], shortest=shortest, longest=longest)
    candidates: dict[str, Callable[[Examples], object]] = {}
    for layout, config in LAYOUTS.items():
        for kind in BACKENDS:
            backend = backend_of(kind, model, precision=precision, **config)
            candidates[f"{kind}, {layout}"] = lambda rows, backend=backend: a_step(backend, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    dtype = getattr(torch, precision)
    candidates["plain"] = lambda rows: plain_step(model, optimizer, rows, dtype=dtype)
    return timed(candidates, examples, rounds=ROUNDS[name], device="cpu")


def a_step(backend: Any, examples: Examples) -> None:
    """Of either backend."""
    backend.forward_backward(examples, mean_loss(examples))
    backend.optim_step()


def loading(name: str, precision: str) -> Figures:
    """From a folder to a model that can be asked."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        MODELS[name].make().save_pretrained(folder)
        dtensor = DTensorConfig(precision=precision)
        megatron = MegatronConfig(precision=precision)
        return in_turn(
            {
                "transformers": lambda: transformers.AutoModelForCausalLM.from_pretrained(folder),
                "DTensor": lambda: DTensorBackend.from_pretrained(str(folder), dtensor),
                "Megatron": lambda: MegatronBackend.from_pretrained(str(folder), megatron),
            }
        )


def resuming(name: str, precision: str) -> Figures:
    """Weights and optimizer to disk, and back."""
    model = MODELS[name].make()
    examples = make_examples(MODELS[name].vocabulary, rows=2, shortest=8, longest=8)
    with tempfile.TemporaryDirectory() as temporary:
        candidates: dict[str, Callable[[], object]] = {}
        for kind in BACKENDS:
            backend = backend_of(kind, model, precision=precision)
            a_step(backend, examples)
            folder = Path(temporary) / kind

            def save(backend: Any = backend, folder: Path = folder) -> None:
                shutil.rmtree(folder, ignore_errors=True)
                backend.save_checkpoint(folder)

            candidates[f"{kind}, save"] = save
            candidates[f"{kind}, resume"] = lambda backend=backend, folder=folder: backend.load_checkpoint(folder)
        return in_turn(candidates)


def in_turn(candidates: dict[str, Callable[[], object]], *, rounds: int = 3) -> Figures:
    """Median seconds of each, one after the other in every round, the first of which warms up."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for _ in range(rounds + 1):
        for name, candidate in candidates.items():
            found[name].append(seconds(candidate, "cpu"))
    return {
        name: {
            "wall_s": statistics.median(wall for wall, _ in each[1:]),
            "cpu_s": statistics.median(cpu for _, cpu in each[1:]),
        }
        for name, each in found.items()
    }


def lines(figures: dict[str, Figures]) -> list[str]:
    """Milliseconds of each, and as a multiple of the first of its kind, in CPU seconds."""
    plain = {"step": "plain", "loading": "transformers", "resuming": "DTensor, resume"}
    told = [f"  {'':<28} {'wall':>10} {'CPU':>10}  CPU time as a multiple of"]
    for what, measured in figures.items():
        one = measured[plain[what]]["cpu_s"]
        told += [
            f"  {what + ': ' + kind:<28} {1e3 * each['wall_s']:>7.1f} ms {1e3 * each['cpu_s']:>7.1f} ms"
            f"  {each['cpu_s'] / one:>5.2f} x {plain[what]}"
            for kind, each in measured.items()
        ]
    return told


if __name__ == "__main__":
    main()
