"""Ranks for tests of the Megatron backend, one process that has imported it, and a look at what they leave behind.

megatron-core is in one cell of the matrix, the newest: what needs it is skipped in the others, which so prove that
nothing else of the package does.
"""

import functools
import gc
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # forked and megatron_parity, and parity: here and on the ranks

import forked

WITHOUT_MEGATRON = {"test_architecture.py", "test_config.py", "test_installed.py"}
"""Modules that run everywhere."""
CELL = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["matrix"]["cells"][-1]


def has_megatron():
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None


ITS_OWN = (
    "ignore:Warning. tp_group is None, using default tp group:DeprecationWarning",
    "ignore:When using (async grad allreduce|sequence parallelism) it is recommended to set the env:UserWarning",
    "ignore:.torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor). is deprecated:FutureWarning",
)
"""What megatron-core 0.16 says of how its layers call one another and torch 2.13."""


def pytest_collection_modifyitems(items):
    """Skip what needs Megatron where there is none."""
    reason = f"needs megatron-core {CELL['megatron-core']}, which the cell of transformers {CELL['transformers']} has"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*ITS_OWN))
            if not has_megatron() and item.path.name not in WITHOUT_MEGATRON:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def nothing_outlives_its_module(request):
    """After each module no process is left that was not there before."""
    if not has_megatron():
        yield
        return
    with forked.adopted_orphans() as before:
        yield
        left = forked.end_all(forked.started_since(before))
    assert not left, f"{request.path.name} left {', '.join(left)} behind"


@pytest.fixture(scope="session")
def imported():
    """Everything that a rank needs is imported here once, and not on each."""
    from megatron_parity.program import import_all

    import_all()
    gc.freeze()  # each run of ranks begins with a look for garbage


@pytest.fixture
def on_ranks(imported, tmp_path):
    """`on_ranks(function, ranks=2)`: what `function(rank)` returns on each of as many forked ranks."""
    calls = iter(range(1000))

    def run(function, *, ranks, **options):
        return forked.run(function, ranks=ranks, folder=tmp_path / f"ranks{next(calls)}", **options)

    return run


@pytest.fixture(scope="module")
def on_ranks_once(imported, tmp_path_factory):
    """The same, for a module's fixtures."""

    @functools.wraps(forked.run)
    def run(function, *, ranks, **options):
        return forked.run(function, ranks=ranks, folder=tmp_path_factory.mktemp("ranks"), **options)

    return run
