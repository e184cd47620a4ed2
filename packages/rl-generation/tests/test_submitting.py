"""Single requests with futures: whatever is generated beside them, each gets what it would have got alone."""

import concurrent.futures
import random
import threading
import time
from dataclasses import replace

import pytest
import torch

from rl_generation.engine import RequestEngine
from rl_generation.errors import EngineDeadError, LogpError, ModelError, PromptError
from rl_generation.requests import Sampling
from rl_generation.transformers_engine import TransformersEngine, Turns

PATIENCE_S = 120
SAMPLING = Sampling(max_new_tokens=12)
LONG = Sampling(max_new_tokens=60, ignore_eos=True)


def engine(tiny, family="llama", **options):
    return TransformersEngine(tiny(family), stop_token_ids=[2], pad_token_id=0, **options)


@pytest.fixture
def served(tiny):
    """An engine that others submit to, and one of the same weights that is asked for one answer at a time."""
    serving = engine(tiny)
    yield serving, engine(tiny)
    serving.close()


def alone(plain, prompt, sampling, seed):
    (rollout,) = plain.generate([prompt], [sampling.for_request(seed)])
    return rollout


def same(ours, theirs):
    assert ours.tokens == theirs.tokens
    assert ours.finish_reason == theirs.finish_reason
    assert ours.logp == pytest.approx(theirs.logp, abs=1e-4)


def wait_until_idle(engine):
    """Wait for the end of the thread that steps for submitted requests."""
    if (thread := engine._thread) is not None:
        thread.join(PATIENCE_S)


class Held:
    """Holds an engine in the midst of its `after`-th forward, until `go_on`."""

    def __init__(self, engine, after=4):
        self.engine, self.left = engine, after
        self._reached, self._released = threading.Event(), threading.Event()
        self._hook = engine.model.register_forward_pre_hook(self._wait)

    def _wait(self, *_):
        self.left -= 1
        if self.left == 0:
            self._reached.set()
            self._released.wait(PATIENCE_S)

    def submit(self, *tokens):
        """A long request for each token; some of theirs have been generated when this returns."""
        futures = [self.engine.submit([1, token], LONG, seed=token) for token in tokens]
        assert self._reached.wait(PATIENCE_S)
        return futures

    def in_turn(self, act):
        """Have a thread `act`, which waits for a turn of the engine, before that goes on; return once it is done."""
        thread = threading.Thread(target=act)
        thread.start()
        while not self.engine._turns._door.locked():
            time.sleep(0.001)
        self.go_on()
        thread.join(PATIENCE_S)

    def go_on(self):
        self._hook.remove()
        self._released.set()


def test_requests_of_many_threads_get_what_each_would_get_alone(served):
    serving, plain = served
    assert isinstance(serving, RequestEngine)
    requests = [
        ([1, 5 + number % 7, 4][: 1 + number % 3], Sampling(max_new_tokens=3 + number % 13, temperature=0.8), number)
        for number in range(40)
    ]

    def ask(request):
        prompt, sampling, seed = request
        return serving.submit(prompt, sampling, seed=seed).result(PATIENCE_S)

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        rollouts = list(threads.map(ask, requests))
    for request, rollout in zip(requests, rollouts, strict=True):
        same(rollout, alone(plain, *request))


def test_a_request_joins_the_running_batch(served):
    serving, plain = served
    held = Held(serving)
    (long,) = held.submit(5)
    short = serving.submit([1, 6], Sampling(max_new_tokens=2), seed=0)
    long.add_done_callback(lambda _: short.done() or pytest.fail("the short one waited for the long one"))
    held.go_on()
    same(short.result(PATIENCE_S), alone(plain, [1, 6], Sampling(max_new_tokens=2), 0))
    same(long.result(PATIENCE_S), alone(plain, [1, 5], LONG, 5))


