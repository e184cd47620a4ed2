"""What an embedded engine leaves behind, fifty times; in a program of its own, whose threads are nobody else's."""

import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
CYCLES = 50


@pytest.fixture
def programs(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAMS)


@pytest.mark.slow
def test_fifty_engines_and_streamers_leave_nothing_behind(programs, tmp_path):
    import leaks
    import saved_model

    model = saved_model.save(tmp_path / "model", tokenizer=False)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    (tmp_path / "temporary").mkdir()
    found = leaks.run(
        "embedded",
        CYCLES,
        model=str(model),
        temporary=tmp_path / "temporary",
        environment={"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)},
    )
    assert len(found["after"]) == CYCLES
    # If each cycle kept only the weights of one of its two models, it would be more than this.
    assert leaks.leaks(found, growth_bytes=CYCLES // 2 * weights) == []
