"""A claim about the check of a machine: two processes that can add up are found to."""

import os

from rl_refit.machine_check import check_all_reduce


def test_gloo_adds_up_over_two_processes_on_loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", os.environ.get("GLOO_SOCKET_IFNAME", "lo"))  # put back afterwards
    assert check_all_reduce("gloo", 2) == {"processes": 2}
