"""The sink for vLLM, as far as it needs no vLLM: shared banks, what a loader copies, and what surveys come to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_refit.errors import CoverageError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.vllm import WORKER_EXTENSION
from rl_refit.vllm.bank import Bank, identity_of
from rl_refit.vllm.copies import Copies, Place, box_within
from rl_refit.vllm.needs import NeedsConfig, needs_of, rows_of


def meta(name, shape=(4, 3), dtype="float32", tied_to=None):
    return TensorMeta(name=name, shape=shape, dtype=dtype, layout=Layout.whole(), tied_to=tied_to)


# -- The bank ----------------------------------------------------------------------------------------------------

READER = """
import sys
from rl_refit.vllm.bank import Bank
path, *identity = sys.argv[1:]
bank = Bank.attach(path, [int(number) for number in identity], [["a", "bfloat16", [5], 0], ["b", "int64", [2, 2], 512]])
print(bank.tensors["a"].tolist(), bank.tensors["b"].tolist())
bank.tensors["b"][1, 1] = 7
"""


@pytest.fixture
def bank(tmp_path):
    """A bank of two tensors, and the descriptor of its file."""
    bank, descriptor = Bank.create([meta("a", (5,), "bfloat16"), meta("b", (2, 2), "int64")], str(tmp_path))
    yield bank, descriptor
    os.close(descriptor)


def attach(descriptor, identity):
    command = [sys.executable, "-c", READER, f"/proc/{os.getpid()}/fd/{descriptor}", *map(str, identity)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)


def test_another_process_maps_the_same_memory_and_the_file_has_no_name(bank, tmp_path):
    ours, descriptor = bank
    ours.tensors["a"].copy_(torch.arange(5))
    reader = attach(descriptor, identity_of(descriptor))
    assert reader.stdout == "[0.0, 1.0, 2.0, 3.0, 4.0] [[0, 0], [0, 0]]\n", reader.stderr
    assert ours.tensors["b"].tolist() == [[0, 0], [0, 7]]
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_has_come_to_mean_another_file_is_refused(bank):
    _, descriptor = bank
    reader = attach(descriptor, (0, 0, 0))
    assert "is another file here" in reader.stderr


def test_a_driver_out_of_reach_is_refused(bank):
    ours, descriptor = bank
    with pytest.raises(RefitError, match="cannot open the driver's shared memory /proc/0/fd/3: No such file"):
        Bank.attach("/proc/0/fd/3", identity_of(descriptor), ours.table)


def test_boxes_of_a_bank_are_digested_like_the_tensors_that_they_copy(bank):
    ours, _ = bank
    ours.tensors["b"].copy_(torch.tensor([[1, 2], [3, 4]]))
    same, part = ours.digest(ours.whole), ours.digest([Region("b", (1, 0), (1, 2))])
    assert same.tensors.keys() == {"a", "b"}
    ours.tensors["b"][0, 0] = 5
    assert ours.digest(ours.whole).differing(same) == ("b",)
    assert ours.digest([Region("b", (1, 0), (1, 2))]).tensors == part.tensors
    assert ours.view(Region("b", (1, 0), (2, 2))) is None
    assert ours.view(Region("c", (0,), (1,))) is None


# -- What a loader copies ----------------------------------------------------------------------------------------


@given(st.data())
def test_the_box_of_a_view_is_where_its_elements_are(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True)]
    view = whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    view = view.permute(data.draw(st.permutations(range(len(shape)))))
    box = box_within(Place.of(view), Place.of(whole))
    assert box is not None
    found = whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))]
    assert sorted(found.flatten().tolist()) == sorted(view.flatten().tolist())


def test_a_view_that_is_no_box_is_not_taken_for_one():
    whole = torch.empty(4, 6)
    assert box_within(Place.of(whole[:, ::2]), Place.of(whole)) is None
    assert box_within(Place.of(whole.flatten()[3:9]), Place.of(whole)) is None
    assert box_within(Place.of(torch.empty(9).as_strided((3,), (1,), 6)), Place.of(torch.empty(4))) is None


def test_copies_know_their_source_and_padding_knows_none():
    copies, target = Copies(), torch.empty(4, 2, device="meta")
    weights = {"plain": torch.empty(2, 2, device="meta"), "cast": torch.empty(1, 2, device="meta")}
    with copies:
        loaded = dict(copies.watch(weights.items()))
        target[:2].copy_(loaded["plain"].t())
        target[2:3].copy_(loaded["cast"].half().float())
        target[3:].fill_(0)
    plain, made, padding = copies.to(target)
    assert (plain.names, plain.origin) == (("plain",), Place(0, (2, 2), (1, 2), torch.float32))
    assert (made.names, made.origin, made.target.offset) == (("cast",), None, 4)
    assert (padding.names, padding.origin) == ((), None)


# -- What surveys come to ----------------------------------------------------------------------------------------

SOURCE = Manifest(
    (meta("embed.weight"), meta("up.weight"), meta("rotary.inv_freq"), meta("head.weight", tied_to="embed.weight"))
)
WHOLE = {
    "vllm": "0",
    "architecture": "Toy",
    "refused": None,
    "unused": [],
    "clashes": [],
    "casts": {},
    "ties": {},
    "live_ties": {},
    "complete": ["embed.weight", "up.weight"],
    "padded": [],
    "derived": [],
    "never": [],
    "partial": {},
    "unreadable": {},
    "repaired": False,
}


def needs(*answers, ties=False, **options):
    config = NeedsConfig(**options)
    rows = rows_of(SOURCE, config, ties=ties)
    return needs_of(SOURCE, rows, answers=[{**WHOLE, **answer} for answer in answers], config=config)


def test_what_is_fed_tied_and_derived_is_in_the_manifest():
    manifest = needs({}).manifest
    assert [(each.name, each.travels, each.tied_to, each.feeding) for each in manifest.tensors] == [
        ("embed.weight", True, None, "fed"),
        ("up.weight", True, None, "fed"),
        ("rotary.inv_freq", False, None, "derived"),
        ("head.weight", False, "embed.weight", "fed"),
    ]


def test_a_tied_tensor_that_the_engine_has_apart_travels_on_its_own():
    by_name = needs({}, ties=True).manifest.by_name
    assert (by_name["head.weight"].tied_to, by_name["head.weight"].travels) == (None, True)


def test_a_tensor_that_one_worker_of_two_uses_has_a_place():
    assert needs({"unused": ["up.weight"]}, {}).manifest.by_name["up.weight"].travels
    with pytest.raises(CoverageError, match=r"1 have no place in the engine:\n  up\.weight"):
        needs({"unused": ["up.weight"]}, {"unused": ["up.weight"]})


def test_a_tensor_that_any_worker_lacks_is_named_unless_it_is_constant():
    lacks = {"never": ["scale"], "partial": {"fused.weight": [3, 9]}}
    with pytest.raises(CoverageError) as caught:
        needs({}, lacks)
    assert caught.value.unfed == ("scale: never written", "fused.weight: 3 of 9 elements are never written")
    assert "  declared constant: scale" in needs({}, lacks, constant=("scale", "fused.*")).text


def test_two_sources_for_one_place_a_cast_and_a_tie_of_the_engines_own_are_refused():
    with pytest.raises(CoverageError) as caught:
        needs({"clashes": ["a and b are both written to c"], "casts": {"up.weight": "bfloat16"}})
    assert caught.value.mismatched == (
        "a and b are both written to c",
        "up.weight: float32 in the source, bfloat16 in the engine; cast=True allows it",
    )
    assert "  cast to bfloat16: up.weight" in needs({"casts": {"up.weight": "bfloat16"}}, cast=True).text
    with pytest.raises(
        CoverageError, match=r"the engine tied it to embed\.weight when it loaded equal values for both"
    ):
        needs({"live_ties": {"up.weight": "embed.weight"}})
    needs({"live_ties": {"head.weight": "embed.weight"}})  # as the source has it


def test_what_a_loader_refuses_is_named():
    with pytest.raises(
        CoverageError, match=r"the load_weights of vLLM's Toy refuses 'value\.weight': KeyError: 'value'"
    ):
        needs({"refused": ["value.weight", "KeyError: 'value'"]})


def test_importing_the_sink_imports_no_vllm_and_the_worker_has_the_name_that_is_told():
    code = f"import pkgutil, sys; pkgutil.resolve_name({WORKER_EXTENSION!r}); assert 'vllm' not in sys.modules"
    source = Path(__file__).parents[1] / "src"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(source)}, timeout=240)
