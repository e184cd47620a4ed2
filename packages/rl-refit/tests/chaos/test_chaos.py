"""Faults in real processes: some cases of every kind. All of them: `benchmarks/chaos.py`."""

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from cases import everything, quick

CASES = {case["name"]: case for case in quick()}


@pytest.fixture(scope="module")
def benchmark():
    path = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
    spec = importlib.util.spec_from_file_location("chaos_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results(benchmark):
    """Of all cases, which run several at a time: most of them sleep."""
    found = list(benchmark.run(list(CASES.values())))
    print("\n".join(benchmark.table(found)[0]))
    return {case["name"]: wrong for case, _, wrong in found}


def test_every_kind_of_fault_is_among_the_cases():
    assert {case["kind"] for case in CASES.values()} == {case["kind"] for case in everything()}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_ends_everywhere_with_its_cause_and_nothing_torn(results, name):
    assert results[name] == []
