"""A worker that can be told to fail in the middle of its next reload, and to take its time for every step."""

import os
import time

from rl_refit.vllm.worker import RefitWorker


class FaultyWorker(RefitWorker):
    def fail_next_reload(self, rank, after):
        if self.rank == rank:
            break_loader(self.model_runner.get_model(), after)
        return self.rank

    def dawdle(self, seconds):
        """Each step takes `seconds` longer from now on."""
        vars(self.model_runner).pop("execute_model", None)
        execute = self.model_runner.execute_model

        def slowly(*arguments, **options):
            time.sleep(seconds)
            return execute(*arguments, **options)

        self.model_runner.execute_model = slowly

    def process_id(self):
        return os.getpid()


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
