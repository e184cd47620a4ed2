"""linear_logp against log_softmax on full logits and on gathered ones: processor time, and the most bytes alive.

Two tables, forward and backward, one thread a process, all methods side by side in one run. The first has the whole
vocabulary on one rank, fp32: "extra" bytes are the peak of live storages less the result and the two gradients. The
second cuts it over two ranks (gloo), bf16: the peak counts all that is made, gradients too, in U = T V / tp * 2 bytes,
the size of a rank's logits. Live storages are counted exactly, by dispatch mode. Ends with one line of JSON.
"""

import gc
import json
import tempfile
import time
import weakref
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_parallel_plans import get_logprobs_from_vocab_parallel_logits, linear_logp

# (rows, hidden, vocabulary): a toy's microbatch, then real vocabularies at sizes that a laptop holds.
SIZES = [(1200, 128, 51), (2048, 256, 4096), (2048, 256, 32000)]
CHUNK_SIZE = 256
CHUNK_SIZES = (64, 256, None)
ROUNDS_S = 2.0
RANKS, ROWS, FEATURES, VOCABULARY = 2, 2048, 256, 32064
U = ROWS * VOCABULARY // RANKS * 2
PEAK_BARS, TIME_BAR = {256: 1.16, 64: 0.63}, 1.1


class LiveBytes(TorchDispatchMode):
    """The bytes of all storages but the given ones that nothing has freed, and their peak while active."""

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


def at(log_p, targets):
    return log_p.gather(-1, targets[:, None]).squeeze(-1)


def full_logits(hidden, head, targets):
    return at((hidden @ head.weight.T).float().log_softmax(-1), targets)


def chunked(hidden, head, targets, chunk_size=CHUNK_SIZE):
    return linear_logp(hidden, head, targets, chunk_size=chunk_size)


