"""Other projects' environments as ours: with the real packages where installed; each skip says which is not."""

import asyncio
import json
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from rl_algorithms.contracts import Conversation, Environment, ResettingEnvironment
from rl_algorithms.environments.adapters.gymnasium import GymnasiumEpisode
from rl_algorithms.environments.adapters.openenv import OpenEnvEpisode
from rl_algorithms.environments.adapters.optional import AdapterError, require
from rl_algorithms.environments.adapters.trl import TrlEpisode
from rl_algorithms.environments.adapters.verifiers import VerifiersEnvironment
from rl_algorithms.environments.episodes import EpisodeEnvironment, EpisodeError


def play(environment, starts, rows, answers):
    """One answer each; the states of those that go on travel back into the starts."""
    return environment.step(
        [
            Conversation(messages=(), answer=answer, row=row, state=start.state)
            for start, row, answer in zip(starts, rows, answers, strict=True)
        ]
    )


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(AdapterError, match=r"no_such_package.*pip install 'rl-algorithms\[gymnasium\]'"):
        require("no_such_package", extra="gymnasium")


# -- Gymnasium -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason="the gymnasium adapter is tested with gymnasium itself")


@pytest.fixture
def doubling(gymnasium):
    """Says a digit, wants its double as text; three rounds, and a time limit where the row says so."""

    class Doubling(gymnasium.Env):
        observation_space = gymnasium.spaces.Text(2, charset="0123456789")
        action_space = gymnasium.spaces.Text(2, charset="0123456789")

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.limit, self.round = (options or {}).get("limit"), 0
            return self._next(), {}

        def step(self, action):
            self.round += 1
            right = int(action) == 2 * self.digit
            return self._next(), right, self.round == 3, self.round == self.limit, {"digit": self.digit, "note": "?"}

        def _next(self):
            self.digit = int(self.np_random.integers(5))
            return str(self.digit)

    return Doubling


def test_a_text_environment_is_played_by_its_rules(doubling):
    rows = [{"limit": None}, {"limit": 2}]

    def make():
        options = {"option_columns": ["limit"], "metrics": lambda info: {"digit": info["digit"]}}
        return GymnasiumEpisode(doubling(), prompt="Double ", **options)

    with EpisodeEnvironment(make) as environment:
        starts = environment.reset(rows, seeds=[7, 7])
        assert starts[0].messages == starts[1].messages, "equal seeds begin equally"
        digit = int(starts[0].messages[0]["content"].removeprefix("Double "))
        right, wrong = play(environment, starts, rows, [str(2 * digit), "9"])
        assert (right.reward, wrong.reward) == (1.0, 0.0)
        assert right.observations[0]["content"] == str(int(right.metrics["digit"]))
        second = play(environment, starts, rows, ["0", "0"])
        assert [each.truncated for each in second] == [False, True]
        (third,) = play(environment, starts[:1], rows[:1], ["0"])
        assert (third.terminated, third.truncated, third.observations) == (True, False, ())


def test_an_answer_that_is_no_action_is_told_so_and_moves_nothing(gymnasium):
    def make():
        lake = gymnasium.make("FrozenLake-v1", is_slippery=False)
        return GymnasiumEpisode(lake, prompt="You are at ", invalid_reward=-0.5)

    with EpisodeEnvironment(make) as environment:
        starts = environment.reset([{}], seeds=[0])
        assert starts[0].messages[0]["content"] == "You are at 0"
        for answer in ("north", "7", ""):
            (result,) = play(environment, starts, [{}], [answer])
            assert (result.reward, result.terminated) == (-0.5, False)
            assert "the actions are Discrete(4)" in result.observations[0]["content"]
        rewards = []
        for answer in ("1", "1", "2", "2", " 1\n", "2"):
            (result,) = play(environment, starts, [{}], [answer])
            rewards.append(result.reward)
        assert (rewards, result.terminated) == ([0, 0, 0, 0, 0, 1], True)


def test_spaces_and_environments_that_cannot_be_said_are_refused(gymnasium):
    with pytest.raises(AdapterError, match=r"space Box\(.*give text="):
        GymnasiumEpisode(gymnasium.make("CartPole-v1"))
    with pytest.raises(AdapterError, match=r"space Box\(.*give action="):
        GymnasiumEpisode(gymnasium.make("Pendulum-v1"), text=str)
    vectors = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(AdapterError, match=r"no gymnasium\.Env; a vector environment"):
        GymnasiumEpisode(vectors)
    vectors.close()
    said = GymnasiumEpisode(gymnasium.make("CartPole-v1"), text=lambda seen: f"{seen.sum():.1f}")
    assert said.reset(seed=0, row={}).messages[0]["content"]
    said.close()


# -- OpenEnv -------------------------------------------------------------------------------------------------------


