"""A run that trains, saves after every step and goes on from what it finds, and the moments at which it may be killed.

Runs on ranks. Every step has rows of its own, so that a step which is made twice or left out is seen in the curve.
"""

import functools
import os
import signal
from pathlib import Path

import torch.distributed as dist

from rl_backends import OptimizerConfig
from rl_backends.checkpoints.saving import find_latest
from rl_backends.megatron.config import MegatronConfig

STEPS = 3
KILLED = 2
"""In this step, or in the save after it."""
LAYOUTS = {
    "alone": {"use_distributed_optimizer": True, "precision": "bfloat16"},
    "DP2": {"use_distributed_optimizer": True, "precision": "bfloat16"},
    "PP2": {"pipeline_model_parallel_size": 2},
}
OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=2)


def train(world, layout, folder, *, arm=lambda step, backend: None, asynchronous=False, **config):
    """Go on from the newest checkpoint in `folder`, to the last step; the curve since, and the weights.

    arm: called before each step with its number and the backend, and before each save with its number and None.
    """
    from rl_backends.megatron.backend import MegatronBackend

    latest = find_latest(folder)  # before anybody writes
    model = world.make_model("Qwen3", seed=0 if latest is None else 1)  # nothing may be left of what it starts with
    backend = MegatronBackend(model, MegatronConfig(micro_batch_size=2, **LAYOUTS[layout], **config))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    if latest is not None:
        backend.load_checkpoint(latest)
    first, curve, saving = backend.version, [], None
    while backend.version < STEPS:
        arm(backend.version + 1, backend)
        examples = world.make_examples(rows=4, seed=backend.version)
        loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
        sums = backend.forward_backward(examples, loss)
        curve.append({"norm": backend.optim_step(), **{name: float(value) for name, value in sums.items()}})
        if saving is not None:
            saving.wait()  # or its calls would be counted among those of the next
        arm(backend.version, None)
        saving = backend.save_checkpoint(Path(folder) / f"step-{backend.version}", asynchronous=asynchronous)
    weights = {name: parameter.detach().clone() for name, parameter in backend.model.named_parameters()}
    backend.close()
    return {"latest": "nothing" if latest is None else latest.name, "first": first, "curve": curve, "weights": weights}


def die(*_):
    """As by kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(*_):
    """Neither work nor end, as on a machine that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)


# -- Moments of a save ----------------------------------------------------------------------------


def watch_files(calls, moment=0):
    """From here on, the calls that make files last and give them their names; dies instead of the `moment`-th."""

    def watched(function):
        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            calls.append(function.__name__)
            if len(calls) == moment:
                die()
            return function(*args, **kwargs)

        return wrapped

    os.fsync = watched(os.fsync)
    Path.rename = watched(Path.rename)


def in_save(moment):
    """What arms a run to die at a moment of the second save."""

    def arm(step, backend):
        if step == KILLED and backend is None:
            watch_files([], moment)

    return arm


def counted(calls):
    """What arms a run to write down the moments of the second save."""
    seen = []

    def arm(step, backend):
        if step == KILLED and backend is None:
            watch_files(seen)
        if step == KILLED + 1 and backend is not None:
            calls.extend(seen)

    return arm


# -- Moments of a step ----------------------------------------------------------------------------


def in_step(where, ends=die, *, rank=0):
    """What arms a run such that one rank ends in the third step."""

    def arm(step, backend):
        if step == KILLED + 1 and backend is not None and here() == rank:
            WHERE[where](backend, ends)

    return arm


def here():
    return dist.get_rank() if dist.is_initialized() else 0


def in_forward(backend, ends):
    """Of the second microbatch."""
    seen = []

    def at_the_second(*_):
        seen.append(1)
        if len(seen) == 2:
            ends()

    backend.model.decoder.layers[0].register_forward_hook(at_the_second)


def in_backward(backend, ends):
    """Of the first microbatch, in the midst of the layers."""
    layer = backend.model.decoder.layers[0]
    layer.register_forward_hook(lambda module, given, output: output[0].register_hook(ends) and None)


def before_gradients_meet(backend, ends):
    """This rank's are summed up, and no other's are added yet."""
    from megatron.core import distributed

    distributed.finalize_model_grads = ends


def in_update(backend, ends):
    """Weights are updated, and nobody knows yet that the step is over."""
    (optimizer,) = backend._optimizers.each
    optimizer.register_step_post_hook(ends)


WHERE = {
    "forward": in_forward,
    "backward": in_backward,
    "before gradients meet": before_gradients_meet,
    "update": in_update,
}
