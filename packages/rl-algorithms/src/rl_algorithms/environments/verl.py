"""verl's reward functions: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`.

Rows have its columns: `data_source`, `reward_model` with a `ground_truth` in it, `extra_info` if any.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rl_algorithms.environments.scores import Score

__all__ = ["from_compute_score"]


def from_compute_score(compute_score: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Make a reward function of TRL's signature out of one of verl's.

    Of a dict that it returns, `score` is the reward, and every other number a metric of the same name.

    Raises, from the function returned:
        ValueError: a row without a ground truth, or a dict without a `score`.
    """

    def reward(
        *,
        completions: Sequence[str],
        data_source: Sequence[Any],
        reward_model: Sequence[Mapping[str, Any]],
        extra_info: Sequence[Any] | None = None,
    ) -> list[Any]:
        extras = [None] * len(completions) if extra_info is None else extra_info
        return [
            _score(
                compute_score(
                    data_source=source, solution_str=text, ground_truth=_ground_truth(model), extra_info=extra
                )
            )
            for text, source, model, extra in zip(completions, data_source, reward_model, extras, strict=True)
        ]

    reward.__qualname__ = reward.__name__ = str(getattr(compute_score, "__qualname__", "compute_score"))
    return reward


def _ground_truth(reward_model: Mapping[str, Any]) -> Any:
    if not isinstance(reward_model, Mapping) or "ground_truth" not in reward_model:
        raise ValueError(f"column 'reward_model' must be an object with a 'ground_truth', found {reward_model!r:.80}")
    return reward_model["ground_truth"]


def _score(returned: Any) -> Any:
    if not isinstance(returned, Mapping):
        return returned
    if "score" not in returned:
        raise ValueError(f"compute_score returned a dict without 'score': it has {', '.join(map(repr, returned))}")
    metrics = {
        name: float(value)
        for name, value in returned.items()
        if name != "score" and isinstance(name, str) and isinstance(value, Real)
    }
    return Score(float(returned["score"]), metrics=metrics)
