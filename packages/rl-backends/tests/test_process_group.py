"""How the ranks of a trainer meet: on the interface that leads to the first, whatever the host's own name means."""

import subprocess
import sys
import textwrap

from rl_backends.process_group import interface_of

RANK = """
    import os, socket, sys
    import torch, torch.distributed as dist
    from rl_backends.process_group import host_store, meet_at

    rank, port = int(sys.argv[1]), int(sys.argv[2])
    ip, store = "127.0.0.2", None  # of this machine, and not the address that stands for a run on one machine
    if rank == 0:
        store, port = host_store(ip, num_ranks=2, timeout_s=120.0)
        print(port, flush=True)
    local = {"local_rank": 0, "num_local_ranks": 1}  # as on two machines
    meet_at((ip, port), store=store, rank=rank, num_ranks=2, **local, device="cpu", timeout_s=120.0)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [os.environ[name] for name in names] == [str(rank), "2", "0", "1", ip]
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    print(total.item(), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
    dist.barrier()
    dist.destroy_process_group()
"""


def test_interfaces_are_found_by_their_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None  # nobody's: kept for documentation


def test_ranks_meet_on_the_interface_that_leads_to_the_first(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    program = tmp_path / "rank.py"
    program.write_text(textwrap.dedent(RANK))

    def start(rank, port):
        return subprocess.Popen([sys.executable, str(program), str(rank), str(port)], stdout=subprocess.PIPE, text=True)

    with start(0, 0) as first:
        port = int(first.stdout.readline())
        with start(1, port) as second:
            assert first.communicate(timeout=300)[0] == "3.0 lo\n"
            assert second.communicate(timeout=300)[0] == "3.0 lo\n"
