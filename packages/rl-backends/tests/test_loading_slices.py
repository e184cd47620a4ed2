"""Claims about tensors that are read from files box by box: any box of any conversion is that of the whole tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from rl_backends.loading import weights as loading_weights
from rl_backends.loading.weights import UnknownConversionError, open_tensors

EXPERTS = {f"{name}.{index}": (4 + 2 * (name == "up"), 6) for name in ("gate", "up") for index in range(3)}


def merged(tensors):
    """What transformers 5 makes of a mixture's experts: stacked, joined, and in some models transposed."""
    gate, up = ([tensors[f"{name}.{index}"] for index in range(3)] for name in ("gate", "up"))
    joined = torch.cat([torch.stack(gate, dim=0), torch.stack(up, dim=0)], dim=1)
    return {
        "joined": joined,
        "transposed": torch.transpose(joined, dim0=1, dim1=2).contiguous(),
        "chunk": torch.chunk(joined, 3, dim=1)[2],
        "uneven chunk": torch.chunk(joined, 3, dim=2)[-1],
        "split": torch.split(joined, [1, 2], dim=0)[1],
        "last": torch.stack(up, dim=-1),
        "squeezed": torch.chunk(joined, 3, dim=0)[1].squeeze(0),
        "plain": tensors["up.1"],
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The conversions of tensors in memory, and of the same tensors in a file."""
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) for name, shape in EXPERTS.items()}
    file = tmp_path_factory.mktemp("file") / "model.safetensors"
    save_file(tensors, file)
    with open_tensors([file]) as found:
        yield merged(tensors), merged(found)


@given(data=st.data())
def test_any_box_of_a_conversion_is_that_of_the_whole(both, data):
    name = data.draw(st.sampled_from(sorted(both[0])))
    whole, lazy = (each[name] for each in both)
    assert lazy.shape == whole.shape
    starts = [data.draw(st.integers(0, size - 1)) for size in whole.shape]
    sizes = [data.draw(st.integers(0, size - start)) for size, start in zip(whole.shape, starts, strict=True)]
    out = torch.full(sizes, torch.nan, dtype=torch.float64)
    lazy.read_into(out, starts)
    box = whole[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]
    assert torch.equal(out, box.double())


def test_large_tensors_are_read_in_pieces(both, monkeypatch):
    monkeypatch.setattr(loading_weights, "PIECE_BYTES", 50)  # two rows of six floats
    for name, whole in both[0].items():
        out = torch.empty_like(whole)
        both[1][name].read_into(out, [0] * whole.ndim)
        assert torch.equal(out, whole)


@pytest.mark.parametrize("function", [lambda t: torch.flip(t, [0]), lambda t: t.reshape(-1), lambda t: t + 1])
def test_what_needs_more_than_slices_is_refused_by_name(both, function):
    with pytest.raises((UnknownConversionError, TypeError), match=r"flip|reshape|\+"):
        function(both[1]["joined"])


def test_shapes_that_do_not_fit_together_are_refused(both):
    lazy = both[1]
    with pytest.raises(ValueError, match="shapes that do not fit together"):
        torch.stack([lazy["plain"], lazy["last"]])
    with pytest.raises(ValueError, match="do not add up"):
        torch.split(lazy["plain"], [1, 2])
