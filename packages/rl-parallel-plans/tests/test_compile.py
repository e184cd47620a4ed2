"""Layers under torch.compile on two ranks: exact, as many collectives as without, beside models of other layouts."""

import pytest


@pytest.mark.slow
def test_compiled_model_beside_models_of_other_layouts_has_the_gradients_of_one_rank(ranks):
    for errors in ranks("compiled:beside_others", 2):
        assert max(errors) < 1e-5, errors


@pytest.mark.parametrize(("sequence_parallel", "number"), [(False, 4), pytest.param(True, 8, marks=pytest.mark.slow)])
def test_compiled_layer_costs_as_many_collectives_as_without_the_compiler(ranks, sequence_parallel, number):
    assert ranks("compiled:collectives", 2, sequence_parallel=sequence_parallel) == [number] * 2
