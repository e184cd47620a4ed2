"""Claims about running Megatron without CUDA: what is pretended, to whom, and that nothing of it stays."""

import contextlib
import pkgutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from rl_backends.megatron.cpu_compat import ABSENT_ATTRIBUTES, ATTRIBUTES, cpu_compat, user_code

pytestmark = [
    pytest.mark.usefixtures("imported"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA, and nothing to work around"),
]

ABSENT = object()


def standing():
    """What stands at this moment under every name that is replaced, and how many modes torch has."""
    names = [*ATTRIBUTES, *ABSENT_ATTRIBUTES]
    split = [name.rpartition(".") for name in names]
    values = [getattr(pkgutil.resolve_name(module), attribute, ABSENT) for module, _, attribute in split]
    return [*zip(names, values, strict=True), torch._C._len_torch_function_stack()]


def pretends():
    """Whether this thread is lied to, in each of the two ways."""
    try:
        device = torch.cuda.current_device() == torch.device("cpu")
    except (AssertionError, RuntimeError):
        device = False
    kind = torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert device == kind
    return kind


def test_inside_everything_is_replaced_and_outside_nothing():
    before = standing()
    with cpu_compat():
        inside = standing()
        assert all(now != was for now, was in zip(inside, before, strict=True))
    assert standing() == before


def test_an_error_inside_restores_everything():
    before = standing()
    with pytest.raises(ZeroDivisionError), cpu_compat(), user_code(), cpu_compat():
        raise ZeroDivisionError
    assert standing() == before
    assert not pretends()


def test_it_nests_in_itself_and_in_user_code():
    before = standing()
    with cpu_compat():
        with cpu_compat():
            assert pretends()
        assert pretends()
        with user_code():
            assert not pretends()
            with cpu_compat():
                assert pretends()
                with user_code():
                    assert not pretends()
                assert pretends()
            assert not pretends()
        assert pretends()
    assert standing() == before


def test_user_code_outside_is_nothing():
    before = standing()
    with user_code():
        assert standing() == before
        assert not pretends()


def test_nothing_is_replaced_where_cuda_is_available(monkeypatch):
    before = standing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with cpu_compat(), user_code(), cpu_compat():
        assert standing() == before
        assert torch.zeros(1).type() == "torch.FloatTensor"


def test_an_entry_for_a_name_that_is_gone_is_an_error_and_leaves_nothing_behind(monkeypatch):
    before = standing()
    monkeypatch.setattr("rl_backends.megatron.cpu_compat.ATTRIBUTES", {**ATTRIBUTES, "torch.cuda.no_such_name": None})
    with pytest.raises(AttributeError, match=r"torch\.cuda\.no_such_name is to be replaced"), cpu_compat():
        pass
    assert standing() == before


def test_other_threads_see_an_honest_torch_and_the_last_one_to_leave_restores_it():
    before = standing()
    with ThreadPoolExecutor(1) as other:
        theirs = contextlib.ExitStack()
        with cpu_compat():
            assert other.submit(pretends).result() is False
            other.submit(theirs.enter_context, cpu_compat()).result()
            assert other.submit(pretends).result() is True
        assert other.submit(pretends).result() is True
        assert not pretends()
        assert standing() != before
        other.submit(theirs.close).result()
        assert other.submit(pretends).result() is False
    assert standing() == before


def test_threads_that_come_and_go_leave_nothing():
    before = standing()
    start = threading.Barrier(4)

    def come_and_go(_):
        start.wait()
        for _ in range(50):
            with cpu_compat():
                assert pretends()
            assert not pretends()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert standing() == before


LIKE = torch.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros([], dtype=torch.int, device="cuda"),
        lambda: torch.ones(2, device="cuda:0"),
        lambda: torch.empty(2, device=torch.device("cuda")),
        lambda: torch.full((2,), 1.0, device=torch.device("cuda", 1)),
        lambda: torch.tensor([1.0], device="cuda", pin_memory=True),
        lambda: torch.arange(3, device=torch.cuda.current_device()),
        lambda: torch.empty_like(LIKE, device="cuda"),
        lambda: LIKE.new_empty(3, device="cuda"),
        lambda: LIKE.to("cuda"),
        lambda: LIKE.to("cuda", torch.float64),
        lambda: LIKE.to(device="cuda", non_blocking=True),
        lambda: torch.nn.Linear(3, 2).cuda().weight,
        lambda: torch.nn.Linear(3, 2, device="cuda").weight,
        lambda: LIKE.cuda(torch.cuda.current_device()),
        LIKE.pin_memory,
        lambda: torch.tensor([0, 3], device="cpu", pin_memory=True).cuda(non_blocking=True),
    ],
)
def test_what_is_made_for_cuda_is_made_on_the_cpu(make):
    with cpu_compat():
        assert make().device == torch.device("cpu")


