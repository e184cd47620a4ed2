"""Online DPO: before each step the policy responds anew, and learns from its best and worst responses by DPO's loss.

    r[p, g]   the reward of response g to prompt p, sampled by the weights that are about to be trained
    pairs     the best and the worst response to each prompt whose rewards differ                      preferences.pairs
    L         DPO's loss over the pairs of this step, compared with a frozen reference                 dpo

So it never learns from responses that it would no longer give, as DPO on pairs that were sampled once does. A reward
model, a judge or a program says which is better: the environment. A prompt whose responses are worth the same gives no
pair, and a batch without pairs takes no step; TRL's trainer samples two responses to each prompt and takes the first of
equal ones as better. The step is on all pairs that were found, `batch_size` is of given pairs.

Axes: P prompts, G responses to each; B = 2 * pairs rows, chosen then rejected. Reference: OAIF (arXiv:2402.04792).
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rl_algorithms import dpo
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Engine, Environment, Policy, Reference, WeightSync
from rl_algorithms.dpo import DPOConfig
from rl_algorithms.preferences.pairs import pairs_from_rollouts
from rl_algorithms.rollouts import Rollouts, collect_batch, describe
from rl_algorithms.stepping import PhaseTimer, batches_left, bring_weights, checked_batches

__all__ = ["DPOConfig", "train"]

SamplingT = TypeVar("SamplingT")


def train(
    *,
    policy: Policy,
    engine: Engine[SamplingT],
    weight_sync: WeightSync,
    environment: Environment,
    prompts: Iterator[list[Prompt]],
    chat: Chat,
    sampling: SamplingT,
    config: DPOConfig,
    reference: Reference | None = None,
    version: int = 0,
    steps_taken: int = 0,
    seed: int = 0,
    on_rollouts: Callable[[Rollouts], object] = lambda _: None,
) -> Iterator[dict[str, float]]:
    """Take at most `max_num_steps` steps, one on each batch of `num_prompts`; the arguments are `grpo.train`'s.

    Yields:
        After each batch what describes its rollouts, `pairs`, what `dpo.step` returns if there are pairs, the new
        `version`, `steps_taken` and the seconds of each phase.

    Raises:
        ValueError: the loss compares with a reference, and none was given; or as `collect_batch` and `dpo.step`.
    """
    if reference is None and not config.reference_free:
        raise ValueError(f"loss={config.loss!r} compares with a reference; give the policy before its first step")
    timer = PhaseTimer()
    ask: dict[str, Any] = {"engine": engine, "sampling": sampling, "chat": chat, "environment": environment}
    left = batches_left(config, steps_taken=steps_taken)
    given = checked_batches(prompts, name="prompts", wanted=len(left), size=config.num_prompts)
    for number, taken in left:
        rollouts = collect_batch(given, config, number=number, version=version, seed=seed, timer=timer, **ask)
        on_rollouts(rollouts)
        pairs = pairs_from_rollouts(rollouts, pairs_per_prompt=config.pairs_per_prompt)
        metrics = {**describe(rollouts, version=version), "pairs": float(len(pairs))}
        if pairs:  # without them no step, and nothing new to transfer
            examples = dpo.prepare(pairs)
            if reference is not None:
                with timer.phase("reference"):
                    examples = dpo.with_reference(reference, examples)
            with timer.phase("train"):
                metrics |= dpo.step(policy, examples, config)
            version += 1
            bring_weights(weight_sync, version=version, timer=timer)
        yield {**metrics, "version": version, "steps_taken": taken, **timer.lap()}
