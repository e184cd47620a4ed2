"""Async environments as a batch: concurrent, bounded, each conversation with a deadline of its own."""

import asyncio

import pytest

from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn, EpisodeStart, ResettingEnvironment
from rl_algorithms.environments.asynchronous import (
    AsyncEnvironmentError,
    ConcurrentEnvironment,
    ConcurrentResettingEnvironment,
)


class Judge:
    def __init__(self):
        self.now = self.most = 0

    async def step(self, conversation):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if conversation.answer == "hang":
                await asyncio.sleep(3600)
            if conversation.answer == "raise":
                raise OSError("no answer from the judge")
            if conversation.answer == "nan":
                return EnvironmentReturn(reward=float("nan"), terminated=True)
            await asyncio.sleep(0.05)  # long enough that three are under way at once on a slow machine too
            return EnvironmentReturn(reward=float(conversation.answer), terminated=True)
        finally:
            self.now -= 1


class Beginning(Judge):
    async def reset(self, row, *, seed):
        if "broken" in row:
            raise OSError("no server")
        return EpisodeStart(messages=({"role": "user", "content": f"{row['prompt']} {seed}"},), state=seed)


def conversations(*answers):
    return [Conversation(messages=(), answer=answer, row={"number": i}) for i, answer in enumerate(answers)]


def test_returns_come_in_order_and_no_more_than_the_bound_run_at_once():
    judge = Judge()
    environment = ConcurrentEnvironment(judge, max_concurrency=3)
    assert isinstance(environment, Environment)
    assert not isinstance(environment, ResettingEnvironment)
    returns = environment.step(conversations(*map(str, range(20))))
    assert [each.reward for each in returns] == list(range(20))
    assert judge.most == 3
    environment.close()


def test_a_conversation_over_its_deadline_fails_alone_even_where_errors_stop_the_run():
    environment = ConcurrentEnvironment(Judge(), timeout_s=2.0, on_error="stop")
    hung, fine = environment.step(conversations("hang", "1"))
    assert "longer than timeout_s=2" in hung.failed
    assert (fine.failed, fine.reward) == (None, 1.0)
    environment.close()


@pytest.mark.parametrize(("answer", "reason"), [("raise", "no answer from the judge"), ("nan", "finite reward")])
def test_an_error_stops_the_run_or_fails_one_rollout_as_asked(answer, reason):
    strict = ConcurrentEnvironment(Judge())
    with pytest.raises(AsyncEnvironmentError, match=rf"the row \{{'number': 1\}}: .*{reason}"):
        strict.step(conversations("1", answer))
    strict.close()
    environment = ConcurrentEnvironment(Judge(), on_error="fail")
    fine, failed = environment.step(conversations("1", answer))
    assert fine.failed is None
    assert reason in failed.failed
    environment.close()


def test_an_environment_that_begins_episodes_is_asked_to():
    environment = ConcurrentResettingEnvironment(Beginning())
    assert isinstance(environment, ResettingEnvironment)
    starts = environment.reset([{"prompt": "a"}, {"prompt": "b"}], seeds=[3, 4])
    assert [start.messages[0]["content"] for start in starts] == ["a 3", "b 4"]
    assert [start.state for start in starts] == [3, 4]
    with pytest.raises(AsyncEnvironmentError, match=r"the row .*broken.*no server"):
        environment.reset([{"prompt": "a"}, {"broken": True}], seeds=[0, 0])
    environment.close()
    with pytest.raises(AsyncEnvironmentError, match="use ConcurrentResettingEnvironment"):
        ConcurrentEnvironment(Beginning())


def test_one_loop_serves_all_batches():
    class Loops:
        async def step(self, conversation):
            return EnvironmentReturn(reward=float(id(asyncio.get_running_loop())), terminated=True)

    environment = ConcurrentEnvironment(Loops())
    rewards = {each.reward for _ in range(3) for each in environment.step(conversations("a", "b"))}
    assert len(rewards) == 1
    environment.close()