class Client:
    """An asynchronous client without a server: echoes, and ends after `turns` answers."""

    def __init__(self, last_reward=1.0):
        self.last_reward, self.closed = last_reward, False

    async def reset(self, *, seed, turns=1):
        self.left = turns
        return SimpleNamespace(observation=f"{turns} left", reward=None, done=turns == 0)

    async def step(self, action):
        self.left -= 1
        done = self.left == 0
        reward = self.last_reward if done else None
        return SimpleNamespace(observation=action["text"], reward=reward, done=done)

    async def close(self):
        self.closed = True


def openenv_episode(client, **options):
    return OpenEnvEpisode(
        client, action=lambda answer: {"text": answer}, text=str, reset_columns=["turns"], prompt="> ", **options
    )


def test_a_client_is_driven_and_closed():
    clients = []

    def connect():
        clients.append(Client())
        return openenv_episode(clients[-1])

    rows = [{"turns": 1}, {"turns": 2}]
    with EpisodeEnvironment(connect) as environment:
        starts = environment.reset(rows, seeds=[0, 0])
        assert starts[1].messages == ({"role": "user", "content": "> 2 left"},)
        first, second = play(environment, starts, rows, ["a", "b"])
        assert (first.reward, first.terminated) == (1.0, True)
        assert (second.reward, second.terminated) == (0.0, False)
        assert second.observations == ({"role": "user", "content": "b"},)
    assert all(client.closed for client in clients)


def test_what_a_client_cannot_say_is_refused():
    with EpisodeEnvironment(lambda: openenv_episode(Client(last_reward=None))) as environment:
        starts = environment.reset([{"turns": 1}], seeds=[0])
        with pytest.raises(EpisodeError, match="reward=None"):
            play(environment, starts, [{"turns": 1}], ["a"])
        with pytest.raises(EpisodeError, match="done=True"):
            environment.reset([{"turns": 0}], seeds=[0])
    client = Client()
    client._mode = "production"
    with pytest.raises(AdapterError, match="production mode"):
        openenv_episode(client)
    with pytest.raises(AdapterError, match=r"synchronous.*without \.sync\(\)"):
        openenv_episode(SimpleNamespace(reset=lambda: None, step=lambda action: None))


@pytest.fixture
def echo_server():
    """OpenEnv's own server over real websockets, on a free port."""
    server_side = pytest.importorskip(
        "openenv.core.env_server", reason="the OpenEnv adapter is tested against openenv-core's own server"
    )
    uvicorn = pytest.importorskip("uvicorn", reason="OpenEnv's server runs on uvicorn")

    class Say(server_side.Action):
        text: str

    class Seen(server_side.Observation):
        text: str

    class Echo(server_side.Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, turns=1, **_):
            self.left = turns
            return Seen(text=f"{turns} left, seed {seed}")

        def step(self, action, timeout_s=None, **_):
            self.left -= 1
            return Seen(text=action.text, reward=float(len(action.text)), done=self.left == 0)

        @property
        def state(self):
            return server_side.State()

    app = server_side.create_fastapi_app(Echo, Say, Seen, max_concurrent_envs=4)
    listening = socket.create_server(("127.0.0.1", 0))  # held from here on: a port that is free may be taken
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=60)
    listening.close()


def test_the_real_client_and_server_are_carried(echo_server):
    openenv = pytest.importorskip("openenv.core", reason="needs openenv-core")

    def connect():
        client = openenv.GenericEnvClient(base_url=echo_server)
        says, hears = lambda answer: {"text": answer}, lambda seen: seen["text"]
        return OpenEnvEpisode(client, action=says, text=hears, reset_columns=["turns"])

    rows = [{"turns": 1}, {"turns": 2}, {"turns": 2}]
    with EpisodeEnvironment(connect, timeout_s=60.0, on_error="fail") as environment:
        for _ in range(2):  # four sessions at most: those of the first batch must have been given back
            starts = environment.reset(rows, seeds=[3, 4, 5])
            assert [start.messages[0]["content"] for start in starts] == [
                f"{row['turns']} left, seed {seed}" for row, seed in zip(rows, (3, 4, 5), strict=True)
            ]
            first = play(environment, starts, rows, ["a", "bb", "ccc"])
            assert [each.failed for each in first] == [None] * 3
            assert [(each.reward, each.terminated) for each in first] == [(1.0, True), (2.0, False), (3.0, False)]
            second = play(environment, starts[1:], rows[1:], ["d", "e"])
            assert [(each.reward, each.terminated) for each in second] == [(1.0, True), (1.0, True)]


# -- TRL -----------------------------------------------------------------------------------------------------------


