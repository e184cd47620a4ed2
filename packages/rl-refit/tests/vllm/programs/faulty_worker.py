"""A worker that can be told to fail in the middle of its next reload, and to take its time for every step."""

import os
import signal
import time

import torch

from rl_refit.vllm.worker import RefitWorker


class FaultyWorker(RefitWorker):
    def fail_next_reload(self, rank, after):
        if self.rl_refit_rank == rank:
            break_loader(self.model_runner.get_model(), after)
        return self.rl_refit_rank

    def dawdle(self, seconds):
        """Each step takes `seconds` longer from now on."""
        vars(self.model_runner).pop("execute_model", None)
        execute = self.model_runner.execute_model

        def slowly(*arguments, **options):
            time.sleep(seconds)
            return execute(*arguments, **options)

        self.model_runner.execute_model = slowly

    def received(self):
        return self._rl_refit_sink.received

    def flip_a_bit(self, rank, name):
        """Between verify and commit of the next refit."""
        sink = self._rl_refit_sink
        if self.rl_refit_rank == rank:
            before_commit(sink, lambda: sink._bank[name][0][1].view(torch.int32)[5].bitwise_xor_(1))

    def die_in_commit(self, rank):
        if self.rl_refit_rank == rank:
            sink = self._rl_refit_sink
            sink.commit = lambda version: os.kill(os.getpid(), signal.SIGKILL)


def before_commit(sink, do):
    ready = sink.ready

    def then(version):
        del sink.ready
        ready(version)
        do()

    sink.ready = then


def break_loader(model, after):
    """Once, the model's loader raises when it is asked to take one more than `after` tensors."""
    load = model.load_weights

    def broken(weights):
        del model.load_weights  # the next one is whole again
        return load(counted(weights))

    def counted(weights):
        for number, pair in enumerate(weights):
            if number == after:
                raise OSError(f"a fault after {after} tensors")
            yield pair

    model.load_weights = broken
