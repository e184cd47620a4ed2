"""A version of the weights in safetensors files."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_refit import (
    CoverageError,
    DigestError,
    Layout,
    Manifest,
    ModuleSink,
    ModuleSource,
    RefitError,
    Region,
    TensorMeta,
)
from rl_refit.files import complete_versions, read_version, write_version


def tied(seed):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False), nn.Linear(7, 3))
    module[1].weight = module[0].weight
    return module.bfloat16()


class Half:
    """One of two ranks that each have half of the rows of one tensor."""

    device = torch.device("cpu")

    def __init__(self, rank, values):
        self.rank, self.values = rank, values

    def manifest(self):
        layout = Layout.from_placements((2,), (0,))
        return Manifest((TensorMeta(name="weight", shape=(5, 3), dtype="float32", layout=layout),))

    def shards(self, names):
        for region in self.manifest().by_name["weight"].regions_on(self.rank):
            yield region, self.values[region.index_within(Region("weight", (0, 0), (5, 3)))]


def test_an_engine_gets_the_bits_that_a_trainer_wrote(tmp_path):
    policy, engine = tied(0), tied(1)
    path = write_version(ModuleSource(policy), tmp_path, 3)
    assert path.name == "rank-0-of-1.safetensors"
    assert complete_versions(tmp_path) == (3,)
    sink = ModuleSink(engine)
    read_version(sink, tmp_path, 3)
    assert sink.version == 3
    assert all(torch.equal(*pair) for pair in zip(policy.parameters(), engine.parameters(), strict=True))
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with pytest.raises(RefitError, match="version 3 is not newer than the committed 3"):
        read_version(sink, tmp_path, 3)
    sink.check()


def test_ranks_write_their_own_boxes_and_a_version_is_complete_when_all_have(tmp_path):
    values, engine = torch.randn(5, 3), nn.Linear(3, 5, bias=False)
    write_version(Half(0, values), tmp_path, 1, rank=0, num_ranks=2)
    assert complete_versions(tmp_path) == ()
    with pytest.raises(RefitError, match=r"version-1 is not complete: it has \['rank-0-of-2.safetensors'\]"):
        read_version(ModuleSink(engine), tmp_path, 1)
    with pytest.raises(RefitError, match="this is one of 3 ranks"):
        write_version(Half(1, values), tmp_path, 1, rank=1, num_ranks=3)
    write_version(Half(1, values), tmp_path, 1, rank=1, num_ranks=2)
    read_version(ModuleSink(engine), tmp_path, 1)
    assert torch.equal(engine.weight, values)


def test_a_bit_that_flips_in_a_file_is_found_and_the_old_weights_stay(tmp_path):
    engine = tied(1)
    old = [parameter.clone() for parameter in engine.parameters()]
    path = write_version(ModuleSource(tied(0)), tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    sink = ModuleSink(engine)
    with pytest.raises(DigestError, match="in its file is not what was written"):
        read_version(sink, tmp_path, 1)
    sink.check()
    assert all(torch.equal(*pair) for pair in zip(old, engine.parameters(), strict=True))


def test_an_engine_of_other_tensors_is_refused(tmp_path):
    write_version(ModuleSource(nn.Linear(3, 2)), tmp_path, 1)
    engine = nn.Linear(3, 2)
    engine.register_buffer("scale", torch.ones(1))
    with pytest.raises(CoverageError, match="scale"):
        read_version(ModuleSink(engine), tmp_path, 1)
