import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_generation.distribution import exact_dtype, uniforms

SEEDS = st.integers(0, 2**63 - 1)
MASK = 2**64 - 1


def splitmix64(seed: int, step: int) -> int:
    """The same in Python's integers, which know no sign and no width."""

    def mix(bits):
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return bits ^ bits >> 31

    return mix((mix(seed) + (step + 1) * 0x9E3779B97F4A7C15) & MASK)


@settings(deadline=None)
@given(SEEDS, st.integers(0, 2**40))
def test_a_number_is_the_top_53_bits_of_splitmix64(seed, step):
    number = uniforms(torch.tensor([seed]), torch.tensor([step])).item()
    assert number == (splitmix64(seed, step) >> 11) * 2.0**-53
    assert 0.0 <= number < 1.0


@settings(deadline=None)
@given(st.lists(st.tuples(SEEDS, st.integers(0, 999)), min_size=1, max_size=20))
def test_a_number_does_not_depend_on_the_others(pairs):
    seeds, steps = torch.tensor(pairs).T
    together = uniforms(seeds, steps)
    assert together.tolist() == [
        uniforms(seed[None], step[None]).item() for seed, step in zip(seeds, steps, strict=True)
    ]


@pytest.mark.parametrize("by", ["seeds", "steps", "both"])
def test_neighbouring_seeds_and_steps_give_independent_uniform_numbers(by):
    count = torch.arange(100_000)
    numbers = uniforms(count if by != "steps" else count * 0 + 7, count if by != "seeds" else count * 0 + 7)
    cells = torch.bincount((numbers * 100).long(), minlength=100).double()
    # Chi-square with 99 degrees of freedom: one fair sample in 10,000 lies above 161.
    assert ((cells - 1000) ** 2 / 1000).sum() < 161
    # The correlation of neighbours has a standard deviation of 1 / sqrt(100,000).
    assert torch.corrcoef(torch.stack([numbers[1:], numbers[:-1]]))[0, 1].abs() < 4 / 100_000**0.5


def test_a_device_without_float64_gets_float32():
    assert exact_dtype(torch.device("mps")) is torch.float32
    assert exact_dtype(torch.device("cpu")) is torch.float64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares a GPU with the CPU")
def test_a_gpu_draws_the_same_bits():
    seeds, steps = torch.arange(1000) * 2**50, torch.arange(1000)
    assert torch.equal(uniforms(seeds.cuda(), steps.cuda()).cpu(), uniforms(seeds, steps))
