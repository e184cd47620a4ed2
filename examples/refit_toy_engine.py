"""rl-refit into an engine of your own, in another process: new weights arrive verified, or the old ones stay.

The trainer has two projections; the toy engine keeps them fused in one matrix, as inference engines do. Any engine
takes part: `ModuleSink` serves an `nn.Module`, and four methods of your own serve anything else. Needs torch alone.
"""

import multiprocessing
import tempfile

import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit, RefitError, Rendezvous, SlotStream
from rl_refit.fused import fused_gate_up


class Policy(nn.Module):
    """What is trained."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        return nn.functional.silu(self.gate(x)) * self.up(x)


class ToyEngine(nn.Module):
    """What samples: the same function, with one matrix."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return nn.functional.silu(gate) * up


def where_weights_live(engine):
    """Which of the trainer's tensors lie where in the engine's storage."""
    return fused_gate_up(engine.gate_up.weight, ("gate.weight", "up.weight"))


def serve(address, num_refits, results):
    """The engine's process: receive, then answer with the new weights."""
    engine = ToyEngine()
    sink = ModuleSink(engine, bindings=where_weights_live)
    meeting = Rendezvous(address, num_sources=1, num_sinks=1, sink_rank=0)
    refit = Refit(sink=sink, transport=SlotStream(arena=True), rendezvous=meeting)
    for _ in range(num_refits):
        refit.receive(timeout_s=60)
        sink.check()  # raises if the weights may be torn
        results.put((sink.version, engine(torch.ones(8)).tolist()))
    refit.close()


def main():
    context = multiprocessing.get_context("spawn")
    address, results = f"file://{tempfile.mkdtemp()}/store", context.Queue()  # or tcp://host:port
    engine = context.Process(target=serve, args=(address, 2, results))
    engine.start()

    policy = Policy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    meeting = Rendezvous(address, num_sources=1, num_sinks=1, source_rank=0)
    refit = Refit(ModuleSource(policy), transport=SlotStream(arena=True), rendezvous=meeting)
    for step in (1, 2):
        optimizer.zero_grad()
        policy(torch.ones(8)).square().sum().backward()
        optimizer.step()
        print(refit(version=step).explain())  # the version is the number of optimizer steps
        version, answer = results.get()
        assert version == step
        assert torch.allclose(torch.tensor(answer), policy(torch.ones(8)))
    print("the engine computes what the policy computes")
    engine.join()

    policy.extra = nn.Linear(2, 2)  # a tensor that the engine has no place for
    try:
        Refit(ModuleSource(policy), ModuleSink(ToyEngine(), bindings=where_weights_live))(version=3)
    except RefitError as error:
        print("refused before a byte moves:", str(error).splitlines()[0])


if __name__ == "__main__":
    main()