class Counter:
    """A TRL environment: a number that tools move towards the row's goal."""

    def reset(self, **row):
        self.goal, self.value = row["goal"], 0
        return None if row.get("silent") else f" The goal is {self.goal}."

    def move(self, by: int) -> int:
        """Move the counter.

        Args:
            by: how far.
        """
        if by > 5:
            raise OverflowError(f"{by} is too far")
        self.value += by
        return self.value

    async def read(self) -> str:
        """Read the counter."""
        await asyncio.sleep(0)
        return f"at {self.value}"

    def get_reward(self):
        return float(self.value == self.goal)

    def _hidden(self):
        raise AssertionError

    @property
    def risky(self):
        raise AssertionError("properties are not to be run")


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_public_methods_are_tools_and_the_environment_judges_itself():
    rows = [
        {"prompt": "Count.", "goal": 3},
        {"prompt": [{"role": "user", "content": "Go."}], "goal": 4, "silent": True},
    ]
    with EpisodeEnvironment(lambda: TrlEpisode(Counter())) as environment:
        starts = environment.reset(rows, seeds=[0, 0])
        assert [start.messages[0]["content"] for start in starts] == ["Count. The goal is 3.", "Go."]
        assert [each["function"]["name"] for each in starts[0].tools] == ["move", "read"]
        first, second = play(environment, starts, rows, [call("move", by=3) + call("read"), call("move", by=9)])
        assert [each["content"] for each in first.observations] == ["3", "at 3"]
        assert second.observations[0]["content"] == "error: OverflowError: 9 is too far"
        assert (first.metrics["tools/calls"], second.metrics["tools/errors"]) == (2, 1)
        (mistaken,) = play(environment, starts[1:], rows[1:], [call("get_reward")])
        assert "no tool 'get_reward'; the tools are move, read" in mistaken.observations[0]["content"]
        done = play(environment, starts, rows, ["done", "done"])
        assert [(each.reward, each.terminated, each.truncated) for each in done] == [
            (1.0, True, False),
            (0.0, True, False),
        ]


def test_calls_without_end_are_judged_and_truncated():
    row = {"prompt": "Count.", "goal": 1}
    with EpisodeEnvironment(lambda: TrlEpisode(Counter(), max_calls=1)) as environment:
        starts = environment.reset([row], seeds=[0])
        (first,) = play(environment, starts, [row], [call("move", by=1)])
        (second,) = play(environment, starts, [row], [call("move", by=1)])
    assert not first.terminated
    assert (second.reward, second.terminated, second.truncated) == (1.0, True, True)


class Asynchronous(Counter):
    async def reset(self, **row):
        return "Begin."

    async def get_reward(self):
        return 0.5


def test_coroutines_and_environments_that_own_their_prompt_are_carried():
    with EpisodeEnvironment(lambda: TrlEpisode(Asynchronous())) as environment:
        starts = environment.reset([{}], seeds=[0])
        assert starts[0].messages == ({"role": "user", "content": "Begin."},)
        assert play(environment, starts, [{}], ["done"])[0].reward == 0.5


class Unjudged:
    def reset(self, **row):
        return [{"type": "image"}]

    def act(self) -> str:
        """Act."""


class Pictures(Unjudged):
    def get_reward(self):
        return 0.0


def test_what_trl_does_elsewhere_is_refused():
    with pytest.raises(AdapterError, match="Unjudged has no method get_reward"):
        TrlEpisode(Unjudged())
    with pytest.raises(AdapterError, match="no method reset"):
        TrlEpisode(object())
    environment = EpisodeEnvironment(lambda: TrlEpisode(Pictures()))
    with environment, pytest.raises(EpisodeError, match="reset returned a list, and only text"):
        environment.reset([{"prompt": "x"}], seeds=[0])


# -- verifiers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def vf():
    return pytest.importorskip("verifiers.v1", reason="the verifiers adapter is tested with verifiers itself")


@pytest.fixture
def make_taskset(vf):
    class Data(vf.TaskData):
        answer: str = "2"

    class Plain(vf.Task[Data]):
        @vf.reward(weight=2.0)
        async def right(self, task, trace):
            if trace.last_reply == "raise":
                raise OSError("no verdict")
            return float(trace.last_reply == task.answer)

        @vf.reward
        async def form(self, trace):
            return {"short": float(len(trace.last_reply) < 3), "whole": float(not trace.is_truncated)}

        @vf.metric
        async def num_messages(self, trace):
            return len(trace.messages)

    def make(task_class=Plain, *, infinite=False, **data):
        class Tasks(vf.Taskset[task_class]):
            INFINITE = infinite

            def load(self):
                for number in range(3):
                    yield task_class(Data(**{"prompt": f"{number}+1?", "answer": str(number + 1), **data}))

        return Tasks(vf.TasksetConfig())

    make.Plain, make.Data = Plain, Data
    return make


