"""Episodes as a batch environment: concurrency, deadlines, failures, and that every episode is closed once."""

import asyncio
import gc
import itertools
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algorithms.contracts import Conversation, EnvironmentReturn, EpisodeStart, ResettingEnvironment
from rl_algorithms.data import make_row
from rl_algorithms.environments.episodes import EpisodeEnvironment, EpisodeError
from rl_algorithms.environments.executor import BlockedLoopError, DeadlineExecutor, Outcome, wait_for_all
from rl_algorithms.environments.games import GuessNumber
from rl_algorithms.rollouts import collect


class Counting:
    """Ends after as many answers as the row says; what the answer says may go wrong. Remembers who was closed."""

    def __init__(self, log, release=None):
        self.log, self.release, self.answers = log, release, 0

    def reset(self, *, seed, row):
        self.row, self.seed = row, seed
        if row.get("reset") == "raise":
            raise OSError("no room")
        if row.get("reset") == "hang":
            self.release.wait()
        return f"{seed}"

    def step(self, answer):
        self.answers += 1
        if answer == "raise":
            raise OSError("the sandbox died")
        if answer == "exit":
            sys.exit(3)
        if answer == "hang":
            self.release.wait()
        ended = self.answers == self.row["turns"]
        return f"saw {answer}", float(self.answers), ended, False, {"metrics": {"seed": self.seed}}

    def close(self):
        self.log.append(self.row["name"])


@pytest.fixture
def release():
    event = threading.Event()
    yield event
    event.set()


def play(environment, starts, rows, answers):
    conversations = [
        Conversation(messages=start.messages, answer=answer, row=row, state=start.state)
        for start, row, answer in zip(starts, rows, answers, strict=True)
    ]
    return environment.step(conversations)


def rows_of(*names, turns=1, **columns):
    return [{"name": name, "turns": turns, **columns} for name in names]


def wait_for(condition):
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        gc.collect()
        if condition():
            return True
        time.sleep(0.01)
    return False


def test_it_is_a_resetting_environment():
    assert isinstance(EpisodeEnvironment(lambda: Counting([])), ResettingEnvironment)


def test_every_episode_gets_its_own_answers_in_order_and_is_closed_when_it_ends():
    log = []
    rows = [{"name": str(number), "turns": 1 + number % 3} for number in range(20)]
    with EpisodeEnvironment(lambda: Counting(log), max_workers=3) as environment:
        starts = environment.reset(rows, seeds=list(range(20)))
        assert [start.messages for start in starts] == [({"role": "user", "content": str(s)},) for s in range(20)]
        states = {row["name"]: start.state for row, start in zip(rows, starts, strict=True)}
        for turn in range(3):
            alive = [row for row in rows if row["turns"] > turn]
            returns = environment.step(
                [
                    Conversation(messages=(), answer=f"{row['name']}.{turn}", row=row, state=states[row["name"]])
                    for row in alive
                ]
            )
            for row, each in zip(alive, returns, strict=True):
                assert each.reward == turn + 1
                assert each.terminated == (row["turns"] == turn + 1)
                said = () if each.terminated else ({"role": "user", "content": f"saw {row['name']}.{turn}"},)
                assert each.observations == said
                assert each.metrics == {"seed": int(row["name"])}
            assert sorted(log) == sorted(row["name"] for row in rows if row["turns"] <= turn + 1)
    assert len(log) == 20


def test_calls_run_at_the_same_time_but_never_more_than_max_workers():
    together, most, lock = threading.Barrier(4), [0, 0], threading.Lock()

    class Meeting(Counting):
        def step(self, answer):
            with lock:
                most[0] += 1
                most[1] = max(most)
            together.wait(timeout=60)  # would break if fewer than four came
            with lock:
                most[0] -= 1
            return super().step(answer)

    rows = rows_of(*"abcdefgh")
    with EpisodeEnvironment(lambda: Meeting([]), max_workers=4) as environment:
        play(environment, environment.reset(rows, seeds=[0] * 8), rows, ["x"] * 8)
    assert most[1] == 4


def test_an_error_names_the_row_where_errors_stop_the_run():
    rows = rows_of("a", "b")
    with EpisodeEnvironment(lambda: Counting([])) as environment:
        starts = environment.reset(rows, seeds=[0, 0])
        with pytest.raises(EpisodeError, match=r"the row .*'b'.*OSError: the sandbox died.*on_error='fail'"):
            play(environment, starts, rows, ["x", "raise"])


