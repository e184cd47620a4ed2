"""A rank of checkpoint-engine's own server, with an engine of its own, for some refits. argv[1]: JSON of its arguments.

checkpoint-engine runs on GPUs alone. Here the host's memory is in a GPU's place: its device is replaced, pinned memory
is ordinary, NCCL is gloo, and the handle of a buffer leads to that buffer in this very process, where the engine is a
thread. Server, sockets, messages and the worker's end are the library's.
"""

import contextlib
import json
import os
import sys
import threading
from types import SimpleNamespace

import checkpoint_engine.device_utils
import checkpoint_engine.pin_memory
import checkpoint_engine.ps
import checkpoint_engine.worker
import torch
import zmq
from safetensors.torch import load_file

from rl_refit import Refit, Rendezvous
from rl_refit.checkpoint_engine import CheckpointEngineSink
from rl_refit.errors import RefitError

BUFFERS = {}


class Device:
    """Of a machine whose memory is its GPU's."""

    device_type, backend = "cpu", "gloo"

    def __init__(self):
        done = dict.fromkeys(("set_device", "empty_cache", "synchronize", "ipc_collect"), lambda *_: None)
        self.device_module = SimpleNamespace(
            **done,
            device_count=lambda: 1,
            current_device=lambda: 0,
            get_device_properties=lambda _: SimpleNamespace(uuid=f"host-{os.getpid()}"),
            mem_get_info=lambda: (2**20, 2**20),
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
        )


def buffer_of(number, *_):
    return BUFFERS[number]


def reduce_tensor(buffer):
    BUFFERS[id(buffer)] = buffer
    return buffer_of, (id(buffer),)


def empty(*arguments, pin_memory=False, **options):
    return torch.empty(*arguments, **options)


def use_the_host():
    for module in (checkpoint_engine.ps, checkpoint_engine.worker):
        module.DeviceManager = Device
    checkpoint_engine.ps.reduce_tensor = reduce_tensor
    checkpoint_engine.pin_memory.torch = SimpleNamespace(**{**vars(torch), "empty": empty})


class Engine:
    """Takes updates as a worker of vLLM does."""

    def __init__(self, weights):
        self.weights, self.refuses, self.paused = weights, "", False

    def load(self, weights):
        assert self.paused
        for name, tensor in weights:
            if name == self.refuses:
                raise ValueError("it does not fit")
            self.weights[name].copy_(tensor)

    def take(self, socket):
        with contextlib.suppress(RuntimeError):  # what the server says of an update that failed
            checkpoint_engine.worker.update_weights_from_ipc(zmq.Context.instance(), socket, None, run=self.load)


def main(task):
    use_the_host()
    rank, num_ranks = task["rank"], task["num_ranks"]
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{num_ranks}"}
    server = checkpoint_engine.ps.ParameterServer(master_addr="127.0.0.1", master_port=task["port"])
    engine = Engine(load_file(f"{task['like']}/model.safetensors"))
    fault = {}

    def request(sockets):
        if "request" in fault:
            raise ConnectionError("nobody is there")
        thread = threading.Thread(target=engine.take, args=(sockets[rank][1],), daemon=True)
        thread.start()
        thread.join()

    @contextlib.contextmanager
    def paused():
        engine.paused = True
        yield
        engine.paused = False

    timeout_s = 15.0 if "request" in task["refits"] else 120.0  # how long the other rank waits then
    sink = CheckpointEngineSink(
        server, request, like=task["like"], rank=rank, num_ranks=num_ranks, paused=paused, timeout_s=timeout_s
    )
    meeting = Rendezvous(task["address"], num_sources=1, num_sinks=num_ranks, sink_rank=rank)
    refit = Refit(sink=sink, rendezvous=meeting)
    for what in task["refits"]:
        fault.clear()
        fault |= {what: True} if rank == num_ranks - 1 else {}
        engine.refuses = what if rank == num_ranks - 1 else ""
        said = {"rank": rank, "what": what, "share": sorted(sink._fresh)}
        try:
            report = refit.receive(timeout_s=120)
            said |= {"version": report.version, "unreadable": sorted(report.unreadable)}
        except RefitError as error:
            said["error"] = f"{type(error).__name__}: {error}"
        said |= {"poisoned": sink.poisoned, "weights": {name: each.tolist() for name, each in engine.weights.items()}}
        print(json.dumps(said), flush=True)
    os._exit(0)  # a server that hangs would keep the process


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
