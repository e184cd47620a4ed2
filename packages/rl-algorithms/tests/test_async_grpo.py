"""Claims about asynchronous GRPO: it learns what the synchronous loop learns, nothing is too old, and nothing hangs."""

import dataclasses
import itertools
import random
import threading
import time
import traceback

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rl_algorithms import async_grpo, grpo
from rl_algorithms.background_collection import Gate, GatedEngine
from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart
from rl_algorithms.data import batches, make_row
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.objective import Objective, RatioConfig, SelectionConfig

pytestmark = pytest.mark.filterwarnings("ignore:max_staleness=.* allows no asynchrony")

SOON = 120.0  # seconds: never waited for, unless the test is about to fail
KEEP = Objective(selection=SelectionConfig(groups_without_signal="keep"))


def share_of_threes(completions):
    return [completion.count("3") / 3 for completion in completions]


@dataclasses.dataclass(frozen=True)
class Span:
    version: int
    start: int
    end: int


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("collector")]


@pytest.fixture
def world(make_table, make_engine, chat):
    """Call it with an engine's wrapper and with what the configuration should be, for what a loop is called with."""

    def make(*, wrap=lambda engine: engine, num_rows=4, lr=2.0, seed=0, **choices):
        table = make_table(lr=lr)
        engine = make_engine(table, seed=seed)
        asked = ["".join(digits) for digits in itertools.islice(itertools.product("0123", repeat=4), num_rows)]
        rows = [make_row({"prompt": prompt, "answer": "3"}, where=f"row {prompt}") for prompt in asked]
        choices = {"num_prompts": 4, "num_generations_per_prompt": 4, "max_num_steps": 12, **choices}
        return {
            "policy": table,
            "engine": wrap(engine),
            "weight_sync": engine,
            "environment": RewardFunctionEnvironment(reward=share_of_threes),
            "prompts": batches([chat.prompt(row) for row in rows], size=choices["num_prompts"], seed=0),
            "chat": chat,
            "sampling": 3,
            "config": async_grpo.AsyncGRPOConfig(**{"max_staleness": 0, "timeout_s": SOON, **choices}),
        }

    return make


def wait_until(condition):
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def told_of_waiting(config, tell):
    """A buffer that tells when training begins to wait for rollouts."""
    buffer = async_grpo.make_buffer(config)
    take = buffer.take
    buffer.take = lambda *arguments, **options: (tell(), take(*arguments, **options))[1]
    return buffer


class Watched:
    """An engine that says of each call what it likes, before it."""

    def __init__(self, engine, before):
        self.engine, self.before, self.lock, self.calls = engine, before, threading.Lock(), 0

    def generate(self, prompts, sampling):
        self.before()
        with self.lock:
            self.calls += 1
            return self.engine.generate(prompts, sampling)


class Recorder:
    """A policy that remembers which prompts each of its steps was on."""

    def __init__(self, table):
        self.table, self.prompts = table, []

    def logp(self, examples):
        return self.table.logp(examples)

    def forward_backward(self, examples, loss):
        self.prompts += examples.tokens[:, :4].tolist()
        return self.table.forward_backward(examples, loss)

    def optim_step(self):
        return self.table.optim_step()


def without_seconds(metrics):
    ours = ("dropped_groups", "buffer_groups")
    return {name: value for name, value in metrics.items() if "_s/" not in name and name not in ours}


# -- What is learnt ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "groups_per_call"), [(1, 1), (2, 3)])
def test_a_run_without_staleness_is_the_synchronous_one_to_the_last_bit(world, steps, groups_per_call):
    choices = {"steps_per_generation": steps, "max_staleness": steps - 1, "groups_per_call": groups_per_call}
    asynchronous, synchronous = world(**choices), world(**choices)
    found = [without_seconds(metrics) for metrics in async_grpo.train(**asynchronous)]
    expected = [without_seconds(metrics) for metrics in grpo.train(**synchronous)]
    assert found == expected
    assert len(found) == 12 // steps
    assert torch.equal(asynchronous["policy"].logits, synchronous["policy"].logits)


def test_with_staleness_it_learns_what_the_synchronous_loop_learns(world):
    def learnt(loop, **choices):
        steps = list(loop(**world(max_num_steps=24, num_generations_per_prompt=8, lr=4.0, **choices)))
        return sum(step["reward"] for step in steps[-4:]) / 4

    synchronous = learnt(grpo.train)
    assert synchronous > 0.9
    for weights in ("between_calls", "in_flight"):
        assert learnt(async_grpo.train, max_staleness=2, weights=weights, groups_per_call=2) >= synchronous - 0.08


