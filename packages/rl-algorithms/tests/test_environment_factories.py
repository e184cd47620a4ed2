"""`environment_from` accepts each kind of environment, refuses what is none by name, and `counted` counts failures."""

import pytest

from rl_algorithms.contracts import Conversation, EnvironmentReturn, EpisodeStart, ResettingEnvironment, matches
from rl_algorithms.environments import EnvironmentFactoryError, EpisodeEnvironment, counted, environment_from


def conversation(answer="4"):
    return Conversation(messages=({"role": "user", "content": "2+2="},), answer=answer, row={})


class Episode:
    def reset(self, *, seed, row):
        return row["prompt"]

    def step(self, answer):
        return "again", 1.0, True, False, {}

    def close(self):
        pass


class Batch:
    def step(self, conversations):
        return [
            EnvironmentReturn(reward=1.0, terminated=True, failed="broke" if each.answer == "x" else None)
            for each in conversations
        ]


class Resetting(Batch):
    def reset(self, rows, *, seeds):
        return [EpisodeStart(messages=({"role": "user", "content": row["prompt"]},)) for row in rows]


class Awaited:
    async def step(self, conversation):
        return EnvironmentReturn(reward=0.5, terminated=True)


def test_each_kind_of_object_becomes_an_environment():
    assert isinstance(environment_from(Episode, name="Episode"), EpisodeEnvironment)
    for kind, reward in ((Batch, 1.0), (Awaited, 0.5)):
        environment = environment_from(kind, name=kind.__name__)
        assert [each.reward for each in environment.step([conversation()])] == [reward]


def test_what_is_no_environment_is_refused_by_its_name():
    with pytest.raises(EnvironmentFactoryError, match=r"env.environment=x:y made dict, which has no step"):
        environment_from(dict, name="env.environment=x:y")
    with pytest.raises(EnvironmentFactoryError, match=r"timeout_s=3\.0 .* Batch scores whole batches at once"):
        environment_from(Batch, name="Batch", timeout_s=3.0)


def test_an_error_of_the_factory_is_chained_so_that_its_frames_can_be_shown():
    def broken():
        raise KeyError("board")

    with pytest.raises(EnvironmentFactoryError, match="broken raised KeyError: 'board'") as refused:
        environment_from(broken, name="broken")
    assert isinstance(refused.value.__cause__, KeyError)


def test_failed_conversations_are_counted_and_reset_is_there_only_if_the_environment_has_one():
    plain, resetting = counted(Batch()), counted(Resetting())
    plain.step([conversation("x"), conversation("4")])
    plain.step([conversation("x")])
    assert plain.errors == 2
    assert not isinstance(plain, ResettingEnvironment)
    assert isinstance(resetting, ResettingEnvironment)
    assert resetting.reset([{"prompt": "1"}], seeds=[0]) == [EpisodeStart(messages=({"role": "user", "content": "1"},))]


class Watched:
    """An environment around another, as users write it: only `step` is its own."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, conversations):
        return self.inner.step(conversations)


def test_a_reset_that_is_handed_on_is_there_on_every_python():
    assert matches(Watched(Resetting()), ResettingEnvironment)
    assert not matches(Watched(Batch()), ResettingEnvironment)
    start = EpisodeStart(messages=({"role": "user", "content": "1"},))
    assert counted(Watched(Resetting())).reset([{"prompt": "1"}], seeds=[0]) == [start]
    assert not hasattr(counted(Watched(Batch())), "reset")


def test_methods_that_cannot_be_called_as_a_loop_calls_them_are_refused_by_name_and_place():
    class Wrong:
        def step(self):
            return []

    with pytest.raises(EnvironmentFactoryError, match=r"Wrong\.step \(.*factories\.py:\d+\) cannot be"):
        environment_from(Wrong, name="Wrong")