def test_tasks_are_judged_as_verifiers_judges_them(make_taskset):
    environment = VerifiersEnvironment(make_taskset(system_prompt="Be brief."))
    assert isinstance(environment, Environment)
    assert not isinstance(environment, ResettingEnvironment)
    rows = environment.rows()
    assert rows[1]["prompt"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    assert json.loads(json.dumps(rows)) == rows, "rows can be written to a file"
    right, wrong, cut = environment.step(
        [
            Conversation(messages=(), answer="1", row=rows[0]),
            Conversation(messages=(), answer="nine", row=rows[1]),
            Conversation(messages=(), answer="3", row=rows[2], truncated=True),
        ]
    )
    assert (right.reward, right.terminated) == (4.0, True)
    assert right.rewards == {"right": 2.0, "short": 1.0, "whole": 1.0}
    assert right.metrics == {"num_messages": 3.0}
    assert wrong.rewards == {"right": 0.0, "short": 0.0, "whole": 1.0}
    assert cut.rewards == {"right": 2.0, "short": 1.0, "whole": 0.0}
    environment.close()


def test_prompts_of_messages_are_carried(make_taskset, vf):
    said = [vf.UserMessage(content="Hi."), vf.AssistantMessage(content="Hello."), vf.UserMessage(content="1+1?")]
    environment = VerifiersEnvironment(make_taskset(prompt=said))
    roles = [(each["role"], each["content"]) for each in environment.rows()[0]["prompt"]]
    assert roles == [("user", "Hi."), ("assistant", "Hello."), ("user", "1+1?")]
    (result,) = environment.step([Conversation(messages=(), answer="1", row=environment.rows()[0])])
    assert result.metrics == {"num_messages": 4.0}
    environment.close()


def test_errors_of_scoring_stop_or_fail(make_taskset):
    strict = VerifiersEnvironment(make_taskset())
    row = strict.rows()[0]
    with pytest.raises(ValueError, match=r"the row .*no verdict"):
        strict.step([Conversation(messages=(), answer="raise", row=row)])
    with pytest.raises(AdapterError, match="no verifiers_key of this taskset"):
        strict.step([Conversation(messages=(), answer="1", row={"prompt": "1+1?"})])
    strict.close()
    lenient = VerifiersEnvironment(make_taskset(), on_error="fail")
    (result,) = lenient.step([Conversation(messages=(), answer="raise", row=row)])
    assert "no verdict" in result.failed
    lenient.close()


def test_what_verifiers_must_drive_itself_is_refused_by_name(make_taskset, vf):
    plain = make_taskset.Plain

    class Box(plain):
        NEEDS_CONTAINER = True

    class Prepares(plain):
        async def setup(self, trace, runtime):
            pass

    class Stops(plain):
        @vf.stop
        async def enough(self, trace):
            return True

    class Runs(plain):
        @vf.reward
        async def passes(self, runtime):
            return 1.0

    class Unjudged(vf.Task[make_taskset.Data]):
        pass

    class Tooled(plain):
        @classmethod
        def toolsets(cls, config):
            return [object()]

    for task_class, message in [
        (Box, "a container"),
        (Prepares, "a setup of its own"),
        (Stops, "@stop conditions"),
        (Runs, "need a runtime"),
        (Unjudged, "neither @reward functions nor judges"),
        (Tooled, "toolsets"),
    ]:
        with pytest.raises(AdapterError, match=rf"the task 0 \({task_class.__name__}\) has .*{message}"):
            VerifiersEnvironment(make_taskset(task_class))
    with pytest.raises(AdapterError, match="no prompt"):
        VerifiersEnvironment(make_taskset(prompt=None))
    with pytest.raises(AdapterError, match="never ends"):
        VerifiersEnvironment(make_taskset(infinite=True))
    VerifiersEnvironment(make_taskset(infinite=True).take(2)).close()
    with pytest.raises(AdapterError, match=r"a list is no verifiers\.v1\.Taskset"):
        VerifiersEnvironment([])


PLUGIN = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    pass

class Asked(vf.Task[Data]):
    @vf.reward
    async def fine(self, trace):
        return 1.0

class TalkingTaskset(vf.Taskset[Asked]):
    def load(self):
        yield Asked(Data(prompt="Hi."))

class TalkingEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class TalkingEnv(vf.Env[TalkingEnvConfig]):
    async def run(self, task, agents):
        raise AssertionError

__all__ = ["TalkingTaskset", "TalkingEnv"]
"""


def test_a_taskset_with_an_environment_of_its_own_is_refused(vf, tmp_path, monkeypatch):
    (tmp_path / "talking_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    taskset = vf.load_taskset(vf.TasksetConfig(id="talking_plugin"))
    with pytest.raises(
        AdapterError, match=r"TalkingTaskset comes with TalkingEnv, whose run\(\) drives a model endpoint"
    ):
        VerifiersEnvironment(taskset)
