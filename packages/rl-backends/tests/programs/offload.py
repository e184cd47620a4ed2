"""One rank of test_offload.py: train, offload, come back, train on; and the same without offloading."""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)  # 15 rows on two ranks: padded shards

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden).tanh())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def steps(model, optimizer, number):
    for _ in range(number):
        # No backward follows the second forward: the root unit stays gathered, as after `logp`.
        model(torch.ones(2, 5, dtype=torch.int64)).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            logits = model(torch.ones(2, 5, dtype=torch.int64))
    return logits


@contextlib.contextmanager
def fake_gpu():
    """Memory of the host that says it is a GPU's, so that it goes the way of one; yields what happens, in order.

    As ("copy" | "wait" | "give back", bytes that the tensors to be moved have at that time).
    """
    from rl_backends import offload
    from rl_backends.metrics.memory import NamedStorage, named_storages
    from rl_backends.offload import HostStore

    events, known = [], {}

    class OnFakeGpu(NamedStorage):
        @property
        def bytes(self):
            return torch.empty(0, dtype=torch.uint8).set_(self.storage)

    def find(tensors, *, seen=None):
        for held in named_storages(tensors, seen=seen):
            known[held.storage._cdata] = held.storage
            yield OnFakeGpu(held.name, held.storage, torch.device("cuda", 0), held.num_bytes)

    def note(what):
        events.append((what, sum(storage.nbytes() for storage in known.values())))

    def copying(method):
        def copy(store, pieces):
            note("copy")
            method(store, pieces)

        return copy

    with (
        mock.patch.object(offload, "named_storages", find),
        mock.patch.object(HostStore, "put", copying(HostStore.put)),
        mock.patch.object(HostStore, "get", copying(HostStore.get)),
        mock.patch("torch.cuda.synchronize", side_effect=lambda _: note("wait")),
        mock.patch("torch.cuda.empty_cache", side_effect=lambda: note("give back")),
    ):
        yield events


def main(task):
    from rl_backends.offload import Offloader
    from rl_parallel_plans import apply_fsdp

    torch.set_num_threads(1)
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task["rank"], world_size=task["ranks"])
    mesh = init_device_mesh("cpu", (task["ranks"],), mesh_dim_names=("dp",))
    results = {}
    for place in ("never", "disk", "host", "host of a fake GPU"):
        torch.manual_seed(0)
        model = apply_fsdp(Model(), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        steps(model, optimizer, 2)
        if place != "never":
            options = {"directory": task["folder"]} if place == "disk" else {}
            offloader = Offloader(model, **options)
            with fake_gpu() if place == "host of a fake GPU" else contextlib.nullcontext():
                left = offloader.offload([optimizer])
                try:
                    model(torch.ones(1, 2, dtype=torch.int64))
                    raise AssertionError("a forward without weights was not refused")
                except RuntimeError as error:
                    results[f"{place}: refusal"] = str(error)
                back = offloader.onload()
            results[f"{place}: bytes"] = [sum(each.bytes_moved.values()) for each in (left, back)]
        logits = steps(model, optimizer, 1)
        model.reshard()
        results[place] = [logits, *(parameter.to_local().clone() for parameter in model.parameters())]
    torch.save(results, Path(task["folder"]) / f"rank{task['rank']}.pt")
    dist.barrier()  # a rank that leaves early tears connections that the other still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
