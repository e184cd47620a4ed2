"""A rank of the sink that is a server of SGLang, for two refits. argv[1]: JSON of its arguments."""

import json
import sys

from rl_refit import Refit, Rendezvous
from rl_refit.sglang import SglangSink

if __name__ == "__main__":
    task = json.loads(sys.argv[1])
    sink = SglangSink(task["url"], like=task["like"], folder=task["folder"], api_key=task["api_key"])
    meeting = Rendezvous(task["address"], num_sources=1, num_sinks=2, sink_rank=task["rank"])
    refit = Refit(sink=sink, rendezvous=meeting)
    for _ in range(2):
        refit.receive(timeout_s=300)
    sink.check()
