"""Episodes that go on by themselves: the same rollouts as in step, without waiting for one another."""

import dataclasses
import hashlib
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms.background_collection import gated
from rl_algorithms.contracts import (
    ConversationEnvironment,
    EnvironmentReturn,
    EpisodeStart,
    RequestEngine,
)
from rl_algorithms.environments import EpisodeEnvironment, RewardFunctionEnvironment, ToolEnvironment
from rl_algorithms.replay import ReplayBuffer
from rl_algorithms.rollouts import collect
from rl_algorithms.stepping import PhaseTimer


def answer(prompt, seed):
    """What a seeded engine samples: a function of the prompt and the request's seed alone."""
    digest = hashlib.sha256(repr((tuple(prompt), seed)).encode()).digest()
    tokens = (*(2 + byte % 10 for byte in digest[: 1 + digest[0] % 3]), 1)
    logp = tuple(-1.0 - byte / 256 for byte in digest[: len(tokens)])
    return SimpleNamespace(
        tokens=tokens, logp=logp, truncated=False, versions=(SimpleNamespace(version=0, start=0, end=len(tokens)),)
    )


class Seeded:
    """Answers on `num_workers` threads, after a random while."""

    def __init__(self, *, num_workers=8, wait_s=0.0):
        self.pool, self.wait_s, self.seeds = ThreadPoolExecutor(num_workers), wait_s, []

    def generate(self, prompts, sampling):
        raise AssertionError("it takes requests")

    def submit(self, prompt, sampling, *, seed):
        self.seeds.append(seed)

        def work():
            time.sleep(random.random() * self.wait_s)
            return answer(prompt, seed)

        return self.pool.submit(work)


class Dice:
    """An episode of several turns whose length, words and rewards depend on what is said."""

    def reset(self, *, seed, row):
        self.turns = 0
        return str(row["prompt"])

    def step(self, answer):
        self.turns += 1
        over = self.turns == 2 + int(answer[0]) % 4
        info = {"metrics": {"turns": float(self.turns)}, "rewards": {"first": 0.1 * int(answer[0]), "last": 0.01}}
        return str(self.turns), 0.1 * int(answer[0]) + 0.01, over, False, info

    def close(self):
        pass


class InStep:
    """The same environment, without a form for one conversation."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def reset(self, rows, *, seeds):
        return self.inner.reset(rows, seeds=seeds)

    def step(self, conversations):
        self.calls.append(len(conversations))
        return self.inner.step(conversations)


def play(chat, rows, engine, environment, **options):
    prompts = [chat.prompt(row) for row in rows]
    return collect(
        prompts, group_size=3, engine=engine, sampling=None, environment=environment, chat=chat, max_turns=8, **options
    )


def same(one, other):
    for field in dataclasses.fields(one):
        left, right = getattr(one, field.name), getattr(other, field.name)
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right, field.name


@pytest.mark.parametrize("num_workers", [1, 8])
def test_rollouts_are_those_of_lock_step_whatever_order_things_happen_in(chat, rows, num_workers):
    """Also with an engine that answers one request at a time."""
    with EpisodeEnvironment(Dice) as environment:
        assert isinstance(environment, ConversationEnvironment)
        in_step = InStep(environment)
        engine = Seeded(num_workers=num_workers, wait_s=0.01)
        assert isinstance(engine, RequestEngine)
        expected = play(chat, rows, engine, in_step, seed=5)
        assert in_step.calls == sorted(in_step.calls, reverse=True)
        assert len(in_step.calls) > 2
        same(play(chat, rows, engine, environment, seed=5), expected)
        assert not torch.equal(play(chat, rows, engine, environment, seed=6).tokens, expected.tokens)


def test_every_request_has_a_seed_of_its_own_and_a_repeated_run_the_same(chat, rows):
    with EpisodeEnvironment(Dice) as environment:
        engines = [Seeded(), Seeded()]
        for engine in engines:
            play(chat, rows, engine, environment, seed=5)
    first, second = (sorted(engine.seeds) for engine in engines)
    assert first == second
    assert len({*first}) == len(first) > 24


class InBatches(Seeded):
    """The same engine, which also takes batches whose requests have seeds of their own."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def generate_seeded(self, prompts, sampling, *, seeds):
        self.batches.append(len(prompts))
        return [answer(prompt, seed) for prompt, seed in zip(prompts, seeds, strict=True)]


def test_answers_that_are_judged_as_a_batch_are_asked_for_as_a_batch_with_the_seeds_of_requests(chat, rows):
    with EpisodeEnvironment(Dice) as environment:
        engine = InBatches()
        expected = play(chat, rows, Seeded(), environment, seed=5)
        same(play(chat, rows, engine, InStep(environment), seed=5), expected)
        assert engine.batches[0] == 3 * len(rows)
        assert not engine.seeds, "no single request"
        same(play(chat, rows, engine, environment, seed=5), expected)
        assert len(engine.seeds) == sum(engine.batches), "each episode by itself where it can"


