"""Failures of other processes as the driver tells them: of which class, of whom, and which of several came first."""

import pickle

import pytest

from rl_backends import NonFiniteGradientError
from rl_launcher.errors import RestartableError
from rl_launcher.ray.remote_calls import last_lines
from rl_launcher.ray.worker_failures import (
    Failure,
    ProcessInfo,
    RemoteDiedError,
    RemoteFailedError,
    RemoteTimeoutError,
    TrainerDiedError,
    died,
    first_cause,
)


class OddError(Exception):
    """One that cannot be made again from its arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def who(index, role="trainer"):
    return ProcessInfo(role=role, index=index, node="node-a", pid=4711, log="logs/trainer-0.log")


def failure(error):
    try:
        raise error
    except type(error) as caught:
        return Failure.of(caught)


def test_what_a_rank_raised_is_caught_as_what_it_was():
    told = failure(NonFiniteGradientError("the gradient norm of step 1 is nan"))
    with pytest.raises(NonFiniteGradientError, match=r"trainer rank 3 \(node-a, pid 4711\)") as caught:
        raise RemoteFailedError.of(told, who=who(3), call="optim_step")
    error = caught.value
    assert isinstance(error, RemoteFailedError)
    assert (error.type_name, error.who.index, error.who.node, error.who.pid) == (
        "NonFiniteGradientError",
        3,
        "node-a",
        4711,
    )
    assert "in failure" in error.remote_traceback
    assert isinstance(error.__cause__, NonFiniteGradientError)


@pytest.mark.parametrize("kind", [KeyError, OSError, ValueError, FileExistsError, StopIteration])
def test_any_class_can_be_told(kind):
    error = RemoteFailedError.of(failure(kind("missing")), who=who(0), call="load")
    assert isinstance(error, kind)
    assert str(error).startswith("trainer rank 0 (node-a, pid 4711) failed in load")


def test_one_that_cannot_travel_is_told_in_words():
    error = RemoteFailedError.of(failure(OddError("salt", "pepper")), who=who(0), call="load")
    assert not isinstance(error, OddError)
    assert "OddError: salt and pepper" in str(error)


def test_errors_keep_their_attributes_on_the_way_to_another_process():
    failed = RemoteFailedError.of(failure(KeyError("missing")), who=who(1), call="load")
    ended = died("killed", who=who(2), call="optim_step", log_tail="the last words")
    for error in (failed, ended, RemoteTimeoutError(who=who(0), call="x", timeout_s=3.0, key="cluster.call_timeout_s")):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error)
        assert (again.who, again.log_tail) == (error.who, error.log_tail)
    assert isinstance(pickle.loads(pickle.dumps(ended)), TrainerDiedError)


def test_a_dead_rank_may_be_restarted_and_a_dead_engine_is_not_a_rank():
    rank = died("killed", who=who(2), call="optim_step")
    assert isinstance(rank, TrainerDiedError)
    assert isinstance(rank, RestartableError)
    assert (rank.who.index, rank.how) == (2, "killed")
    engine = died("killed", who=who(0, role="engine"), call="generate")
    assert type(engine) is RemoteDiedError
    assert "engine 0 (node-a, pid 4711) died during generate" in str(engine)


def test_who_began_is_told_and_not_who_noticed():
    noticed = RemoteFailedError.of(
        failure(RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:3")), who=who(0), call="x"
    )
    late = RemoteFailedError.of(failure(ValueError("a second error")), who=who(1), call="x")
    early = RemoteFailedError.of(failure(ValueError("the first error")), who=who(2), call="x")
    early.at = late.at - 1
    noticed.at = early.at - 1
    assert first_cause([noticed, late, early]) is early
    assert first_cause([noticed]) is noticed
    dead = died("killed", who=who(3), call="x")
    assert first_cause([noticed, early, dead]) is dead


def test_the_last_lines_of_the_log_are_shown():
    error = died("killed", who=who(0), call="x", log_tail="one\ntwo")
    assert str(error).endswith("The last lines of logs/trainer-0.log:\n  one\n  two")


def test_the_last_lines_of_a_log_leave_out_cpp_frames():
    log = [
        "step 3",
        *(f"frame #{n}: <unknown function> + 0x6747a52 (0x7f in libtorch.so)" for n in range(40)),
        "killed",
    ]
    assert last_lines("\n".join(log)) == "step 3\nkilled"
    assert last_lines("\n".join(map(str, range(50)))).splitlines() == [str(n) for n in range(30, 50)]


def test_a_message_has_no_cpp_frames_and_each_reason_once():
    text = (
        "Connection closed by peer\nException raised from recv at Socket.cpp:9 (most recent call first):\n"
        "frame #0: c10::Error::Error() + 0xac (0x7f in libc10.so)\nframe #1: <unknown> + 0x1 (0x7f in libtorch.so)"
    )
    error = RemoteFailedError.of(failure(RuntimeError(text)), who=who(1), call="forward_backward")
    assert "frame #" not in str(error)
    assert str(error).count("Connection closed by peer") == 1
    assert "in failure" in str(error), "the place where it was raised"
