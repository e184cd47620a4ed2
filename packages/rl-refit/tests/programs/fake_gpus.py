"""GPUs, NCCL and CUDA IPC for processes that have none: what `rl_refit.gpu` asks of them, over shared memory and gloo.

`install` puts the fake in the place of `rl_refit.gpu` and records, for `gpu_order`, what each stream is given, which
memory that reads and writes, and all waits. Every tensor of the process counts as GPU memory. A stream does what it is
given at once, as a GPU may, but nobody may rely on it: only a recorded wait orders two streams.

NCCL is as it is: one communicator is one stream, messages have neither tags nor lengths, each waits for its other end,
the death of a peer leaves messages under way until the communicator is aborted, two ranks cannot share a GPU.
"""

import itertools
import mmap
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import torch
from torch.distributed import ProcessGroupGloo
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from rl_refit import gpu
from rl_refit.module_tensors import ModuleReader
from rl_refit.refit import Refit
from rl_refit.stores import BoundedStore
from rl_refit.transaction.party import Party
from rl_refit.transports import peers, stream
from rl_refit.transports.memory import Link
from rl_refit.transports.messages import Group

READ_BY_HOST = {"tolist", "item", "cpu", "equal", "__bool__", "__int__", "__float__"}


class Fake:
    """The GPU of one process.

    Args:
        process: Its number.
        folder: For the files that are its memory.
    """

    def __init__(self, process, folder):
        self.process, self.folder = process, folder
        self.events = []
        self.counts = itertools.count()
        self.names, self.kept = {}, []
        self.thread = threading.local()
        self.communicators, self.gloo = [], {}
        self.aborted = 0
        self.omitted = None
        self.hangs = False
        self.sees_deaths = False  # as NCCL may, over a network
        self.hang_s = 20.0  # what waits longer than this for a GPU would wait for ever

    def place(self, *, host, seen, own):
        """From now on the process is on `host`, sees the GPUs `seen` in this order, and its own is `own`."""
        self.host, self.seen, self.own = host, seen, own

    @property
    def device(self):
        return torch.device("cuda", self.seen.index(self.own)) if self.own in self.seen else torch.device("cpu")

    # -- What is recorded ----------------------------------------------------------------------------------------

    def note(self, kind, *what):
        self.events.append((time.monotonic_ns(), self.process, kind, *what))

    def region(self, tensor):
        """The name of the memory that `tensor` lies in, and the bytes of it from the first to the last element."""
        storage = tensor.untyped_storage()
        base, start = storage.data_ptr(), tensor.data_ptr()
        if base not in self.names:
            self.kept.append(storage)  # or its address would become another tensor's
            self.names[base] = f"memory {len(self.kept)} of process {self.process}"
        extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        return self.names[base], start - base, start - base + (extent * tensor.itemsize if tensor.numel() else 0)

    def kernel(self, what, *, reads=(), writes=()):
        """The current stream is given something to do."""
        accesses = [(*self.region(t), "reads") for t in reads] + [(*self.region(t), "writes") for t in writes]
        accesses = [access for access in dict.fromkeys(accesses) if access[2] > access[1]]
        if accesses:
            self.note("run", self.stream, accesses, what)

    def wait_for_stream(self):
        """The host waits for the current stream."""
        self.note("over", _Event(self).number)

    @property
    def stream(self):
        return getattr(self.thread, "stream", "the current stream")

    @contextmanager
    def in_stream(self, name):
        """Another stream is this thread's current one."""
        before, self.thread.stream = self.stream, name
        try:
            yield
        finally:
            self.thread.stream = before

    @contextmanager
    def watching(self):
        """What this thread does with tensors is recorded."""
        if getattr(self.thread, "is_watched", False):
            yield
            return
        self.thread.is_watched = True
        try:
            with _Kernels(self), _ReadsByHost(self):
                yield
        finally:
            self.thread.is_watched = False

    # -- In the place of rl_refit.gpu ----------------------------------------------------------------------------

    def uuids(self):
        return tuple(self.seen)

    def index_of(self, device):
        return device.index

    def use(self, device):
        self.thread.device = device

    def empty(self, nbytes, device):
        if device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8)
        path = f"{self.folder}/GPU memory {next(self.counts)} of process {self.process}"
        with Path(path).open("x+b") as file:
            file.truncate(max(nbytes, 1))
            return self._mapped(file, path)[:nbytes]

    def record(self, device):
        return (lambda: True) if device.type != "cuda" or self._is_omitted() else _Event(self).query

    def synchronize(self, device, limit_s):
        if device.type == "cuda" and not self._is_omitted():
            for communicator in self.communicators:
                communicator.wait_for_all(limit_s)
            self.note("synchronize")

    def _is_omitted(self):
        """Whether the function that waits here is the one whose waits are left out."""
        frame = sys._getframe(2)
        name = frame.f_back.f_code.co_name if frame.f_code.co_name == "_until_copied" else frame.f_code.co_name
        return name == self.omitted

    def export(self, buffer):
        return self.own, self.names[buffer.untyped_storage().data_ptr()].encode()

    def import_exported(self, exported, device):
        owner, path = exported
        assert self.seen[device.index] == owner
        with Path(path.decode()).open("r+b") as file:
            return self._mapped(file, path.decode())

    def communicator(self, place, timeout, device):
        assert device == self.device
        made = FakeNccl(self, place, timeout)
        self.communicators.append(made)
        return made

    def _mapped(self, file, name):
        memory = mmap.mmap(file.fileno(), 0)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)
        base = buffer.untyped_storage().data_ptr()
        self.names[base] = name
        weakref.finalize(memory, self._freed, base).atexit = False
        return buffer

    def _freed(self, base):
        self.note("free", self.names.pop(base))


