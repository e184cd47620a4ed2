"""Claims about the replay buffer: nothing stale, nothing lost or twice, never too much, no wait in vain."""

import json
import threading
import traceback

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_algorithms.replay import Group, ReplayBuffer
from rl_algorithms.rollouts import Rollouts

SOON = 120.0  # seconds: never waited for, unless the test is about to fail


def make_group(ticket, version=0):
    shape = (2, 3)
    response = torch.tensor([[False, True, True], [False, True, False]])
    return Group(
        ticket=ticket,
        version=version,
        rollouts=Rollouts(
            tokens=torch.full(shape, ticket),
            lengths=torch.tensor([3, 2]),
            response=response,
            logp_old=torch.zeros(shape),
            versions=torch.where(response, version, -1),
            turns=torch.where(response, 0, -1),
            token_rewards=torch.zeros(shape, dtype=torch.float64),
            rewards=torch.tensor([1.0, 0.1], dtype=torch.float64),
            components=torch.tensor([[1.0], [0.1]], dtype=torch.float64),
            component_names=("right",),
            groups=torch.zeros(2, dtype=torch.int64),
            truncated=torch.zeros(2, dtype=torch.bool),
            failed=torch.tensor([False, True]),
            answers=("3", ""),
            failures=(None, "sandbox died"),
            metrics={"tools": 0.5},
        ),
    )


def filled(*groups, **choices):
    buffer = ReplayBuffer(**{"capacity": 8, "max_staleness": 100, **choices})
    buffer.reserve(8)
    for group in groups:
        buffer.put(group)
    return buffer


class Model(RuleBasedStateMachine):
    """Every ticket is in one place: to be given, sampled, held, taken, finished, or given up."""

    @initialize(
        capacity=st.integers(1, 6),
        max_staleness=st.integers(0, 3),
        num_groups=st.none() | st.integers(1, 12),
        ask_again=st.booleans(),
    )
    def begin(self, capacity, max_staleness, num_groups, ask_again):
        self.how = {
            "capacity": capacity,
            "max_staleness": max_staleness,
            "num_groups": num_groups,
            "ask_again": ask_again,
        }
        self.buffer, self.version, self.next = ReplayBuffer(**self.how), 0, 0
        self.again, self.sampled, self.held, self.taken = set(), {}, {}, {}
        self.finished, self.given_up = [], set()

    @precondition(lambda self: self.buffer.places > 0)
    @rule(most=st.integers(1, 4))
    def reserve(self, most):
        tickets = self.buffer.reserve(most)
        assert 1 <= len(tickets) <= most
        for ticket in tickets:
            if ticket in self.again:
                self.again.remove(ticket)
            else:
                assert ticket == self.next
                self.next += 1
            self.sampled[ticket] = self.version

    @precondition(lambda self: self.sampled)
    @rule(data=st.data())
    def put(self, data):
        ticket = data.draw(st.sampled_from(sorted(self.sampled)))
        self.held[ticket] = data.draw(st.integers(self.sampled.pop(ticket), self.version))
        self.buffer.put(make_group(ticket, self.held[ticket]))
        with pytest.raises(ValueError, match=f"ticket {ticket} is not being sampled"):
            self.buffer.put(make_group(ticket))

    @rule(num_groups=st.integers(1, 5))
    def take(self, num_groups):
        left = self.how["capacity"]
        if self.how["num_groups"] is not None:
            left = min(left, self.how["num_groups"] - len(self.finished))
        if self.taken or num_groups > left:
            with pytest.raises(RuntimeError if self.taken else ValueError):
                self.buffer.take(num_groups, version=self.version, timeout_s=0.0)
            return
        oldest = self.version - self.how["max_staleness"]
        stale = {ticket for ticket, version in self.held.items() if version < oldest}
        (self.again if self.how["ask_again"] else self.given_up).update(stale)
        self.held = {ticket: version for ticket, version in self.held.items() if ticket not in stale}
        if len(self.held) < num_groups:
            with pytest.raises(TimeoutError, match=f"{num_groups} groups were wanted"):
                self.buffer.take(num_groups, version=self.version, timeout_s=0.0)
            return
        found = self.buffer.take(num_groups, version=self.version, timeout_s=0.0)
        assert set(found.dropped) == stale
        expected = sorted((version, ticket) for ticket, version in self.held.items())[:num_groups]
        assert [(group.version, group.ticket) for group in found.groups] == expected
        assert all(self.version - group.version <= self.how["max_staleness"] for group in found.groups)
        assert all((group.rollouts.tokens == group.ticket).all() for group in found.groups)
        self.taken = {group.ticket: self.held.pop(group.ticket) for group in found.groups}

    @rule(steps=st.integers(0, 2))
    def finish(self, steps):
        self.buffer.finish()
        self.finished += self.taken
        self.taken = {}
        self.version += steps

    @rule()
    def go_on_in_another_process(self):
        state = self.buffer.state_dict()
        self.buffer = ReplayBuffer(**self.how)
        self.buffer.load_state_dict(state)
        self.again |= set(self.sampled)
        self.held |= self.taken
        self.sampled, self.taken = {}, {}

    @invariant()
    def nothing_is_lost_and_nothing_twice(self):
        places = [*self.again, *self.sampled, *self.held, *self.taken, *self.finished, *self.given_up]
        assert sorted(places) == list(range(self.next))
        assert len(self.buffer) == len(self.held)

    @invariant()
    def never_more_under_way_than_there_are_places(self):
        under_way = len(self.sampled) + len(self.held) + len(self.taken)
        assert under_way + self.buffer.places <= self.how["capacity"]
        assert under_way <= self.how["capacity"]
        if self.how["num_groups"] is not None:
            assert len(self.finished) + under_way <= self.how["num_groups"]

    @invariant()
    def prompts_before_the_oldest_ticket_are_done_with(self):
        wanted = [self.next, *self.again, *self.sampled, *self.held, *self.taken]
        assert self.buffer.oldest_ticket == min(wanted)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_threads_that_sample_and_one_that_trains_see_every_ticket_once():
    buffer = ReplayBuffer(capacity=7, max_staleness=1, num_groups=120)
    version, most_at_once = [0], [0]

    def sample():
        while tickets := buffer.reserve(3):
            for ticket in tickets:
                buffer.put(make_group(ticket, version[0]))

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    trained, dropped = [], 0
    for _ in range(40):
        taken = buffer.take(3, version=version[0], timeout_s=SOON)
        assert all(0 <= version[0] - group.version <= 1 for group in taken.groups)
        most_at_once[0] = max(most_at_once[0], len(buffer) + len(taken.groups))
        trained += [group.ticket for group in taken.groups]
        dropped += len(taken.dropped)
        version[0] += 1
        buffer.finish()
    buffer.close()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
    assert sorted(trained) == list(range(120))
    assert most_at_once[0] <= 7


