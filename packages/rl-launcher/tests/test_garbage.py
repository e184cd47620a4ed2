"""What lives as long as a run is not searched for garbage while it goes, and is searched again after it."""

import gc
import weakref

import pytest

from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.run.gc_freeze import long_lived
from rl_launcher.schema import Recipe


@pytest.fixture(autouse=True)
def nothing_is_frozen():
    """Else what the session of tests has frozen, which does so too, would be somebody else's."""
    gc.unfreeze()


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self):
        self.itself = self


def knot():
    return weakref.ref(Knot())


def test_the_outermost_block_counts_and_new_garbage_is_found_inside():
    gc.collect()  # what other tests have left is found by the block, and not counted by it
    before = len(gc.get_objects())
    with long_lived():
        assert gc.get_freeze_count() > 0.9 * before
        assert len(gc.get_objects()) < 0.1 * before
        made = knot()
        assert made() is not None
        gc.collect()
        assert made() is None
        with long_lived():
            pass
        assert gc.get_freeze_count() > 0.9 * before
    assert gc.get_freeze_count() < 0.1 * before


def test_what_became_garbage_inside_though_it_was_there_before_is_found_afterwards():
    old = Knot()
    reference = weakref.ref(old)
    with long_lived():
        del old
        gc.collect()
        assert reference() is not None
    gc.collect()
    assert reference() is None


def test_what_others_have_frozen_stays_so():
    gc.freeze()
    try:
        before, made = gc.get_freeze_count(), [Knot() for _ in range(100)]
        with long_lived():
            assert gc.get_freeze_count() >= before + len(made)
        assert gc.get_freeze_count() >= before
    finally:
        gc.unfreeze()


def test_a_run_holds_its_parts_so_while_it_trains_and_not_after(recipe, tmp_path):
    (tmp_path / "counting.py").write_text(
        "import gc\n\n"
        "def score(completions):\n"
        "    with open(__file__ + '.counts', 'a') as file:\n        file.write(f'{gc.get_freeze_count()} ')\n"
        "    return [float(i % 2) for i, _ in enumerate(completions)]\n"
    )
    overrides = ["sft=null", "grpo.max_num_steps=2", f"env.reward={tmp_path}/counting.py:score"]
    run(load_recipe(recipe, schema=Recipe, overrides=overrides))
    counts = [int(word) for word in (tmp_path / "counting.py.counts").read_text().split()]
    assert min(counts) > 100_000
    assert gc.get_freeze_count() == 0