class _Event:
    def __init__(self, fake):
        self.fake, self.number, self.asked = fake, next(fake.counts), 0
        fake.note("record", fake.stream, self.number)

    def query(self):
        self.asked += 1
        over = self.asked > 2 and not self.fake.hangs  # never at once, so that whoever asks asks again
        if over:
            self.fake.note("over", self.number)
        return over


class _Kernels(TorchDispatchMode):
    def __init__(self, fake):
        super().__init__()
        self.fake = fake

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        schema = function._schema
        if any(out.alias_info is not None and not out.alias_info.is_write for out in schema.returns):
            return result  # a view
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(arg, kwargs[arg.name]) for arg in schema.arguments if kwargs and arg.name in kwargs]
        reads, writes = [], []
        for argument, value in given:
            into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
            into += [each for each in (value if isinstance(value, list | tuple) else [value]) if _is_plain(each)]
        outputs = result if isinstance(result, list | tuple) else [result]
        name = function._overloadpacket.__name__
        if not name.startswith("empty"):
            writes += [each for each in outputs if _is_plain(each) and all(each is not other for other in writes)]
        self.fake.kernel(name, reads=reads, writes=writes)
        return result


class _ReadsByHost(TorchFunctionMode):
    """What gives the host values waits for the current stream."""

    def __init__(self, fake):
        super().__init__()
        self.fake = fake

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") in READ_BY_HOST:
            self.fake.kernel(function.__name__, reads=filter(_is_plain, args))
            self.fake.wait_for_stream()
        return result


def _is_plain(value):
    return type(value) in {torch.Tensor, torch.nn.Parameter}


# -- NCCL -------------------------------------------------------------------------------------------------------------


class FakeNccl:
    """A communicator: whatever it is given, it does in one stream, one after the other."""

    def __init__(self, fake, place, timeout):
        store, self.rank, size = place
        self.fake, self.name = fake, f"NCCL {next(fake.counts)}"
        if self.rank == 0:
            store.set("group", f"group {self.name} of process {fake.process}")
        self.group = store.get("group").decode()
        store.set(f"gpu of {self.rank}", fake.own)
        gpus = [store.get(f"gpu of {rank}") for rank in range(size)]
        assert len(set(gpus)) == size, f"Duplicate GPU detected: {gpus}"
        store.set(f"pid of {self.rank}", str(fake.process))
        self.processes = [int(store.get(f"pid of {rank}")) for rank in range(size)]
        options = ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self.gloo = ProcessGroupGloo(store, self.rank, size, options)
        self.sent = dict.fromkeys(range(size), 0)
        self.received = dict.fromkeys(range(size), 0)
        self.opened, self.pending, self.over = None, [], threading.Event()
        self.works = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _start_coalescing(self):
        assert self.opened is None
        self.opened = []

    def _end_coalescing(self):
        (work,), self.opened = self.opened, None
        self.pending.append(work)
        self.works.put(work)
        return work

    def send(self, tensors, rank, tag):
        self._give("send", tensors, rank, tag)

    def recv(self, tensors, rank, tag):
        self._give("recv", tensors, rank, tag)

    def _give(self, operation, tensors, rank, tag):
        assert self.opened == [], "outside of a group of calls NCCL makes a communicator for each pair"
        assert tag == 0, "NCCL knows no tags"
        (tensor,) = tensors
        counts, ends = self.sent if operation == "send" else self.received, (self.rank, rank)
        counts[rank] += 1
        sender, receiver = (self.processes[end] for end in (ends if operation == "send" else ends[::-1]))
        message = f"{self.group} {sender} {receiver} {counts[rank]}"
        self.opened.append(_Work(self, operation, tensor, rank, message))

    def _run(self):
        while (work := self.works.get()) is not None and not self.over.is_set():
            try:
                call = self.gloo.send if work.operation == "send" else self.gloo.recv
                call([work.tensor], work.rank, 0).wait(timedelta(seconds=3600))
            except RuntimeError:
                if self.fake.sees_deaths:
                    work.error = RuntimeError("NCCL error: remote process exited or there was a network error")
                    work.done.set()
                    continue
                del work, call
                self.over.wait()  # a peer is dead, and NCCL does not see it
                return
            work.done.set()

    def wait_for_all(self, limit_s):
        for work in [] if self.over.is_set() else [*self.pending]:
            assert work.done.wait(min(limit_s, self.fake.hang_s)), (
                f"{work.message} is under way, and who waits for the GPU waits for ever"
            )
        self.pending = [work for work in self.pending if not work.done.is_set() or work.error is not None]

    def shutdown(self):
        lost = [work.message for work in self.pending if not work.done.is_set() or work.error is not None]
        assert not lost, f"shutdown waits for ever for {lost}"
        self.over.set()
        self.works.put(None)

    def abort(self):
        self.fake.aborted += 1
        self.over.set()
        self.works.put(None)
        self.pending.clear()
        self.gloo.abort()
        self.fake.note("aborted", self.name)  # whoever aborts waits until nothing is under way