def test_generate_and_submit_share_the_engine(served):
    serving, plain = served
    held = Held(serving)
    futures = held.submit(5, 6)
    threading.Timer(0.05, held.go_on).start()  # once generate waits for its turn
    prompts, sampling = [[1, 7], [1, 8]], replace(SAMPLING, seed=3, n=2)
    for ours, theirs in zip(serving.generate(prompts, sampling), plain.generate(prompts, sampling), strict=True):
        same(ours, theirs)
    for token, future in zip((5, 6), futures, strict=True):
        same(future.result(PATIENCE_S), alone(plain, [1, token], LONG, token))


def test_models_without_continuous_batching_answer_too(tiny):
    serving, plain = (engine(tiny, continuous_batching="off") for _ in range(2))
    futures = [serving.submit([1, token], SAMPLING, seed=token) for token in range(5, 12)]
    for token, future in zip(range(5, 12), futures, strict=True):
        same(future.result(PATIENCE_S), alone(plain, [1, token], SAMPLING, token))
    serving.close()


def test_the_seed_of_a_request_goes_with_that_of_its_sampling():
    unseeded, seeded = Sampling(max_new_tokens=4), Sampling(max_new_tokens=4, seed=7)
    assert unseeded.for_request(9) == Sampling(max_new_tokens=4, seed=9)
    assert [seeded.for_request(number) for number in range(5)] == seeded.spread(5)
    greedy = Sampling(max_new_tokens=4, temperature=0.0)
    assert greedy.for_request(9) == greedy


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([99], SAMPLING, "token id 99"),
        ([], SAMPLING, "empty"),
        ([1], replace(SAMPLING, n=2), r"sampling\.n=2: submit it 2 times"),
        ([1], replace(SAMPLING, bad_words=("x",)), "no tokenizer"),
    ],
)
def test_what_is_refused_is_the_futures_error_and_touches_no_other(served, prompt, sampling, message):
    serving, plain = served
    held = Held(serving)
    (fine,) = held.submit(5)
    refused = serving.submit(prompt, sampling, seed=0)
    held.go_on()
    with pytest.raises(PromptError, match=message):
        refused.result(PATIENCE_S)
    same(fine.result(PATIENCE_S), alone(plain, [1, 5], LONG, 5))


def test_an_engine_that_is_not_ready_refuses(tiny):
    def ready():
        raise ModelError("no weights")

    with pytest.raises(ModelError, match="no weights"):
        engine(tiny, ready=ready).submit([1], SAMPLING, seed=0).result(PATIENCE_S)


def test_broken_logits_are_the_error_of_the_request_that_met_them(served):
    """Token 9 has an embedding of NaN: only the request that holds it is lost."""
    serving, plain = served
    with torch.no_grad():
        serving.model.get_input_embeddings().weight[9] = torch.nan
    prompts = [[1, 5], [1, 9], [1, 6]]
    sampling = Sampling(max_new_tokens=4, top_k=1)
    futures = [serving.submit(prompt, sampling, seed=0) for prompt in prompts]
    with pytest.raises(LogpError, match="NaN"):
        futures[1].result(PATIENCE_S)
    for number in (0, 2):
        rollout = futures[number].result(PATIENCE_S)
        assert 9 not in rollout.tokens, "the test's premise"
        same(rollout, alone(plain, prompts[number], sampling, 0))


def test_a_forward_that_fails_is_the_error_of_all_and_the_engine_goes_on(served, monkeypatch):
    serving, plain = served
    forward = serving.model.forward
    monkeypatch.setattr(serving.model, "forward", lambda *_, **__: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError, match="full"):
        serving.submit([1, 5], SAMPLING, seed=0).result(PATIENCE_S)
    monkeypatch.setattr(serving.model, "forward", forward)
    same(serving.submit([1, 5], SAMPLING, seed=0).result(PATIENCE_S), alone(plain, [1, 5], SAMPLING, 0))


