"""A trainer in a process of its own: refits an engine elsewhere to the weights of two seeds."""

import sys

import tiny

from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.transports.stream import SlotStream

architecture, store, *seeds = sys.argv[1:]
for version, seed in enumerate(seeds):
    meeting = Rendezvous(f"file://{store}-{version}", num_sources=1, num_sinks=1, source_rank=0)
    source = tiny.source(tiny.policy(architecture, int(seed)))
    refit = Refit(source, transport=SlotStream(), rendezvous=meeting)
    print(refit(version=version).digest, flush=True)
    refit.close()