class _Gathered(torch.autograd.Function):
    """Logits of all ranks side by side, as every trainer without sharded log-probabilities makes them."""

    @staticmethod
    def forward(ctx, local):
        parts = [torch.empty_like(local) for _ in range(RANKS)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(RANKS, -1)[dist.get_rank()].contiguous()


def local_logits(hidden, head):
    return hidden @ head.weight.to_local().T


def gathered(hidden, head, targets):
    return at(_Gathered.apply(local_logits(hidden, head)).float().log_softmax(-1), targets)


def sharded_logits(hidden, head, targets):
    mesh = head.weight.device_mesh
    logits = DTensor.from_local(local_logits(hidden, head), mesh, [Shard(-1)], run_check=False)
    return get_logprobs_from_vocab_parallel_logits(logits, targets, chunk_size=CHUNK_SIZE)


def forward_backward(function, hidden, head, targets):
    return torch.autograd.grad(function(hidden, head, targets).sum(), [hidden, head.weight])


def peaks(function, hidden, head, targets):
    """Peak of forward, held for backward, peak of both, and the bytes of the gradients."""
    gc.collect()
    local = head.weight.to_local() if isinstance(head.weight, DTensor) else head.weight
    with LiveBytes(hidden, local, targets) as live:
        loss = function(hidden, head, targets).sum()
        forward, held = live.peak, live.now
        gradients = torch.autograd.grad(loss, [hidden, head.weight])
    results = sum(getattr(g, "_local_tensor", g).nbytes for g in gradients)
    return forward, held, live.peak, results


def best_seconds(functions, *arguments, rounds_s):
    """The fastest round of each function, rounds taken in turn so that all meet the same machine."""
    best = [float("inf")] * len(functions)
    end = time.perf_counter() + rounds_s
    rounds = 0
    while rounds < 2 or (rounds_s and time.perf_counter() < end):
        for number, function in enumerate(functions):
            if not rounds_s:
                dist.barrier()
            start = time.process_time()  # other work on the machine changes it little
            forward_backward(function, *arguments)
            best[number] = min(best[number], time.process_time() - start)
        rounds += 1
    return best


def table(header, rows):
    for row in [header, *rows]:
        print(f"{row[0]:>28} " + " ".join(f"{cell:>12}" for cell in row[1:]))


def whole_vocabulary():
    figures = []
    for num_rows, features, words in SIZES:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(num_rows, features, generator=generator).requires_grad_()
        head = nn.Linear(features, words, bias=False)
        targets = torch.randint(words, (num_rows,), generator=generator)
        full_s, chunked_s = best_seconds([full_logits, chunked], hidden, head, targets, rounds_s=ROUNDS_S)
        extra = []
        for function in (full_logits, chunked):
            *_, peak, results = peaks(function, hidden, head, targets)
            extra.append(peak - results - 4 * num_rows)
        figures.append(
            {
                "rows": num_rows,
                "hidden": features,
                "vocabulary": words,
                "seconds_full": full_s,
                "seconds_chunked": chunked_s,
                "time_ratio": round(chunked_s / full_s, 3),
                "extra_bytes_full": extra[0],
                "extra_bytes_chunked": extra[1],
                "extra_bytes_ratio": round(extra[1] / extra[0], 4),
            }
        )
    table(
        ("rows x hidden x vocabulary", "full ms", "chunked ms", "time", "full MB", "chunked MB"),
        [
            (
                f"{f['rows']} x {f['hidden']} x {f['vocabulary']}",
                f"{f['seconds_full'] * 1e3:.2f}",
                f"{f['seconds_chunked'] * 1e3:.2f}",
                f"{f['time_ratio']:.2f}",
                f"{f['extra_bytes_full'] / 1e6:.1f}",
                f"{f['extra_bytes_chunked'] / 1e6:.1f}",
            )
            for f in figures
        ],
    )
    return figures


def cut_vocabulary(rank, folder):
    """One rank's part; the first writes what it measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, FEATURES, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(VOCABULARY, FEATURES, generator=generator) / 16).bfloat16()
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    methods = {"all-gather, log_softmax": gathered, "from sharded logits": sharded_logits}
    for size in CHUNK_SIZES:
        methods[f"linear_logp, chunk {size or 'default'}"] = partial(chunked, chunk_size=size)
    measured = [peaks(function, hidden, head, targets) for function in methods.values()]
    seconds = best_seconds(list(methods.values()), hidden, head, targets, rounds_s=0)
    if rank == 0:
        figures = {
            name: {
                "forward_U": round(forward / U, 3),
                "held_U": round(held / U, 3),
                "peak_U": round(peak / U, 3),
                "seconds": round(each_s, 3),
                "time_ratio": round(each_s / seconds[0], 3),
            }
            for name, (forward, held, peak, _), each_s in zip(methods, measured, seconds, strict=True)
        }
        (folder / "figures").write_text(json.dumps(figures))
    dist.barrier()
    dist.destroy_process_group()


def main():
    torch.set_num_threads(1)
    figures = whole_vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(cut_vocabulary, args=(Path(folder),), nprocs=RANKS)
        sharded = json.loads((Path(folder) / "figures").read_text())
    print(f"\n{ROWS} x {FEATURES} x {VOCABULARY}, bf16, {RANKS} ranks; U = {U / 2**20:.1f} MiB")
    table(
        ("", "forward U", "held U", "peak U", "ms", "time"),
        [
            (
                name,
                *(f"{f[key]:.2f}" for key in ("forward_U", "held_U", "peak_U")),
                f"{f['seconds'] * 1e3:.0f}",
                f"{f['time_ratio']:.2f}",
            )
            for name, f in sharded.items()
        ],
    )
    within = {
        **{f"peak at chunk {n}": sharded[f"linear_logp, chunk {n}"]["peak_U"] <= bar for n, bar in PEAK_BARS.items()},
        **{f"time at vocabulary {f['vocabulary']}": f["time_ratio"] <= TIME_BAR for f in figures},
    }
    print(f"bars: a peak of at most {PEAK_BARS} U by chunk size, {TIME_BAR} times the time of full logits: {within}")
    print(
        json.dumps(
            {
                "linear_logp": figures,
                "chunk_size": CHUNK_SIZE,
                "over_ranks": sharded,
                "U_bytes": U,
                "within_bar": within,
                "torch": torch.__version__,
            }
        )
    )


if __name__ == "__main__":
    main()
