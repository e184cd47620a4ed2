"""Where a fault strikes a party of a refit, and what it does there.

Wraps the real source, sink, transport and control of a party in a process of its own; nothing is replaced. A point is
named after what is about to happen, or has just happened: "transfer begins", "voted".
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field

import torch

from rl_refit.transports import base


class ChaosError(Exception):
    """What a source or sink raises of its own; no kind of this package's."""


@dataclass
class Fault:
    """Strikes the `nth` time that its point is passed once it is armed; never twice."""

    point: str
    action: str
    nth: int
    tell: object
    armed: bool = False
    passed: int = 0
    held: list = field(default_factory=list)

    def strikes(self, point):
        if not self.armed or point != self.point:
            return False
        self.passed += 1
        if self.passed != self.nth + 1:
            return False
        self.armed = False
        self.tell()
        return True

    def at(self, point):
        if self.strikes(point):
            act(self.action, self.point)


def act(action, point):
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "raise":
        raise ChaosError(f"at {point!r}")
    elif action == "interrupt":
        signal.raise_signal(signal.SIGINT)


@dataclass
class ChaosSource:
    source: object
    fault: Fault
    transferring: bool = False

    def __getattr__(self, name):
        return getattr(self.source, name)

    def manifest(self):
        self.fault.at("source is asked for its manifest")
        return self.source.manifest()

    def shards(self, names):
        if not self.transferring:
            self.fault.at("source is digested")
        return self.source.shards(names)


@dataclass
class ChaosSink:
    sink: object
    fault: Fault

    def __getattr__(self, name):
        return getattr(self.sink, name)

    def manifest(self):
        return self.sink.manifest()

    def prepare(self, manifest):
        self.fault.at("sink prepares")
        return self.sink.prepare(manifest)

    def stage(self, region, tensor, *, stays=False):
        if not self.fault.strikes("sink stages"):
            self.sink.stage(region, tensor, stays=stays)
            return
        act(self.fault.action, self.fault.point)
        if self.fault.action == "stop":
            self.sink.stage(region, tensor, stays=stays)
        elif self.fault.action == "flip":
            self.sink.stage(region, flipped(tensor), stays=stays)
        elif self.fault.action == "duplicate":
            self.sink.stage(region, tensor, stays=stays)
            self.sink.stage(region, tensor, stays=stays)

    def digest(self, regions=None):
        self.fault.at("sink is digested")
        return self.sink.digest(regions)

    def ready(self, version):
        self.sink.ready(version)

    def commit(self, version):
        self.fault.at("sink commits")
        self.sink.commit(version)
        self.fault.at("sink has committed")

    def abort(self):
        self.sink.abort()


def flipped(tensor):
    wrong = tensor.clone()
    wrong.view(-1).view(torch.uint8)[3] ^= 16
    return wrong


def wrap_transport(transport, fault, source):
    transfer = transport.transfer

    def chaotic(outbox, inbox, watch):
        fault.at("transfer begins")
        if source is not None:
            source.transferring = True
        try:
            transfer(outbox, inbox, watch)
        finally:
            if source is not None:
                source.transferring = False
        fault.at("transfer is over")

    transport.transfer = chaotic


def wrap_control(control, fault):
    gather, announce, decide, decision = control.gather, control.announce, control.decide, control.decision

    def chaotic_gather(step, values, watch):
        fault.at(f"before {step!r} is said")
        said = gather(step, values, watch)
        fault.at(f"{step!r} is said")
        return said

    def chaotic_announce(step, value, watch):
        answer = announce(step, value, watch)
        fault.at(f"{step!r} is known")
        return answer

    def chaotic_decide(value):
        answer = decide(value)
        fault.at("the decision is made")
        return answer

    def chaotic_decision(watch):
        answer = decision(watch)
        fault.at("the decision is known")
        return answer

    control.gather, control.announce = chaotic_gather, chaotic_announce
    control.decide, control.decision = chaotic_decide, chaotic_decision


def wrap_buckets(fault):
    """Of the process's outboxes: "bucket k leaves"; "contents" exchanges two pieces of one shape."""
    pieces = base.Outbox.pieces

    def chaotic(outbox, stream):
        last, swapped = None, None
        for bucket, piece, tensor in pieces(outbox, stream):
            fault.at("piece leaves")
            if bucket != last:
                last = bucket
                fault.at("bucket leaves")
            if fault.action == "contents" and fault.armed and tensor.dim() == 2:
                if swapped is not None and fault.strikes("contents"):
                    yield bucket, piece, swapped
                    continue
                swapped = tensor
            yield bucket, piece, tensor

    base.Outbox.pieces = chaotic


def wrap_wire(fault):
    """Of the process's wires: a bucket's message is dropped, sent twice, or sent after the next."""
    from rl_refit.transports.memory import Link
    from rl_refit.transports.messages import Group

    token_is_sent, message_is_sent = Link.send, Group.start

    def chaotic_token(link, token, watch):
        if token.full:
            for now in mangle(fault, token):
                token_is_sent(link, now, watch)
        else:
            token_is_sent(link, token, watch)

    def chaotic_message(group, operation, slot, rank, *, tag):
        if operation != "send":
            return message_is_sent(group, operation, slot, rank, tag=tag)
        works = [message_is_sent(group, operation, now, rank, tag=tag) for now in mangle(fault, slot)]
        return works[-1] if works else NothingToWaitFor()

    Link.send, Group.start = chaotic_token, chaotic_message


class NothingToWaitFor:
    def wait(self, *timeout):
        return True


def mangle(fault, message):
    """What is sent in place of `message`."""
    if fault.held:
        return [message, fault.held.pop()]
    if fault.action in ("drop", "duplicate", "reorder") and fault.strikes("message"):
        if fault.action == "duplicate":
            return [message, message]
        if fault.action == "reorder":
            fault.held.append(message.clone() if isinstance(message, torch.Tensor) else message)
        return []
    return [message]