def test_a_cancelled_request_leaves_the_batch_and_the_others_alone(served):
    serving, plain = served
    held = Held(serving)
    kept, cancelled = held.submit(5, 6)
    assert cancelled.cancel()
    held.go_on()
    assert concurrent.futures.wait([cancelled], PATIENCE_S).done == {cancelled}
    with pytest.raises(concurrent.futures.CancelledError):
        cancelled.result(PATIENCE_S)
    same(kept.result(PATIENCE_S), alone(plain, [1, 5], LONG, 5))
    wait_until_idle(serving)
    assert serving.metrics().running == 0
    assert serving.metrics().finished == {"length": 1, "abort": 1}


def test_close_ends_all_and_leaves_no_thread(served):
    serving, plain = served
    before = set(threading.enumerate())
    held = Held(serving)
    futures = held.submit(5, 6)
    held.in_turn(serving.close)
    for future in futures:
        with pytest.raises(EngineDeadError, match="closed while this request was under way"):
            future.result(PATIENCE_S)
    assert set(threading.enumerate()) <= before
    same(serving.submit([1, 5], SAMPLING, seed=0).result(PATIENCE_S), alone(plain, [1, 5], SAMPLING, 0))


def test_weights_may_change_between_steps_and_rollouts_say_where(served):
    serving, _ = served

    def new_weights():
        with serving.between_steps(), torch.no_grad():
            serving.model.lm_head.weight.mul_(0.5)
            serving.commit_version(4)

    held = Held(serving)
    (future,) = held.submit(5)
    held.in_turn(new_weights)
    first, second = future.result(PATIENCE_S).versions
    assert (first.version, first.end, second.version, second.end) == (0, 4, 4, 60)


def test_callbacks_may_submit_the_next_request(served):
    """As an episode does: from the engine's own thread."""
    serving, plain = served
    ended, answers = threading.Event(), []

    def next_turn(future):
        answers.append(future.result())
        if len(answers) == 4:
            ended.set()
        else:
            tokens = [1, *answers[-1].tokens][:20]
            serving.submit(tokens, SAMPLING, seed=len(answers)).add_done_callback(next_turn)

    serving.submit([1, 5], SAMPLING, seed=0).add_done_callback(next_turn)
    assert ended.wait(PATIENCE_S)
    prompt = [1, 5]
    for seed, answer in enumerate(answers):
        same(answer, alone(plain, prompt, SAMPLING, seed))
        prompt = [1, *answer.tokens][:20]


def test_whatever_comes_and_goes_nothing_is_lost_or_left(tiny):
    serving = engine(tiny, max_batch_size=6, max_cache_tokens=200)
    dice = random.Random(0)
    plan = [[(dice.randrange(3, 39), dice.random()) for _ in range(30)] for _ in range(4)]
    kept = []

    def ask(requests):
        for token, chance in requests:
            future = serving.submit([1, token], Sampling(max_new_tokens=1 + token % 9), seed=token)
            if chance < 0.3:
                future.cancel()
            elif chance < 0.4:
                serving.generate([[1, token]], replace(SAMPLING, seed=1))
            else:
                kept.append((token, future))

    threads = [threading.Thread(target=ask, args=(requests,)) for requests in plan]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    plain = engine(tiny)
    for token, future in kept:
        rollout = future.result(PATIENCE_S)
        assert rollout.tokens == alone(plain, [1, token], Sampling(max_new_tokens=1 + token % 9), token).tokens
    wait_until_idle(serving)
    metrics = serving.metrics()
    assert (metrics.running, metrics.waiting) == (0, 0)


def test_a_thread_that_steps_in_a_loop_leaves_turns_to_others_and_may_take_its_own_again():
    turns, order, ended = Turns(), [], threading.Event()

    def step():
        while not ended.is_set():
            with turns, turns:
                order.append("step")
                time.sleep(0.001)

    stepping = threading.Thread(target=step)
    stepping.start()
    for number in range(20):
        with turns:
            assert turns.mine
            order.append(number)
    ended.set()
    stepping.join(PATIENCE_S)
    assert [each for each in order if each != "step"] == list(range(20))
    assert order.count("step") < 200  # of a plain lock it would be hundreds for each turn of this thread
    assert not turns.mine