@pytest.mark.parametrize(("answer", "reason"), [("raise", "OSError: the sandbox died"), ("exit", "SystemExit(3)")])
def test_an_error_costs_one_rollout_where_it_may(answer, reason):
    log, rows = [], rows_of("a", "b", "c", turns=2)
    with EpisodeEnvironment(lambda: Counting(log), on_error="fail") as environment:
        starts = environment.reset(rows, seeds=[0, 0, 0])
        first, second, third = play(environment, starts, rows, ["x", answer, "x"])
        assert first.failed is None
        assert third.failed is None
        assert second.terminated
        assert second.reward == 0.0
        assert reason in second.failed
        assert wait_for(lambda: log == ["b"])
        again = play(environment, [starts[0], starts[2]], [rows[0], rows[2]], ["y", "y"])
        assert [each.reward for each in again] == [2.0, 2.0]


@pytest.mark.parametrize("on_error", ["stop", "fail"])
def test_a_call_over_its_deadline_fails_its_rollout_and_no_other(release, on_error):
    log, rows = [], rows_of("a", "b", "c")
    environment = EpisodeEnvironment(lambda: Counting(log, release), max_workers=1, timeout_s=2.0, on_error=on_error)
    starts = environment.reset(rows, seeds=[0, 0, 0])
    hung, fine, also_fine = play(environment, starts, rows, ["hang", "x", "x"])
    assert "longer than timeout_s=2" in hung.failed
    assert fine.failed is None and also_fine.failed is None, "the only worker was replaced"  # noqa: PT018
    assert wait_for(lambda: sorted(log) == ["a", "b", "c"])
    release.set()
    environment.close()


def test_an_episode_that_cannot_begin_fails_at_its_first_step(release):
    log = []
    rows = [{"name": "a", "turns": 1}, {"name": "b", "turns": 1, "reset": "raise"}]
    rows.append({"name": "c", "turns": 1, "reset": "hang"})
    environment = EpisodeEnvironment(
        lambda: Counting(log, release), timeout_s=60.0, reset_timeout_s=2.0, on_error="fail"
    )
    starts = environment.reset(rows, seeds=[0, 0, 0])
    assert all(start.messages for start in starts), "the engine must have something to answer"
    returns = play(environment, starts, rows, ["x"] * 3)
    assert returns[0].failed is None
    assert "cannot begin: OSError: no room" in returns[1].failed
    assert "cannot begin: it ran longer than timeout_s=2" in returns[2].failed
    release.set()
    environment.close()
    with (
        EpisodeEnvironment(lambda: Counting(log)) as strict,
        pytest.raises(EpisodeError, match=r"the row .*'b'.*no room"),
    ):
        strict.reset(rows[:2], seeds=[0, 0])


def test_a_conversation_that_is_dropped_closes_its_episode():
    log, rows = [], rows_of("a", "b", turns=9)
    with EpisodeEnvironment(lambda: Counting(log)) as environment:
        starts = environment.reset(rows, seeds=[0, 0])
        kept = starts[0]
        del starts
        assert wait_for(lambda: log == ["b"])
        assert play(environment, [kept], rows[:1], ["x"])[0].reward == 1.0
    assert sorted(log) == ["a", "b"]


def test_closing_the_environment_closes_what_is_open_once():
    log, rows = [], rows_of("a", "b", "c", turns=9)
    environment = EpisodeEnvironment(lambda: Counting(log))
    starts = environment.reset(rows, seeds=[0, 0, 0])
    environment.close()
    environment.close()
    assert sorted(log) == ["a", "b", "c"]
    with pytest.raises(EpisodeError, match="is closed"):
        play(environment, starts, rows, ["x"] * 3)
    del starts
    gc.collect()
    assert len(log) == 3


def test_an_error_of_closing_is_told_and_costs_nothing(caplog):
    class Stuck(Counting):
        def close(self):
            raise OSError("still in use")

    rows = rows_of("a")
    with EpisodeEnvironment(lambda: Stuck([])) as environment:
        (result,) = play(environment, environment.reset(rows, seeds=[0]), rows, ["x"])
    assert result.reward == 1.0
    assert "still in use" in caplog.text


def test_states_that_are_not_its_own_are_refused():
    rows = rows_of("a", turns=1)
    with EpisodeEnvironment(lambda: Counting([])) as environment:
        with pytest.raises(EpisodeError, match=r"the row .*state is None"):
            play(environment, [EpisodeStart(messages=({"role": "user", "content": "x"},))], rows, ["x"])
        starts = environment.reset(rows, seeds=[0])
        with pytest.raises(EpisodeError, match="share an episode"):
            play(environment, [*starts, *starts], rows * 2, ["x", "x"])
        play(environment, starts, rows, ["x"])
        with pytest.raises(EpisodeError, match="has ended"):
            play(environment, starts, rows, ["x"])