def test_a_move_keeps_values_and_dtype_and_an_honest_request_is_honoured():
    with cpu_compat():
        assert LIKE.cuda() is LIKE
        torch.testing.assert_close(LIKE.to("cuda", torch.float64), LIKE.double())
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert LIKE.to(torch.float64).dtype == torch.float64
        assert LIKE.to("meta").device.type == "meta"


def test_types_are_spelled_as_optimizers_compare_them_and_conversions_still_convert():
    with cpu_compat():
        assert LIKE.type() == "torch.cuda.FloatTensor"
        assert LIKE.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert LIKE.type(torch.float64).dtype == torch.float64
        assert LIKE.type(dtype="torch.LongTensor").dtype == torch.int64


def test_a_backward_pass_is_inside_too_as_far_as_attributes_go():
    seen = []
    x = LIKE.clone().requires_grad_()
    x.register_hook(lambda _: seen.append(torch.zeros(1, device=torch.cuda.current_device()).device))
    with cpu_compat():
        (x * 3).sum().backward()
    assert seen == [torch.device("cpu")]


def test_recomputation_repeats_the_same_dropout_and_queues_nothing_for_cuda():
    from megatron.core.tensor_parallel import random

    x = torch.ones(64, requires_grad=True)
    with cpu_compat():
        random.initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
        queued = len(torch.cuda._queued_calls)
        for _ in range(3):
            x.grad = None
            y = random.checkpoint(torch.nn.functional.dropout, False, x)
            y.sum().backward()
            torch.testing.assert_close(x.grad, y.detach())  # 2 where it was kept, 0 where it was dropped
    assert len(torch.cuda._queued_calls) == queued
    assert 0 < (y == 0).sum() < 64


def test_streams_and_events_have_nothing_to_wait_for():
    with cpu_compat():
        side = torch.cuda.Stream(device=torch.cuda.current_device())
        assert isinstance(side, torch.cuda.Stream)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            event = side.record_event()
        torch.cuda.default_stream().wait_event(event)
        event.synchronize()
        torch.cuda.synchronize()
        with user_code(), pytest.raises((RuntimeError, AssertionError)):
            torch.cuda.Stream()


def test_the_router_needs_no_kernel_of_transformer_engine():
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    hidden = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(3, 4, requires_grad=True)
    with cpu_compat():
        logits = router_gating_linear(hidden, weight, None, torch.float32)
        logits.sum().backward()
    torch.testing.assert_close(logits, hidden.float() @ weight.T)
    torch.testing.assert_close(weight.grad, hidden.detach().float().sum(0).expand(3, 4))


def test_uneven_shares_of_tokens_reach_their_experts_on_two_ranks(on_ranks):
    def exchange(rank):
        from megatron.core.tensor_parallel import all_to_all
        from megatron.core.transformer.moe import token_dispatcher

        mine = torch.full((3, 2), float(rank + 1), requires_grad=True)
        sent, received = (torch.tensor(sizes) for sizes in [([1, 2], [1, 2]), ([2, 1], [2, 1])][rank])
        with cpu_compat():
            sent, received = (token_dispatcher.maybe_move_tensor_to_cpu(s, as_numpy=True) for s in (sent, received))
            out = all_to_all(dist.group.WORLD, mine, received, sent)
            (out * (rank + 1)).sum().backward()
        return out.detach(), mine.grad

    (first, first_grad), (second, second_grad) = on_ranks(exchange, ranks=2)
    assert first[:, 0].tolist() == [1, 2, 2]
    assert second[:, 0].tolist() == [1, 1, 2]
    assert first_grad[:, 0].tolist() == [1, 2, 2]
    assert second_grad[:, 0].tolist() == [1, 1, 2]


def test_columns_are_scattered_whole_on_two_ranks(on_ranks):
    def scatter(rank):
        columns = list(LIKE.T.reshape(3, 2).T.chunk(3, dim=1))[:2] if rank == 0 else None
        mine = torch.empty(2, 1)
        with cpu_compat():
            dist.scatter(mine, columns, src=0)
        return mine

    whole = LIKE.T.reshape(3, 2).T
    first, second = on_ranks(scatter, ranks=2)
    torch.testing.assert_close(first, whole[:, :1])
    torch.testing.assert_close(second, whole[:, 1:2])
