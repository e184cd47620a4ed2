"""linear_logp against log_softmax on full logits: time, and the most bytes alive beyond what either must have.

Forward and backward in fp32, one thread, side by side in one run. "Extra bytes" is the peak of live storages less
hidden, weight, targets, the result and the two gradients, counted exactly by dispatch mode. Ends with one line of JSON.
"""

import gc
import json
import time
import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_parallel_plans import linear_logp

# (rows, hidden, vocabulary): a toy's microbatch, then real vocabularies at sizes that a laptop holds.
SIZES = [(1200, 128, 51), (2048, 256, 4096), (4096, 256, 32000)]
CHUNK_SIZE = 256
ROUNDS_S = 4.0
HEADER = ("rows x hidden x vocabulary", "full ms", "chunked ms", "time", "full MB", "chunked MB")
WIDTHS = (28, 10, 11, 6, 9, 11)


def full_logits(hidden, head, targets):
    return (hidden @ head.weight.T).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


def chunked(hidden, head, targets):
    return linear_logp(hidden, head, targets, chunk_size=CHUNK_SIZE)


class LiveBytes(TorchDispatchMode):
    """The peak, while active, of the bytes of all storages but the given ones that nothing has freed."""

    def __init__(self, *given):
        super().__init__()
        self.now = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._born(leaf.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _born(self, storage):
        if (key := storage._cdata) not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._died, key, storage.nbytes())

    def _died(self, key, num_bytes):
        self.known.discard(key)
        self.now -= num_bytes


def forward_backward(function, hidden, head, targets):
    return torch.autograd.grad(function(hidden, head, targets).sum(), [hidden, head.weight])


def extra_bytes(function, hidden, head, targets):
    gc.collect()
    with LiveBytes(hidden, head.weight, targets) as live:
        gradients = forward_backward(function, hidden, head, targets)
    return live.peak - 4 * len(targets) - sum(gradient.nbytes for gradient in gradients)


def best_seconds(functions, *arguments):
    """The fastest round of each function, rounds taken in turn so that both meet the same machine."""
    best = dict.fromkeys(functions, float("inf"))
    end = time.perf_counter() + ROUNDS_S
    rounds = 0
    while rounds < 2 or time.perf_counter() < end:
        for function in functions:
            start = time.perf_counter()
            forward_backward(function, *arguments)
            best[function] = min(best[function], time.perf_counter() - start)
        rounds += 1
    return [best[function] for function in functions]


def main():
    torch.set_num_threads(1)
    figures = []
    print(" ".join(f"{name:>{width}}" for name, width in zip(HEADER, WIDTHS, strict=True)))
    for rows, features, words in SIZES:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(rows, features, generator=generator).requires_grad_()
        head = nn.Linear(features, words, bias=False)
        targets = torch.randint(words, (rows,), generator=generator)
        full_s, chunked_s = best_seconds([full_logits, chunked], hidden, head, targets)
        full_extra, chunked_extra = (extra_bytes(f, hidden, head, targets) for f in (full_logits, chunked))
        figures.append(
            {
                "rows": rows,
                "hidden": features,
                "vocabulary": words,
                "time_ratio": round(chunked_s / full_s, 3),
                "extra_bytes_full": full_extra,
                "extra_bytes_chunked": chunked_extra,
                "extra_bytes_ratio": round(chunked_extra / full_extra, 4),
            }
        )
        size = f"{rows} x {features} x {words}"
        print(
            f"{size:>28} {full_s * 1e3:>10.2f} {chunked_s * 1e3:>11.2f} {chunked_s / full_s:>6.2f} "
            f"{full_extra / 1e6:>9.1f} {chunked_extra / 1e6:>11.1f}"
        )
    print(json.dumps({"linear_logp": figures, "chunk_size": CHUNK_SIZE, "torch": torch.__version__}))


if __name__ == "__main__":
    main()
