"""Single requests over several engines: real engines, in workers of this process, behind the pool that Ray has."""

import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest

from rl_generation import EngineConfig, PromptError, Sampling, TrainingEngineSpec, TransformersEngine
from rl_launcher.build.parts import _Timed
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.ray.dispatch import RayEngine
from rl_launcher.ray.engine_pool import EngineDiedError, EnginePool
from rl_launcher.ray.engine_worker import EngineWorker
from rl_launcher.ray.worker_failures import ProcessInfo, died
from rl_refit import ModuleSource, Refit

PATIENCE_S = 120
SHORT = Sampling(max_new_tokens=4)
LONG = Sampling(max_new_tokens=40, ignore_eos=True)


class Call:
    """A call of an actor, running in a thread."""

    def __init__(self, actor, work):
        self._actor, self._work = actor, work

    def result(self, *, timeout_s):
        done = wait([self._work, self._actor.death], timeout_s, return_when="FIRST_COMPLETED").done
        if self._actor.death in done:
            raise died("it was killed", who=self._actor.who, call="call", log_tail="")
        return self._work.result(0)


class ActorHere:
    """What an actor is to its pool, with the worker in this process; `kill` ends it as a signal would."""

    def __init__(self, index):
        self.who = ProcessInfo(role="engine", index=index, pid=1, node="here", log="")
        self.death = Future()
        self._threads = ThreadPoolExecutor(8)

    def make(self, kind, *arguments, timeout_s, **options):
        assert timeout_s > 0
        self.worker = kind(*arguments, **options)

    def submit(self, method, *arguments):
        return Call(self, self._threads.submit(lambda: getattr(self.worker, method)(*arguments)))

    def call(self, method, *arguments, timeout_s):
        return self.submit(method, *arguments).result(timeout_s=timeout_s)

    def kill(self):
        if not self.death.done():
            self.death.set_result(None)

    kill_on_its_node = kill  # it is this node

    def close(self):
        self.kill()

    def end(self):
        if hasattr(self, "worker"):  # a successor may not have come so far
            self.worker.close()
        self._threads.shutdown()


@pytest.fixture
def world(tmp_path):
    """Two engines with the weights of one model, and an engine of the same that is asked alone."""
    model, tokenizer = build(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    actors = []

    def start_actor(index):
        actors.append(ActorHere(index))
        return actors[-1]

    def give_weights(engine):
        worker: EngineWorker = engine.process().worker
        Refit(ModuleSource(model), worker._made.sink)(version=0)
        pool.serve([engine])

    pool = EnginePool(
        spec=TrainingEngineSpec(
            config=EngineConfig(max_new_tokens=8), model=str(tmp_path), stop_token_ids=(2,), pad_token_id=0
        ),
        start_actor=start_actor,
        hosts=["127.0.0.1", "127.0.0.1"],
        max_restarts=1,
        start_timeout_s=PATIENCE_S,
        call_timeout_s=PATIENCE_S,
    )
    pool.healer = give_weights
    pool.start()
    for engine in pool.all():
        give_weights(engine)
    yield SimpleNamespace(
        engine=RayEngine(pool),
        pool=pool,
        actors=actors,
        alone=TransformersEngine(model, stop_token_ids=[2], pad_token_id=0),
    )
    pool.close()
    for actor in actors:
        actor.end()


def expected(world, prompt, sampling, seed):
    return world.alone.generate([prompt], [sampling.for_request(seed)])[0].tokens


@contextmanager
def held(world):
    """Neither of the first two engines generates within the block; requests come to them all the same."""
    with ExitStack() as stack:
        for actor in world.actors[:2]:
            stack.enter_context(actor.worker._made.engine.between_steps())
        yield


def submit_to_both(world, each):
    """Requests that have come to the engines, `each` to every one."""
    futures = [world.engine.submit([5, 6], LONG, seed=seed) for seed in range(2 * each)]
    until(lambda: all(len(actor.worker._under_way) == each for actor in world.actors[:2]))
    return futures


def until(holds):
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_requests_are_spread_over_the_engines_and_get_what_each_would_get_alone(world):
    prompts = [[3 + number % 5, 4, 5][: 1 + number % 3] for number in range(24)]
    futures = [world.engine.submit(prompt, SHORT, seed=seed) for seed, prompt in enumerate(prompts)]
    for seed, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
        assert future.result(PATIENCE_S).tokens == expected(world, prompt, SHORT, seed)
    assert all(actor.worker.metrics()["generated_tokens"] > 0 for actor in world.actors)


def test_requests_of_an_engine_that_dies_are_answered_by_others(world):
    with held(world):
        futures = submit_to_both(world, 4)
        world.actors[0].kill()
        until(lambda: world.engine.metrics()["retried_prompts"] == 4.0)
    for seed, future in enumerate(futures):
        assert future.result(PATIENCE_S).tokens == expected(world, [5, 6], LONG, seed)
    assert world.engine.metrics()["engine_restarts"] == 1.0


def test_where_no_more_engines_may_die_the_requests_say_so(world):
    with held(world):
        futures = submit_to_both(world, 4)
        world.actors[0].kill()
        world.actors[1].kill()
        assert all(isinstance(future.exception(PATIENCE_S), EngineDiedError) for future in futures)


def test_a_refused_request_touches_no_other(world):
    fine = world.engine.submit([5, 6], SHORT, seed=0)
    with pytest.raises(PromptError, match="token id 999"):
        world.engine.submit([999], SHORT, seed=0).result(PATIENCE_S)
    with pytest.raises(PromptError, match=r"n=2: submit it 2 times"):
        world.engine.submit([5], Sampling(max_new_tokens=4, n=2), seed=0).result(PATIENCE_S)
    assert fine.result(PATIENCE_S).tokens == expected(world, [5, 6], SHORT, 0)


def test_a_cancelled_request_is_aborted_where_it_is(world):
    with held(world):
        kept, cancelled = submit_to_both(world, 1)
        assert cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.result(PATIENCE_S)
    assert kept.result(PATIENCE_S).tokens == expected(world, [5, 6], LONG, 0)
    until(lambda: not world.actors[1].worker.busy())


def test_a_refit_waits_for_requests_under_way_and_later_ones_wait_for_it(world):
    worker, seen = world.actors[0].worker, []

    def refit():
        seen.append((len(worker._under_way), len(worker._held)))

    refitting = threading.Thread(target=worker._between_requests, args=(refit,))
    with held(world):
        submit_to_both(world, 1)
        refitting.start()
        until(lambda: worker._held is not None)
        later = world.engine.submit([5, 6], SHORT, seed=3)
        until(lambda: worker._held)
    assert later.result(PATIENCE_S).tokens == expected(world, [5, 6], SHORT, 3)
    refitting.join(PATIENCE_S)
    assert seen == [(0, 1)]


def test_overlapping_requests_of_a_thread_are_one_span():
    futures, spans = [Future(), Future(), Future()], []
    clock = iter(range(100))
    log = SimpleNamespace(
        timed=lambda _, function: function, now=lambda: next(clock), write=lambda name, **span: spans.append(span)
    )
    queue = iter(futures)
    timed = _Timed(SimpleNamespace(generate=None, submit=lambda *_, **__: next(queue)), log)
    for _ in range(2):
        timed.submit([1], SHORT, seed=0)
    futures[0].set_result(None)
    assert not spans
    futures[1].set_result(None)
    timed.submit([1], SHORT, seed=0)
    futures[2].set_result(None)
    assert [(span["start_s"], span["end_s"]) for span in spans] == [(0, 1), (2, 3)]
