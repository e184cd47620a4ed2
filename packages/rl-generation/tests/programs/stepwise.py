"""An engine that can be held between two steps, where a test must not race with it."""

import threading
import time

from rl_generation.requests import make_requests

DEADLINE_S = 120


class Stepwise:
    """A `TransformersEngine` whose steps wait, while it is held: what a test does meanwhile happens between two."""

    def __init__(self, engine):
        self._engine = engine
        self._steps_left = None
        self.is_held = False
        """Whether a step waits now."""
        self._changed = threading.Condition()
        self._advance = engine._runner.advance
        engine._runner.advance = self._advance_when_let

    def hold(self, *, after):
        """Wait before the step that follows the next `after` ones."""
        self._set(after)

    def go_on(self):
        self._set(None)

    def go_on_after(self, act):
        """Have a thread `act`, which waits for the step that is held, and go on; return once it is done."""
        deadline_s = time.monotonic() + DEADLINE_S
        while not self.is_held:
            assert time.monotonic() < deadline_s, "no step is held"
            time.sleep(0.001)
        acting = threading.Thread(target=act)
        acting.start()
        wait_for_turn(self._engine)
        self.go_on()
        acting.join(DEADLINE_S)

    def _set(self, steps):
        with self._changed:
            self._steps_left = steps
            self.is_held = self.is_held and steps == 0
            self._changed.notify_all()

    def _advance_when_let(self, *, stream):
        with self._changed:
            self.is_held = self._steps_left == 0
            assert self._changed.wait_for(lambda: self._steps_left != 0, DEADLINE_S)
            self.is_held = False
        news = self._advance(stream=stream)
        with self._changed:
            if self._steps_left and news:  # a step may also only clear away what has ended
                self._steps_left -= 1
        return news

    def __getattr__(self, name):
        return getattr(self._engine, name)


def wait_for_turn(engine):
    """Return once a thread waits for a turn of the engine."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not engine._turns._door.locked():
        assert time.monotonic() < deadline_s, "nobody waits for a turn"
        time.sleep(0.001)


def under_way(engine):
    """How many answers it has to work at."""
    metrics = engine.metrics()
    return metrics.running + metrics.waiting


class Steps:
    """Steps a `TransformersEngine` by hand: the requests of its batch, without the threads that step for callers."""

    def __init__(self, engine):
        self.engine = engine
        self._news = []

    def add_request(self, request_id, prompt, sampling):
        (rows,) = self.engine._rows_of(make_requests([prompt], [sampling], self.engine.limits), request_id)
        self.engine._runner.add(rows)

    def step(self):
        """The deltas of one step, or of what was aborted before it, each with the id of its request."""
        news, self._news = self._news or self.engine._runner.advance(stream=True), []
        for _, delta in news:
            if delta.rollout is not None:
                self.engine._finished[delta.rollout.finish_reason] += 1
        return [(row.owner, delta) for row, delta in news]

    def abort_request(self, request_id):
        self._news += self.engine._runner.abort(request_id)

    def has_unfinished_requests(self):
        return bool(self._news) or under_way(self.engine) > 0

    def __getattr__(self, name):
        return getattr(self.engine, name)
