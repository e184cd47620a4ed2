"""What vLLM leaves behind when it is stopped, in programs of their own; `benchmarks/start_stop.py` does it oftener."""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("needs vLLM", allow_module_level=True)

PROGRAMS = Path(__file__).parents[1] / "programs"
CACHE_BYTES = 64 << 20
"""Of each engine: less than one of them may stay."""


@pytest.mark.parametrize(
    ("kind", "cycles"),
    [
        ("in-process", 5),
        pytest.param("own-process", 2, marks=pytest.mark.slow),
    ],
)
def test_a_stopped_engine_leaves_nothing_behind(kind, cycles, checkpoints, monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)
    import leaks

    # Of a short name: a socket's path, which has room for 107 characters, is longer below that of tmp_path.
    with tempfile.TemporaryDirectory() as folder:
        found = leaks.run(
            kind,
            cycles,
            model=checkpoints("llama", tokenizer=False),
            temporary=Path(folder),
            environment={"PYTHONPATH": ":".join(sys.path)},
        )
    assert len(found["after"]) == cycles
    assert leaks.leaks(found, growth_bytes=CACHE_BYTES) == []
