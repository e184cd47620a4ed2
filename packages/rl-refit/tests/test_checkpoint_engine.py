"""checkpoint-engine's own server and worker as a sink, over two ranks; the host's memory is in a GPU's place."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rl_refit import Refit, Rendezvous, StateDictSource
from rl_refit.checkpoint_engine import CheckpointEngineSink
from rl_refit.errors import RefitError

PROGRAM = Path(__file__).parent / "programs" / "checkpoint_engine_ranks.py"


def weights(version):
    torch.manual_seed(version)
    module = nn.ModuleDict({"embed": nn.Embedding(5, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 5)})
    return {name: torch.randn(each.shape) for name, each in module.state_dict().items()}


@pytest.fixture
def like(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    save_file(weights(0), folder / "model.safetensors")
    return folder


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def refitted(tmp_path, like, refits):
    """What each rank says of each refit, and what the source's calls raised."""
    common = {"like": str(like), "address": f"file://{tmp_path}/store", "port": free_port(), "num_ranks": 2}
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, json.dumps({**common, "rank": rank, "refits": refits})],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    source, errors = weights(0), []
    meeting = Rendezvous(common["address"], num_sources=1, num_sinks=2, source_rank=0, timeout_s=120)
    refit = Refit(StateDictSource(source), rendezvous=meeting, deadline_s=100)
    try:
        for version, _ in enumerate(refits, 1):
            for name, tensor in weights(version).items():
                source[name].copy_(tensor)
            try:
                refit(version=version)
                errors.append(None)
            except RefitError as error:
                errors.append(str(error))
        outputs = [each.communicate(timeout=120) for each in ranks]
    finally:
        refit.close()
        for each in ranks:
            each.kill()
            each.communicate()
    assert all(each.returncode == 0 for each in ranks), outputs
    return [[json.loads(line) for line in output.splitlines()] for output, _ in outputs], errors


def same(said, version):
    return all(torch.equal(torch.tensor(said["weights"][name]), tensor) for name, tensor in weights(version).items())


def test_every_engine_has_each_version_bit_for_bit_and_each_rank_stages_its_share(tmp_path, like):
    ranks, errors = refitted(tmp_path, like, ["all is well", "all is well"])
    assert errors == [None, None]
    for version in (1, 2):
        one, other = (said[version - 1] for said in ranks)
        assert same(one, version)
        assert same(other, version)
        assert not {*one["share"]} & {*other["share"]}
        assert {*one["share"], *other["share"]} == {*weights(0)}
        assert one["unreadable"] == one["share"]
        assert one["version"] == other["version"] == version


# The server has two buckets, of each rank's share; it looks at the answer to the first, and not at that to the last.
@pytest.mark.parametrize("refused", ["embed.weight", "norm.weight"])
def test_an_engine_that_does_not_load_a_tensor_is_poisoned_and_the_next_refit_repairs_it(tmp_path, like, refused):
    ranks, errors = refitted(tmp_path, like, [refused, "all is well"])
    assert "an engine did not load what it was sent" in errors[0]
    assert "it does not fit" in errors[0]
    assert errors[1] is None
    assert ranks[1][0]["poisoned"]
    assert not ranks[1][1]["poisoned"]
    assert all(same(repaired, 2) for _, repaired in ranks)


def test_an_engine_that_is_not_asked_is_an_error_within_seconds_and_the_server_is_given_up(tmp_path, like):
    ranks, errors = refitted(tmp_path, like, ["request", "all is well"])
    assert "ConnectionError('nobody is there')" in errors[0]
    assert ranks[1][0]["poisoned"]
    assert "start a new ParameterServer in a new process" in errors[1]
    assert same(ranks[1][1], 0)


def test_what_the_server_does_not_register_reaches_nobody(like):
    class Full:
        _bind_zmq_socket = None

        def register_checkpoint(self, *_, **__):
            raise MemoryError("no room to pin")

    source, sink = StateDictSource(weights(1)), sink_of(Full(), like)
    with pytest.raises(RefitError, match="did not register version 1: MemoryError: no room to pin"):
        Refit(source, sink)(version=1)
    sink.check()


def sink_of(server, like, **options):
    return CheckpointEngineSink(server, print, like=like, **{"rank": 0, "num_ranks": 1, "paused": open} | options)


def test_a_release_whose_answers_cannot_be_heard_is_refused(like):
    with pytest.raises(RefitError, match=r"this release of checkpoint-engine has no ParameterServer\._bind_zmq_socket"):
        sink_of(None, like)


def test_ranks_that_are_none_or_would_have_nothing_are_refused(like):
    with pytest.raises(ValueError, match="rank=1 is no rank of num_ranks=1"):
        sink_of(None, like, rank=1)
    with pytest.raises(ValueError, match=r"num_ranks=9 leaves no tensor of .* for rank 8"):
        sink_of(None, like, rank=8, num_ranks=9)
