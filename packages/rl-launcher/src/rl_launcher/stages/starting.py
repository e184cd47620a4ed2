"""How every stage begins: with a fresh optimizer, or with the one that an interrupted run left."""

from rl_backends import OptimizerConfig
from rl_launcher.building import Parts
from rl_launcher.progress import OPTIMIZER, Progress

__all__ = ["start_stage"]


def start_stage(
    name: str,
    optimizer: OptimizerConfig,
    *,
    num_steps: int,
    parts: Parts,
    progress: Progress,
    temperature: float = 1.0,
) -> int:
    """Make the policy ready to train; return how many steps of the stage are done already."""
    parts.policy.start_training(optimizer, num_steps=num_steps, temperature=temperature)
    taken = progress.steps_of(name)
    if taken and progress.folder is not None and progress.engine_rng is not None:
        parts.policy.load_checkpoint(progress.folder / OPTIMIZER, weights=False)
        parts.engine.set_rng_state(progress.engine_rng)
    return taken