def test_sampling_does_run_ahead(world):
    how = world(max_staleness=2)
    buffer = async_grpo.make_buffer(how["config"])

    class Patient(Recorder):
        """Takes its first step when two more batches have been sampled."""

        def optim_step(self):
            wait_until(lambda: self.table.version or len(buffer) == 8)
            return super().optim_step()

    how["policy"] = Patient(how["policy"])
    steps = list(async_grpo.train(**how, buffer=buffer))
    assert max(step["staleness_max"] for step in steps) == 2
    assert [step["version"] for step in steps] == list(range(1, 13))


# -- How old it is -------------------------------------------------------------------------------------------------


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # it is a function
@given(
    bound=st.integers(0, 4),
    steps=st.integers(1, 2),
    collectors=st.integers(1, 3),
    groups_per_call=st.integers(1, 3),
    ask_again=st.booleans(),
    seed=st.integers(0, 9),
)
def test_nothing_too_old_is_trained_on_and_nothing_lost(
    world, bound, steps, collectors, groups_per_call, ask_again, seed
):
    bound = max(bound, steps - 1)
    draw = random.Random(seed)
    how = world(
        wrap=lambda engine: Watched(engine, lambda: time.sleep(draw.choice([0.0, 0.0, 0.01]))),
        num_rows=96,
        max_num_steps=8,
        steps_per_generation=steps,
        max_staleness=bound,
        num_collectors=collectors,
        groups_per_call=groups_per_call,
        ask_again=ask_again,
        weights="in_flight" if seed % 2 else "between_calls",
        objective=KEEP,
    )
    how["policy"] = Recorder(how["policy"])
    dropped = 0
    for metrics in async_grpo.train(**how):
        assert 0 <= metrics["staleness_max"] + steps - 1 <= bound
        dropped += metrics["dropped_groups"]
    trained = how["policy"].prompts
    assert len(trained) == 8 // steps * 16
    counts = {tuple(prompt): trained.count(prompt) for prompt in trained}
    assert set(counts.values()) == {4}  # every group whole, and none twice
    assert not (collectors == 1 and dropped)  # one collector overtakes nobody


@pytest.mark.parametrize(("steps", "bound"), [(1, 1), (2, 4)])
def test_a_group_that_is_overtaken_is_dropped_and_asked_again(world, steps, bound):
    """The first call hangs until two batches were trained on; its prompt comes back, sampled with newer weights."""
    overtaken, asked = threading.Event(), []

    class Slow:
        def __init__(self, engine):
            self.engine, self.lock = engine, threading.Lock()

        def generate(self, prompts, sampling):
            with self.lock:
                asked.append(prompts[0])
                first, rollouts = len(asked) == 1, self.engine.generate(prompts, sampling)
            if first:
                assert overtaken.wait(SOON)
            return rollouts

    how = world(
        wrap=Slow, num_rows=32, max_num_steps=8 * steps, steps_per_generation=steps, max_staleness=bound,
        num_collectors=2, groups_per_call=1, weights="in_flight", objective=KEEP,
    )  # fmt: skip
    how["policy"] = Recorder(how["policy"])
    found = []
    for metrics in async_grpo.train(**how):
        found.append(metrics)
        if len(found) == 2:
            overtaken.set()  # bound + 1 versions behind, at the last step on the next batch
    assert sum(step["dropped_groups"] for step in found) == len(asked) - 32 >= 1
    assert asked.count(asked[0]) >= 2
    assert [how["policy"].prompts.count(list(prompt)) for prompt in asked] == [4] * len(asked)
    assert max(step["staleness_max"] for step in found) + steps - 1 <= bound


