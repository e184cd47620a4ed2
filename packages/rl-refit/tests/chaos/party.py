"""One party of a refit under chaos: a process that does what its supervisor says, a line of JSON at a time.

Every party makes its weights from a version, so that it can tell for itself, bit for bit, which ones an engine has.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time

import torch
from cases import PATIENCE_S
from points import ChaosSink, ChaosSource, Fault, wrap_buckets, wrap_control, wrap_transport, wrap_wire
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit, RefitError, Rendezvous
from rl_refit.transports.stream import SlotStream

LAYERS, HIDDEN = 6, 32
BUCKET_BYTES = 4608  # a layer: a weight of 4096 bytes, a bias of 128, and what aligns them
TRANSPORTS = {"arena": {"arena": True}, "ring": {}, "messages": {"share_memory": False}}


def model(version):
    generator = torch.Generator().manual_seed(1000 + version)
    layers = nn.Sequential(*(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS)))
    set_weights(layers, generator)
    return layers


def set_weights(module, generator):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def limit_files(nbytes):
    """No file of this process may become larger, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


def change_manifest(module, how):
    """What a user may do to a policy between two refits, and must not."""
    if how == "rename":
        module.add_module("renamed", module._modules.pop("2"))
    elif how == "shape":
        module[2] = nn.Linear(HIDDEN, HIDDEN + 1)
    elif how == "dtype":
        module[2].to(torch.bfloat16)
    elif how == "missing":
        del module[2]
    elif how == "one more":
        module.append(nn.Linear(HIDDEN, HIDDEN))


class Party:
    def __init__(self, spec, answer):
        self.spec, self.answer = spec, answer
        self.is_source, self.is_sink = spec.get("source_rank") is not None, spec.get("sink_rank") is not None
        fault = spec.get("fault") or {"point": None, "action": "none"}
        self.fault = Fault(fault["point"], fault["action"], fault.get("nth", 0), self.tell_fault)
        self.module = model(0)
        if fault["action"] in ("rename first", "missing first", "shape first", "dtype first"):
            change_manifest(self.module, fault["action"].removesuffix(" first"))
        self.sink = self.source = self.refit = None
        if self.is_sink:
            self.engine = model(-1)
            on_commit = self.on_commit
            self.sink = ChaosSink(ModuleSink(self.engine, mode=spec["mode"], on_commit=on_commit), self.fault)
        if self.is_source:
            self.source = ChaosSource(ModuleSource(self.module), self.fault)
        wrap_buckets(self.fault)
        wrap_wire(self.fault)

    def on_commit(self, version):
        self.fault.at("engine takes the weights")

    def tell_fault(self):
        self.say({"struck": time.monotonic()})

    def say(self, message):
        self.answer.write(json.dumps(message) + "\n")
        self.answer.flush()

    def meet(self, *, address, name, hosts, reuse=False):
        spec = self.spec
        if reuse:
            address = self.rendezvous.connect()
        self.rendezvous = Rendezvous(
            address,
            num_sources=spec["num_sources"],
            num_sinks=spec["num_sinks"],
            source_rank=spec.get("source_rank"),
            sink_rank=spec.get("sink_rank"),
            hosts=hosts,
            timeout_s=spec.get("timeout_s", PATIENCE_S),
            liveness_s=spec["liveness_s"],
            name=name,
        )
        self.refit = Refit(
            self.source,
            self.sink,
            self.transport(),
            rendezvous=self.rendezvous,
            bucket_bytes=spec.get("bucket_bytes", BUCKET_BYTES),
            buckets=2,
            deadline_s=spec["deadline_s"],
            verify=spec.get("verify", "full"),
        )
        wrap_control(self.refit._control, self.fault)

    def transport(self):
        name, directory = self.spec["transport"], self.spec["directory"]
        made = SlotStream(directory=directory, **TRANSPORTS[name])
        wrap_transport(made, self.fault, self.source)
        return made

    def bring(self, version, *, armed=False):
        """One refit at this party, and what came of it."""
        if self.is_source:
            set_weights(self.module, torch.Generator().manual_seed(1000 + version))
        deadline_s = self.spec["deadline_s"] if armed else PATIENCE_S
        self.refit._config = dataclasses.replace(self.refit._config, deadline_s=deadline_s)
        self.fault.armed = armed
        if armed:
            self.act_outside(version)
        result = {"version": version}
        try:
            if self.is_source:
                version += self.spec["fault"]["by"] if armed and self.fault.action == "version" else 0
                report = self.refit(version=version)
            else:
                report = self.refit.receive(timeout_s=self.spec.get("receive_s", PATIENCE_S))
            result |= {"digest": report.digest, "verified": report.verified}
        except (KeyboardInterrupt, Exception) as error:  # noqa: BLE001 - every kind is the judge's to know
            result |= describe(error)
            del error
        result["ended"] = time.monotonic()
        self.fault.armed = False
        limit_files(resource.RLIM_INFINITY)
        gc.collect()
        return result | self.state()

    def act_outside(self, version):
        """Faults of the caller, rather than of a point on the way."""
        if self.fault.action in ("rename", "shape", "dtype", "missing", "one more"):
            self.tell_fault()
            change_manifest(self.module, self.fault.action)
        elif self.fault.point == "call":
            self.tell_fault()
            if self.fault.action == "full disk":
                limit_files(4096)
            elif self.fault.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault.action == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.fault.action == "close":
                self.refit.close()

    def state(self):
        if not self.is_sink:
            return {}
        state = {"sink_version": self.sink.version, "poisoned": self.sink.poisoned, "weights": None}
        for version in range(-1, 6):
            if all(map(torch.equal, self.engine.parameters(), model(version).parameters())):
                state["weights"] = version
        return state

    def obey(self, commands):
        for line in commands:
            command = json.loads(line)
            kind = command.pop("do")
            if kind == "meet":
                self.meet(**command)
                self.say({"met": True})
            elif kind == "bring":
                self.say(self.bring(**command))
            elif kind == "close":
                self.refit.close()
                self.say({"closed": True})
            else:
                return


def describe(error):
    chain, cause = [], error.__context__
    while cause is not None:
        chain.append(f"{type(cause).__name__}: {cause}")
        cause = cause.__context__
    return {
        "error": type(error).__name__,
        "is_refit_error": isinstance(error, RefitError),
        "message": str(error),
        "notes": list(getattr(error, "__notes__", ())),
        "phase": getattr(error, "phase", None),
        "bucket": getattr(error, "bucket", None),
        "tensor": getattr(error, "tensor", None),
        "peer": getattr(error, "peer", None),
        "context": chain,
    }


def main(spec, commands, answer):
    """What a forked process does; never returns."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    if spec.get("file_bytes"):
        limit_files(spec["file_bytes"])
    status = 1
    try:
        Party(spec, answer).obey(commands)
        status = 0
    except BaseException:  # noqa: BLE001 - the judge sees it, and the process ends
        import traceback

        traceback.print_exc()
        answer.write(json.dumps({"crashed": traceback.format_exc()}) + "\n")
        answer.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