def test_take_waits_for_what_is_being_sampled():
    buffer = filled(make_group(0))
    thread = threading.Thread(target=lambda: buffer.put(make_group(1)))
    threading.Timer(0.01, thread.start).start()
    assert [group.ticket for group in buffer.take(2, version=0, timeout_s=SOON).groups] == [0, 1]


def test_reserve_waits_until_groups_are_trained_on_and_not_only_taken():
    buffer = filled(*map(make_group, range(8)))
    given = []
    thread = threading.Thread(target=lambda: given.extend(buffer.reserve(8)))
    thread.start()
    buffer.take(3, version=0, timeout_s=SOON)
    assert buffer.places == 0
    buffer.finish()
    thread.join(SOON)
    assert given == [8, 9, 10]


def test_the_first_error_of_a_collector_is_raised_with_the_place_where_it_happened():
    buffer = filled()

    def an_engine_that_dies():
        raise OSError("the engine is gone")

    def sample():
        try:
            an_engine_that_dies()
        except OSError as error:
            buffer.fail(error)
            buffer.fail(ValueError("a later one"))

    thread = threading.Thread(target=sample)
    threading.Timer(0.01, thread.start).start()
    with pytest.raises(OSError, match="the engine is gone") as caught:
        buffer.take(1, version=0, timeout_s=SOON)
    assert "an_engine_that_dies" in "".join(traceback.format_exception(caught.value))
    assert buffer.reserve() == ()


def test_closing_lets_everybody_go():
    buffer = filled()
    given = [None]
    thread = threading.Thread(target=lambda: given.append(buffer.reserve()))
    thread.start()
    threading.Timer(0.01, buffer.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        buffer.take(1, version=0, timeout_s=SOON)
    thread.join(SOON)
    assert given[-1] == ()
    buffer.put(make_group(0))  # sampled for nobody
    assert len(buffer) == 0


def test_a_wait_in_vain_says_what_is_missing():
    buffer = filled(make_group(0), make_group(1, version=5), max_staleness=1)
    expected = "2 groups were wanted, and after timeout_s=0.0 there are 1; 6 are being sampled and 1 were too old"
    with pytest.raises(TimeoutError, match=expected):
        buffer.take(2, version=5, timeout_s=0.0)


def test_the_state_is_tensors_and_json_and_survives_a_file(tmp_path):
    buffer = filled(*(make_group(ticket, version=ticket) for ticket in range(3)))
    buffer.take(1, version=2, timeout_s=0.0)
    torch.save(buffer.state_dict(), tmp_path / "replay.pt")
    state = torch.load(tmp_path / "replay.pt", weights_only=True)
    json.dumps(state, default=torch.Tensor.tolist)
    loaded = ReplayBuffer(capacity=8, max_staleness=100)
    loaded.load_state_dict(state)
    assert loaded.reserve(9) == (3, 4, 5, 6, 7)
    for ticket, group in enumerate(loaded.take(3, version=2, timeout_s=0.0).groups):
        expected = make_group(ticket, version=ticket).rollouts
        assert (group.ticket, group.version) == (ticket, ticket)
        for name in expected.__dataclass_fields__:
            value, wanted = getattr(group.rollouts, name), getattr(expected, name)
            assert torch.equal(value, wanted) if torch.is_tensor(wanted) else value == wanted


def test_a_state_that_does_not_fit_is_refused():
    state = filled(*map(make_group, range(3))).state_dict()
    with pytest.raises(ValueError, match="holds 3 groups, and this buffer has capacity=2"):
        ReplayBuffer(capacity=2, max_staleness=0).load_state_dict(state)
    with pytest.raises(ValueError, match="in use"):
        filled().load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"capacity": 0, "max_staleness": 0}, {"capacity": 1, "max_staleness": -1}])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match="must be"):
        ReplayBuffer(**wrong)