def test_weights_that_come_in_the_middle_of_an_answer_are_known_by_token(world):
    class Streaming:
        """Samples the second batch's first tokens with the first weights, and the rest with those that come then."""

        def __init__(self, engine):
            self.engine, self.changed, self.calls = engine, threading.Condition(), 0

        def generate(self, prompts, sampling):
            with self.changed:
                first = self.engine.generate(prompts, 1)
                self.calls += 1
                self.changed.notify_all()
                assert self.changed.wait_for(lambda: self.calls != 2 or self.engine.version > 0, SOON)
                rest = self.engine.generate([(*prompt, 2) for prompt in prompts], sampling - 1)
            return [
                dataclasses.replace(
                    end,
                    tokens=(*start.tokens, *end.tokens),
                    logp=(*start.logp, *end.logp),
                    versions=(start.versions[0], Span(end.versions[0].version, 1, 1 + len(end.tokens))),
                )
                for start, end in zip(first, rest, strict=True)
            ]

        def __call__(self, *, version):
            with self.changed:
                assert self.changed.wait_for(lambda: version == 0 or self.calls >= 2, SOON)
                self.engine(version=version)
                self.changed.notify_all()
                return self.engine

    how = world(wrap=Streaming, max_num_steps=4, max_staleness=1, groups_per_call=4, weights="in_flight")
    how["weight_sync"] = how["engine"]
    mixed = [step for step in async_grpo.train(**how) if 0.0 < step["staleness"] < step["staleness_max"] == 1.0]
    assert mixed


def test_versions_that_are_made_up_are_refused(world):
    class Forgetful(Watched):
        def generate(self, prompts, sampling):
            return [
                dataclasses.replace(rollout, versions=(Span(0, 0, len(rollout.tokens)),))
                for rollout in super().generate(prompts, sampling)
            ]

    how = world(wrap=lambda engine: Forgetful(engine, lambda: None))
    with pytest.raises(ValueError, match="versions 0 to 0 sampled an answer that was begun after weight_sync had"):
        list(async_grpo.train(**how))


# -- Who waits for whom --------------------------------------------------------------------------------------------


def test_a_slow_engine_makes_training_wait(world):
    waiting = threading.Semaphore(0)

    def slow():
        assert waiting.acquire(timeout=SOON)
        time.sleep(0.02)

    how = world(wrap=lambda engine: Watched(engine, slow), max_num_steps=2, groups_per_call=1)
    steps = list(async_grpo.train(**how, buffer=told_of_waiting(how["config"], lambda: waiting.release(4))))
    assert all(step["phase_s/wait"] > 0.04 for step in steps)  # four calls of 0.02 s
    assert steps[-1]["collector_s/generate"] > 0.08


def test_slow_training_makes_the_engine_wait(world):
    how = world(
        wrap=lambda engine: Watched(engine, lambda: None), max_staleness=2, groups_per_call=1, weights="in_flight"
    )
    buffer = async_grpo.make_buffer(how["config"])
    loop = async_grpo.train(**how, buffer=buffer)
    next(loop)
    wait_until(lambda: len(buffer) == 12)
    time.sleep(0.02)
    assert (len(buffer), buffer.places) == (12, 0)  # three batches of four, and no more
    assert how["engine"].calls == 16
    waited = next(loop).get("collector_s/wait", 0.0)
    wait_until(lambda: len(buffer) == 12)  # and so the collector has said how long it waited for a place
    assert waited + next(loop).get("collector_s/wait", 0.0) > 0.0
    loop.close()


def test_between_calls_the_engine_rests_while_the_caller_has_the_metrics(world):
    inside = []

    def before():
        inside.append(None)
        time.sleep(0.001)

    how = world(wrap=lambda engine: Watched(engine, before), max_staleness=3, groups_per_call=1)
    for metrics in async_grpo.train(**how):
        calls = how["engine"].calls
        time.sleep(0.005)
        assert (how["engine"].calls, len(inside)) == (calls, calls)
        assert how["weight_sync"].version == metrics["version"]


