"""An engine in a process of its own, whose adapter is refitted twice. Argument: the address of the rendezvous."""

import sys

import torch

from rl_refit import AdapterSink, Refit, Rendezvous, SlotStream


def adapter(seed):
    """A and B of three layers, drawn from `seed`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"layers.{layer}.q_proj.lora_{part}.weight": torch.randn(shape, generator=generator)
        for layer in range(3)
        for part, shape in (("A", (4, 32)), ("B", (32, 4)))
    }


def main(address):
    copy = lambda number, tensors: {name: tensor.clone() for name, tensor in tensors.items()}  # noqa: E731
    sink = AdapterSink(adapter(0), load=copy, unload=lambda *_: None)
    meeting = Rendezvous(address, num_sources=1, num_sinks=1, sink_rank=0)
    refit = Refit(sink=sink, transport=SlotStream(), rendezvous=meeting)
    for version in (1, 2):
        refit.receive()
        assert all(torch.equal(tensor, sink.current[name]) for name, tensor in adapter(version).items())
    refit.close()


if __name__ == "__main__":
    main(sys.argv[1])