OBSERVATION = ({"role": "user", "content": "go on"},)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "step returned None"),
        ((1.0, True), "a tuple of 2"),
        (("x", float("nan"), True, False, {}), "not finite"),
        (("x", 1.0, True, False, {"won": 1}), r"info\['won'\]"),
        ((3, 1.0, False, False, {}), "neither text nor a list of messages"),
        (EnvironmentReturn(reward=1.0, terminated=False), "neither ended the episode nor returned an observation"),
        (EnvironmentReturn(reward=1.0, terminated=False, observations=OBSERVATION, state=1), "keeps its state itself"),
    ],
)
def test_returns_that_make_no_sense_are_refused(returned, message):
    class Odd(Counting):
        def step(self, answer):
            return returned

    rows = rows_of("a")
    with EpisodeEnvironment(lambda: Odd([])) as environment:
        starts = environment.reset(rows, seeds=[0])
        with pytest.raises(EpisodeError, match=message):
            play(environment, starts, rows, ["x"])


@pytest.mark.parametrize(
    ("factory", "message"),
    [(object, "lacks reset, step or close"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_factories_that_make_no_episode_are_refused(factory, message):
    with EpisodeEnvironment(factory) as environment, pytest.raises(EpisodeError, match=message):
        environment.reset([{}], seeds=[0])


@pytest.mark.parametrize("limits", [{"timeout_s": 0.0}, {"timeout_s": float("inf")}, {"max_workers": 0}])
def test_limits_that_make_no_sense_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        EpisodeEnvironment(object, **limits)


class Async:
    """As `Counting`, of coroutines; remembers the loops that it ran on."""

    def __init__(self, log, release=None):
        self.log, self.release = log, release

    async def reset(self, *, seed, row):
        self.log.append(asyncio.get_running_loop())
        return EpisodeStart(messages=({"role": "system", "content": row["name"]},), tools=({"type": "function"},))

    async def step(self, answer):
        self.log.append(asyncio.get_running_loop())
        if answer == "hang":
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                await asyncio.sleep(3600)  # swallows it
        if answer == "raise":
            raise OSError("gone")
        if answer == "block":
            self.release.wait(60)  # what it must not do
        return EnvironmentReturn(reward=0.25, terminated=True, observations=({"role": "user", "content": "unheard"},))

    async def close(self):
        self.log.append("closed")


def test_async_episodes_share_one_loop_and_fail_alone():
    log, rows = [], rows_of(*"abc")
    with EpisodeEnvironment(lambda: Async(log), timeout_s=2.0, on_error="fail") as environment:
        starts = environment.reset(rows, seeds=[0] * 3)
        assert starts[1].messages[0]["content"] == "b"
        assert starts[1].tools == ({"type": "function"},)
        hung, broken, fine = play(environment, starts, rows, ["hang", "raise", "x"])
        assert "longer than" in hung.failed
        assert "OSError: gone" in broken.failed
        assert (fine.failed, fine.reward, fine.observations) == (None, 0.25, ())
        assert wait_for(lambda: log.count("closed") == 3)
    assert len({*log} - {"closed"}) == 1


def test_a_coroutine_that_blocks_the_loop_is_named(release):
    rows = rows_of("a")
    with EpisodeEnvironment(lambda: Async([], release), timeout_s=0.05, reset_timeout_s=60.0) as environment:
        starts = environment.reset(rows, seeds=[0])
        with pytest.raises(BlockedLoopError, match="blocked its event loop"):
            play(environment, starts, rows, ["block"])
        release.set()


def test_batches_of_several_threads_do_not_mix():
    rows = rows_of(*map(str, range(10)), turns=1)
    with EpisodeEnvironment(lambda: Counting([]), max_workers=4) as environment:
        seen = []

        def one(seed):
            starts = environment.reset(rows, seeds=[seed] * 10)
            seen.append({(seed, each.metrics["seed"]) for each in play(environment, starts, rows, ["x"] * 10)})

        threads = [threading.Thread(target=one, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert sorted(seen, key=sorted) == [{(seed, seed)} for seed in range(6)]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["value", "raise", "async", "async raise"]), max_size=12), st.integers(1, 4))
def test_outcomes_come_in_the_order_of_the_calls(kinds, max_workers):
    def call_of(index, kind):
        def plain():
            if kind.endswith("raise"):
                raise KeyError(index)
            return index

        async def coroutine():
            return plain()

        return coroutine if kind.startswith("async") else plain

    runner = DeadlineExecutor(max_workers=max_workers)
    outcomes = runner.run([call_of(*pair) for pair in enumerate(kinds)], timeout_s=60.0)
    runner.close()
    for index, (kind, outcome) in enumerate(zip(kinds, outcomes, strict=True)):
        assert (outcome.error.args if kind.endswith("raise") else (outcome.result(),)) == (index,)


def test_a_hung_step_does_not_keep_the_process_alive():
    program = """
        import threading
        from rl_algorithms.contracts import Conversation
        from rl_algorithms.environments.episodes import EpisodeEnvironment
        class Hangs:
            def reset(self, *, seed, row): return "0"
            def step(self, answer): threading.Event().wait()
            def close(self): threading.Event().wait()
        environment = EpisodeEnvironment(Hangs, timeout_s=0.1)
        (start,) = environment.reset([{}], seeds=[0])
        (result,) = environment.step([Conversation(messages=start.messages, answer="1", row={}, state=start.state)])
        print(result.failed)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "longer than timeout_s=0.1" in done.stdout


def test_what_hangs_when_ctrl_c_comes_keeps_no_place():
    workers, hung = DeadlineExecutor(max_workers=1), threading.Event()

    def interrupted():
        while len(workers._pending) < 2:  # the caller submits the second call, and then waits for both
            time.sleep(0.001)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
        hung.wait()

    calls = [interrupted, lambda: pytest.fail("nobody waits for it any more")]
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.run(calls, timeout_s=100.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert workers.run([lambda: 3], timeout_s=60.0) == [Outcome(value=3)]
    hung.set()
    workers.close()


def test_what_was_begun_when_ctrl_c_comes_between_two_calls_keeps_no_place():
    workers, hung = DeadlineExecutor(max_workers=1), threading.Event()

    def calls():
        yield workers.submit(hung.wait, timeout_s=100.0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wait_for_all(calls())
    assert workers.run([lambda: 3], timeout_s=60.0) == [Outcome(value=3)]
    hung.set()
    workers.close()


def test_what_is_forked_begins_anew():
    program = """
        import asyncio, os
        from rl_algorithms.environments.executor import DeadlineExecutor
        from rl_algorithms.environments.workers import Workers
        async def later():
            await asyncio.sleep(0)
            return os.getpid()
        runner, workers = DeadlineExecutor(max_workers=1), Workers(timeout_s=60.0)
        def works():
            outcomes = runner.run([os.getpid, later], timeout_s=60.0)
            matched = workers.run([{"do": "regex", "pattern": "a", "text": "a"}])
            return [outcome.value for outcome in outcomes] == [os.getpid()] * 2 and matched == [{"matches": True}]
        assert works()
        theirs = {worker._process.pid for worker in workers._started}
        if (child := os.fork()) == 0:
            works_here = works()
            ours = {worker._process.pid for worker in workers._started}
            runner.close(), workers.close()
            os._exit(0 if works_here and not ours & theirs else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), works())
        runner.close(), workers.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "0 True\n", done.stderr


class Scripted:
    """An engine that says the next of its words to every prompt."""

    def __init__(self, *words):
        self.words = list(words)

    def generate(self, prompts, sampling):
        word = self.words.pop(0)
        tokens = (*(2 + int(digit) for digit in word), 1)
        span = SimpleNamespace(version=0, start=0, end=len(tokens))
        sampled = SimpleNamespace(tokens=tokens, logp=(-1.0,) * len(tokens), truncated=False, versions=(span,))
        return [sampled] * len(prompts)


def test_episodes_are_collected_from_first_message_to_last_reward(chat):
    closed = []

    class Watched(GuessNumber):
        def close(self):
            closed.append(self)

    row = make_row({"prompt": "0", "secret": 3}, where="row 0")
    with EpisodeEnvironment(lambda: Watched(opening="9", higher="1", lower="2", max_guesses=3)) as environment:
        rollouts = collect(
            [chat.prompt(row)],
            group_size=2,
            engine=Scripted("7", "2", "3"),
            sampling=None,
            environment=environment,
            chat=chat,
            max_turns=5,
        )
        assert len(closed) == 2
    assert rollouts.rewards.tolist() == pytest.approx([0.8, 0.8])
    said = [9, 7, None, 2, 2, None, 1, 3, None]  # opening, guess, stop, "lower", guess, stop, "higher", guess, stop
    assert rollouts.tokens[0].tolist() == [1 if digit is None else 2 + digit for digit in said]
    assert rollouts.turns[0].tolist() == [-1, 0, 0, -1, 1, 1, -1, 2, 2]


def test_a_rollout_that_cannot_begin_leaves_its_group_alone(chat):
    numbers = itertools.count()

    class Unlucky(GuessNumber):
        def reset(self, *, seed, row):
            if next(numbers) == 1:
                raise OSError("no room")
            return super().reset(seed=seed, row=row)

    row = make_row({"prompt": "0", "secret": 3}, where="row 0")
    made = EpisodeEnvironment(lambda: Unlucky(opening="9"), max_workers=1, on_error="fail")
    with made as environment:
        rollouts = collect(
            [chat.prompt(row)],
            group_size=3,
            engine=Scripted("3"),
            sampling=None,
            environment=environment,
            chat=chat,
            max_turns=5,
        )
    assert rollouts.failed.tolist() == [False, True, False]
    assert "no room" in rollouts.failures[1]
    assert rollouts.tokens[1, 0] == rollouts.tokens[0, 0]