def test_a_refit_waits_for_those_inside_and_nobody_enters_before_it():
    gate, order, inside = Gate(), [], threading.Event()

    def call(name):
        with gate.shared():
            order.append(name)
            inside.set()
            time.sleep(0.01)
            order.append(f"{name} ended")

    def many_calls():
        while "refit" not in order:
            call("call")
        call("last")

    threads = [threading.Thread(target=many_calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert inside.wait(SOON)
    with gate.alone(timeout_s=SOON):  # would starve if calls went on entering
        assert order.count("call") == order.count("call ended")
        order.append("refit")
        time.sleep(0.01)
        assert order[-1] == "refit"
    for thread in threads:
        thread.join(SOON)
    assert order.count("last ended") == 3


# -- How it ends ---------------------------------------------------------------------------------------------------


def test_an_engine_that_raises_ends_the_run_with_its_error(world):
    calls = itertools.count()

    def an_engine_that_dies():
        if next(calls) == 5:
            raise OSError("out of memory")

    how = world(wrap=lambda engine: Watched(engine, an_engine_that_dies), max_staleness=2, groups_per_call=2)
    with pytest.raises(OSError, match="out of memory") as caught:
        list(async_grpo.train(**how))
    assert "an_engine_that_dies" in "".join(traceback.format_exception(caught.value))


def test_a_refit_that_raises_ends_the_run(world):
    how = world(max_staleness=2)

    def torn(*, version):
        raise ConnectionError(f"version {version} did not arrive")

    how["weight_sync"] = torn
    with pytest.raises(ConnectionError, match="version 1 did not arrive"):
        list(async_grpo.train(**how))


def test_prompts_that_end_are_said_so(world):
    how = world(max_staleness=1)
    how["prompts"] = itertools.islice(how["prompts"], 2)
    with pytest.raises(ValueError, match=r"prompts ended before number \d+ of the run"):
        list(async_grpo.train(**how, seed=1))


def test_closing_the_loop_early_lets_no_call_begin(world):
    how = world(wrap=lambda engine: Watched(engine, lambda: None), max_staleness=3, groups_per_call=1)
    buffer = async_grpo.make_buffer(how["config"])
    loop = async_grpo.train(**how, buffer=buffer)
    next(loop)
    calls = how["engine"].calls
    # Until a collector has a ticket, and stands at the gate.
    wait_until(lambda: buffer.places + len(buffer) < buffer.capacity)
    loop.close()
    assert how["engine"].calls == calls


def test_closing_the_loop_early_ends_threads_that_nothing_holds_up(world):
    how = world(max_staleness=3, weights="in_flight", groups_per_call=1, num_collectors=3)
    how["engine"] = Watched(how["engine"], lambda: None)
    loop = async_grpo.train(**how)
    next(loop)
    loop.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("collector")]


def test_an_engine_that_hangs_is_named_and_not_waited_for_for_ever(world):
    hanging, released = threading.Event(), threading.Event()

    def hang():
        hanging.set()
        released.wait(SOON)

    how = world(wrap=lambda engine: Watched(engine, hang), timeout_s=0.05, stop_timeout_s=0.05)
    how["buffer"] = told_of_waiting(how["config"], lambda: hanging.wait(SOON))
    try:
        with pytest.raises(TimeoutError, match="4 groups were wanted") as caught:
            next(async_grpo.train(**how))
        assert "collector 0 did not end within 0.05 s" in caught.value.__notes__[0]
    finally:
        released.set()
        _join_collectors()


def test_a_loop_that_is_closed_while_its_engine_hangs_says_so(world):
    hanging, released, calls = threading.Event(), threading.Event(), itertools.count()

    def hang():
        if next(calls) >= 4:
            hanging.set()
            released.wait(SOON)

    how = world(
        wrap=lambda engine: Watched(engine, hang), groups_per_call=1, max_staleness=1, weights="in_flight",
        stop_timeout_s=0.05,
    )  # fmt: skip
    loop = async_grpo.train(**how)
    next(loop)
    try:
        assert hanging.wait(SOON)
        with pytest.raises(RuntimeError, match="collector 0 did not end within"):
            loop.close()
    finally:
        released.set()
        _join_collectors()


def _join_collectors():
    for thread in threading.enumerate():
        if thread.name.startswith("collector"):
            thread.join(SOON)


# -- Going on later ------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_later_trains_on_every_prompt_once(world, tmp_path):
    choices = {"num_rows": 48, "max_staleness": 2, "groups_per_call": 1, "objective": KEEP}
    how = world(**choices)
    how["policy"] = Recorder(how["policy"])
    buffer = async_grpo.make_buffer(how["config"])
    loop = async_grpo.train(**how, buffer=buffer)
    for _ in range(5):
        metrics = next(loop)
    torch.save(buffer.state_dict(), tmp_path / "replay.pt")
    assert metrics["version"] == 5
    loop.close()

    later = world(**choices)
    later["policy"], later["engine"] = how["policy"], how["engine"]
    later["weight_sync"] = how["weight_sync"]
    buffer = async_grpo.make_buffer(later["config"])
    buffer.load_state_dict(torch.load(tmp_path / "replay.pt", weights_only=True))
    later["prompts"] = itertools.islice(later["prompts"], buffer.oldest_ticket // 4, None)
    rest = list(async_grpo.train(**later, buffer=buffer, version=5, steps_taken=5))
    assert [step["version"] for step in rest] == list(range(6, 13))
    counts = [how["policy"].prompts.count(prompt) for prompt in how["policy"].prompts]
    assert counts == [4] * 48 * 4


def test_a_bound_that_allows_no_asynchrony_says_so(world):
    how = world(max_num_steps=4, steps_per_generation=2, max_staleness=2)
    with pytest.warns(UserWarning, match=r"max_staleness=2 allows no asynchrony.* set max_staleness=3 or more"):
        assert len(list(async_grpo.train(**how))) == 2  # batches


# -- What is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"max_staleness": 2, "steps_per_generation": 4}, "max_staleness=2 must be >= 3"),
        ({"max_staleness": -1}, "max_staleness=-1 must be >= 0"),
        ({"num_collectors": 0}, "num_collectors=0 must be > 0"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be > 0"),
        ({"num_prompts": 0}, "num_prompts=0 must be >= 1"),
        ({"max_staleness": 1, "objective": Objective(ratio=RatioConfig(proximal="recomputed"))}, "nothing in ratio"),
        ({"max_staleness": 1, "objective": Objective(ratio=RatioConfig(surrogate="reinforce"))}, "nothing in ratio"),
        ({"objective": Objective(selection=SelectionConfig(max_generation_batches=2))}, "max_generation_batches=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        async_grpo.AsyncGRPOConfig(**{"max_num_steps": 4, "max_staleness": 0, **choices})


def test_what_needs_no_correction_is_not_refused():
    on_policy = Objective(ratio=RatioConfig(proximal="recomputed"))
    config = async_grpo.AsyncGRPOConfig(
        max_num_steps=4, steps_per_generation=4, max_staleness=6, objective=on_policy
    )  # below 7 nothing is sampled ahead
    assert config.batches_ahead == 0
    assert dataclasses.replace(config, max_staleness=7, objective=Objective()).batches_ahead == 1


def test_a_buffer_of_another_run_is_refused(world):
    how = world(max_staleness=2)
    other = async_grpo.make_buffer(dataclasses.replace(how["config"], max_staleness=3, max_num_steps=8))
    with pytest.raises(ValueError, match="capacity=16 and not 12, max_staleness=3 and not 2, num_groups=32 and not 48"):
        next(async_grpo.train(**how, buffer=other))
    with pytest.raises(ValueError, match="finished=0 and not 20"):
        next(async_grpo.train(**how, buffer=async_grpo.make_buffer(how["config"]), version=5, steps_taken=5))


class SelfJudged:
    """An environment that asks the policy's engine for a number."""

    def __init__(self, engine):
        self.engine = engine

    def step(self, conversations):
        said = self.engine.generate([(2,) for _ in conversations], 1)
        return [EnvironmentReturn(reward=float(one.tokens[0]), terminated=True) for one in said]


def test_a_judge_must_ask_the_policys_engine_through_its_gate(world):
    how = world(max_staleness=1)
    how["environment"] = RewardFunctionEnvironment(reward={"judge": SelfJudged(how["engine"])})
    with pytest.raises(ValueError, match="the environment asks the policy's engine"):
        next(async_grpo.train(**how))
    buffer = async_grpo.make_buffer(how["config"])
    how["engine"] = GatedEngine(how["engine"], buffer=buffer)
    how["environment"] = RewardFunctionEnvironment(reward={"judge": SelfJudged(how["engine"])})
    assert len(list(async_grpo.train(**how, buffer=buffer))) == 12


@pytest.mark.parametrize("groups_per_call", [1, 4])
def test_the_episodes_of_a_prompt_are_the_same_however_it_is_asked(world, groups_per_call):
    class Began:
        def __init__(self):
            self.seeds = []

        def reset(self, rows, *, seeds):
            self.seeds += seeds
            return [EpisodeStart(messages=({"role": "user", "content": "1"},)) for _ in rows]

        def step(self, conversations):
            return [EnvironmentReturn(reward=float(len(each.answer)), terminated=True) for each in conversations]

    seeds = []
    for loop in (grpo.train, async_grpo.train):
        how = {**world(max_num_steps=3, groups_per_call=groups_per_call), "environment": Began()}
        list(loop(**how))
        seeds.append(how["environment"].seeds)
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 12


def test_an_asynchronous_batch_of_another_size_is_refused(world):
    how = world()
    how["prompts"] = ([*batch, *batch] for batch in how["prompts"])
    with pytest.raises(ValueError, match="prompts gave a batch of 8, and the configuration says num_prompts=4"):
        next(async_grpo.train(**how))
