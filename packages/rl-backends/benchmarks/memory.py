"""Peak of one forward_backward: bytes alive beyond weights and their gradients, this backend against a plain loop.

Every storage is counted from its birth to its death by `rl_parallel_plans`' tracker, on real tensors, on the CPU; a GPU
would hold the same tensors. The plain loop runs all rows padded to the longest with full logits; the backend runs them
padded and all at once, cut by a budget of tokens, and packed.

    python benchmarks/memory.py

The last line is JSON with every figure, and whether the bars hold: at most a quarter of the plain loop's peak with
all rows at once, and no tensor larger than a quarter of the logits or than those of a chunk of 1024 tokens.
"""

import copy
import json
from collections.abc import Callable

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import Examples, Model, make_examples, mean_loss, plain_forward_backward

from rl_backends import DTensorBackend, DTensorConfig
from rl_parallel_plans.forecast.tracker import PARAMETERS, Ledger, MemoryTracker

MODEL = Model(vocabulary=32_768, hidden=128, layers=2, heads=4, tied=False)
ROWS, SHORTEST, LONGEST = 16, 8, 96
LAYOUTS = {
    "padded": {"micro_batch_size": ROWS},
    "dynamic": {"micro_batch_tokens": 384},
    "packed": {"micro_batch_size": ROWS, "sequence_packing": True},
}


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operator gives, those of weights' shapes left out."""

    def __init__(self, weights: set[torch.Size]) -> None:
        super().__init__()
        self.elements = 0
        self._weights = weights

    def __torch_dispatch__(
        self, function: object, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, Tensor) and each.shape not in self._weights:
                self.elements = max(self.elements, each.numel())
        return result


def peak(model: torch.nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """Bytes at the peak of `run` beyond weights and gradients, and the elements of the largest tensor."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # allocated before, as in every step but the first
    lasting = [tensor for p in model.parameters() for tensor in (p, p.grad)]
    ledger = Ledger()
    with MemoryTracker(ledger, {module: name for name, module in model.named_modules()}) as tracker:
        tracker.label(lasting, PARAMETERS)
        with ledger.phase("forward and backward"):
            run()
    shapes = {form for p in model.parameters() if p.ndim > 1 for form in (p.shape, p.shape[::-1])}
    with Largest(shapes) as largest:
        run()
    return {
        "peak_bytes": ledger.peaks(without=[PARAMETERS])["forward and backward"].total,
        "largest_elements": largest.elements,
    }


def main() -> None:
    """Count both, print a table and the figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    examples = make_examples(MODEL.vocabulary, rows=ROWS, shortest=SHORTEST, longest=LONGEST)
    model = MODEL.make().eval()
    found = {"plain": peak(model, lambda: plain_forward_backward(model, examples))}
    for layout, config in LAYOUTS.items():
        found[layout] = of_backend(copy.deepcopy(model), config, examples)
    logits = examples.tokens.numel() * MODEL.vocabulary
    most = min(logits // 4, 1024 * MODEL.vocabulary)
    print(f"{ROWS} rows of {SHORTEST} to {LONGEST} tokens, V = {MODEL.vocabulary}: [B, T, V] has {logits:,} elements")
    print(f"{'':<8} {'peak beyond weights':>20} {'largest tensor':>22}")
    for name, each in found.items():
        print(f"{name:<8} {each['peak_bytes'] / 2**20:>16.1f} MiB {each['largest_elements']:>14,} elements")
    bars = {
        "a quarter of the peak, padded": found["padded"]["peak_bytes"] <= found["plain"]["peak_bytes"] / 4,
        "no logits": all(found[layout]["largest_elements"] <= most for layout in LAYOUTS),
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({**versions, **found, "logits_elements": logits, "bars": bars, "ok": all(bars.values())}))


def of_backend(model: torch.nn.Module, config: dict[str, object], examples: Examples) -> dict[str, int]:
    """The same quantities of one layout."""
    backend = DTensorBackend(model, DTensorConfig(**config))
    return peak(backend.model, lambda: backend.forward_backward(examples, mean_loss(examples)))


if __name__ == "__main__":
    main()
