"""An engine that can be held between two steps, where a test must not race with it."""

import threading

DEADLINE_S = 120


class Stepwise:
    """An engine whose steps wait, while it is held: what a test does meanwhile happens between two of them."""

    def __init__(self, engine):
        self._engine = engine
        self._steps_left = None
        self._changed = threading.Condition()

    def hold(self, *, after):
        """Wait before the step that follows the next `after` ones."""
        self._set(after)

    def go_on(self):
        self._set(None)

    def _set(self, steps):
        with self._changed:
            self._steps_left = steps
            self._changed.notify_all()

    def step(self):
        with self._changed:
            assert self._changed.wait_for(lambda: self._steps_left != 0, DEADLINE_S)
        deltas = self._engine.step()
        with self._changed:
            if self._steps_left and deltas:  # a step may also only clear away what has ended
                self._steps_left -= 1
        return deltas

    def __getattr__(self, name):
        return getattr(self._engine, name)
