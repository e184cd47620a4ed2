"""Claims about what a backend of Megatron says of its ranks."""

import pytest

ONE = {"tp": 1, "cp": 1, "ep": 1, "dp": 1, "pp": 1}


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({}, "one rank"),
        ({"tp": 4, "ep": 2}, "4 tp ranks, experts shared out over 2"),
        ({"tp": 2, "dp": 3, "pp": 2}, "2 tp x 3 dp x 2 pp ranks"),
        ({"pp": 4, "vp": 2}, "4 pp ranks, 2 chunks a pipeline stage"),
    ],
)
def test_axes_of_one_rank_are_left_out_and_experts_cut_no_further(imported, sizes, text):
    from rl_backends.megatron.backend import _ranks

    assert _ranks(ONE | sizes) == text