class Slow:
    """A tool that hangs until the episodes that never call it have ended."""

    def __init__(self, others_ended):
        self.others_ended = others_ended

    def reset(self, *, seed, row):
        self.slow = row["prompt"] == "0"
        self.turns = 0
        return "1"

    def step(self, answer):
        self.turns += 1
        if self.slow:
            return "1", float(self.others_ended.wait(60)), True, False, {}
        if self.turns < 5:
            return "1", 0.0, False, False, {}
        return "1", 0.0, True, False, {}

    def close(self):
        if not self.slow:
            self.others_ended.set()


def test_a_slow_tool_delays_its_own_rollout_only(chat, rows):
    ended = threading.Event()
    with EpisodeEnvironment(lambda: Slow(ended), timeout_s=120.0) as environment:
        rollouts = play(chat, rows, Seeded(), environment)
    slow = rollouts.groups == 0
    assert rollouts.rewards[slow].tolist() == [1.0] * 3
    assert (rollouts.turns.amax(dim=1)[~slow] == 4).all()


def test_tools_overlap_generation_and_final_answers_are_judged_together(chat, rows):
    """The tool of the first answers returns only once the engine was asked for a second one: of another episode."""
    batches, asked_again = [], threading.Event()

    class Calls(Seeded):
        def submit(self, prompt, sampling, *, seed):
            if len(prompt) > 1:
                asked_again.set()
            return super().submit(prompt, sampling, seed=seed)

    def reward(completions):
        batches.append(len(completions))
        return [1.0] * len(completions)

    def first() -> str:
        """Return at once."""
        return "7"

    chosen = {"0": "first"}

    class Parsing(ToolEnvironment):
        def _turn(self, conversation):
            turn = super()._turn(conversation)
            if conversation.turn == 0:
                name = chosen.get(conversation.row["prompt"], "second")
                turn.calls = (SimpleCall(name),)
            return turn

    def second() -> str:
        """Return once an answer with results was asked for."""
        assert asked_again.wait(60)
        return "8"

    from rl_algorithms.environments.tool_calls import ToolCall

    def SimpleCall(name):  # noqa: N802 - stands for a class
        return ToolCall(name=name, arguments={})

    environment = Parsing([first, second], reward=RewardFunctionEnvironment(reward=reward), timeout_s=120.0)
    environment.reset = lambda rows, *, seeds: [
        EpisodeStart(messages=({"role": "user", "content": row["prompt"]},), state=0) for row in rows
    ]
    rollouts = play(chat, rows, Calls(), environment)
    environment.close()
    assert batches == [12]
    assert rollouts.rewards.tolist() == [1.0] * 12
    assert rollouts.metrics["tools/errors"] == 0.0


@pytest.mark.parametrize("broken", ["engine", "environment"])
def test_an_error_ends_the_call_and_cancels_what_is_under_way(chat, rows, broken):
    waiting = []

    class Engine(Seeded):
        def submit(self, prompt, sampling, *, seed):
            future = Future()
            if len(waiting) == 5:
                if broken == "engine":
                    future.set_exception(OSError("the engine died"))
                else:
                    future.set_result(answer(prompt, seed))
            waiting.append(future)
            return future

    class Judge:
        def step(self, conversations):
            raise AssertionError

        def submit(self, conversation):
            raise OSError("the judge died")

    with pytest.raises(OSError, match=f"the {'engine' if broken == 'engine' else 'judge'} died"):
        play(chat, rows, Engine(), Judge())
    assert all(future.cancelled() for index, future in enumerate(waiting) if index != 5)


def test_an_environment_may_leave_a_conversation_to_the_batch(chat, rows):
    class Judge:
        batches = ()

        def submit(self, conversation):
            if conversation.row["prompt"] == "0":
                done = Future()
                done.set_result(EnvironmentReturn(reward=1.0, terminated=True))
                return done
            return None

        def step(self, conversations):
            self.batches = (*self.batches, len(conversations))
            return [EnvironmentReturn(reward=2.0, terminated=True) for _ in conversations]

    judge = Judge()
    rollouts = play(chat, rows, Seeded(wait_s=0.01), judge)
    assert judge.batches == (9,)
    assert rollouts.rewards.tolist() == [1.0] * 3 + [2.0] * 9


def test_new_weights_wait_for_the_requests_under_way_and_none_begins_meanwhile():
    """A gated engine counts every request as inside from `submit` to its end."""
    begun = []

    class Held:
        def generate(self, prompts, sampling):
            raise AssertionError

        def submit(self, prompt, sampling, *, seed):
            begun.append(Future())
            return begun[-1]

    buffer = ReplayBuffer(capacity=1, max_staleness=0, ask_again=True, num_groups=1, first_ticket=0)
    engine = gated(Held(), buffer=buffer, environment=None)
    assert isinstance(engine, RequestEngine)
    first = engine.submit((2,), None, seed=0)
    with pytest.raises(TimeoutError, match="1 calls"), engine.alone(PhaseTimer(), timeout_s=0.05):
        raise AssertionError("it is inside")
    begun[0].set_result(answer((2,), 0))
    assert first.done()
    later = threading.Thread(target=lambda: engine.submit((2,), None, seed=1))
    with engine.alone(PhaseTimer(), timeout_s=60.0):
        later.start()
        time.sleep(0.05)
        assert len(begun) == 1
    later.join(timeout=60)
    assert len(begun) == 2