class _Work:
    def __init__(self, nccl, operation, tensor, rank, message):
        self.nccl, self.operation, self.tensor, self.rank, self.message = nccl, operation, tensor, rank, message
        self.done, self.error, self.asked, self.number = threading.Event(), None, 0, next(nccl.fake.counts)
        access = (*nccl.fake.region(tensor), "reads" if operation == "send" else "writes")
        nccl.fake.note("begin", nccl.fake.stream, nccl.name, self.number, [access], operation, message)

    def is_completed(self):
        self.asked += 1
        if self.asked == 1 or not self.done.is_set():
            return False
        self.nccl.fake.note("ended", self.nccl.name, self.number)
        return True

    def wait(self):
        assert self.done.wait(self.nccl.fake.hang_s)  # NCCL has the stream wait, and not the host
        self.nccl.fake.note("waited", self.nccl.fake.stream, self.number)
        self.tensor = None
        if self.error is not None:
            raise self.error


# -- One process ------------------------------------------------------------------------------------------------------


def install(process, folder):
    """Put the fake in the place of `rl_refit.gpu`, in this process, and record what a refit does from now on."""
    fake = Fake(process, folder)
    here = peers._this_process
    peers._this_process = lambda *own: replace(here(*own), host=fake.host)
    Refit._run = _watched(fake, Refit._run)
    stream.SlotStream.transfer = _watched(fake, stream.SlotStream.transfer)
    for name in gpu.__all__:
        setattr(gpu, name, getattr(fake, name))
    Party.device = property(lambda party: fake.device)
    ModuleReader.device = property(lambda reader: fake.device)
    Group.begin, Group.has_ended = _beginning(fake, Group.begin), _ending(fake, Group.has_ended)
    stream.write_header = _copying_from_host(fake, stream.write_header)
    Link.send, Link.take = _telling(fake, Link.send), _hearing(fake, Link.take)
    for name in ("set", "get", "compare_set"):
        setattr(BoundedStore, name, _in_store(fake, name, getattr(BoundedStore, name)))
    return fake


def _watched(fake, call):
    def watched(*arguments, **more):
        with fake.watching():
            return call(*arguments, **more)

    return watched


def _copying_from_host(fake, call):
    def copying(slot, numbers):
        if not fake.region(slot)[0].startswith(str(fake.folder)):  # from host to host: no stream has a part in it
            with _disable_current_modes():
                return call(slot, numbers)
        call(slot, numbers)
        fake.wait_for_stream()  # as torch does after a copy between host and GPU
        return None

    return copying


def _peer(link):
    return struct.unpack("3i", link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def _telling(fake, send):
    def telling(link, token, watch):
        fake.note("say", f"{os.getpid()} {_peer(link)} {token!r}")
        send(link, token, watch)

    return telling


def _hearing(fake, take):
    def hearing(link, token, watch):
        got = take(link, token, watch)
        if got is not None:
            fake.note("hear", f"{_peer(link)} {os.getpid()} {got!r}")
        return got

    return hearing


def _beginning(fake, begin):
    sent = defaultdict(itertools.count)

    def beginning(group, kind, slot, peer, *, bucket, tag):
        if not group.is_ordered:  # NCCL says so itself
            operation = "recv" if kind == "receive" else "send"
            ends = (peer[0], group._peers.own) if operation == "recv" else (group._peers.own, peer[0])
            number, message = next(fake.counts), f"gloo {ends} {tag} {next(sent[(*ends, tag)])}"
            access = (*fake.region(slot), "writes" if operation == "recv" else "reads")
            fake.note("begin", None, f"gloo {number}", number, [access], operation, message)
        begun = begin(group, kind, slot, peer, bucket=bucket, tag=tag)
        if not group.is_ordered:
            fake.gloo[begun] = number
        return begun

    return beginning


def _ending(fake, has_ended):
    def ending(group, message, watch):
        ended = has_ended(group, message, watch)
        if ended and message in fake.gloo:
            fake.note("ended", "gloo", fake.gloo.pop(message))
        return ended

    return ending


def _in_store(fake, name, call):
    def calling(store, key, *values):
        if name != "get":
            fake.note("say", f"{key} {values[-1]}")
        result = call(store, key, *values)
        if name != "set":
            fake.note("hear", f"{key} {result.decode()}")
        return result

    return calling
