"""verl's reward functions: `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`.

Rows have its columns: `data_source`, `reward_model` with a `ground_truth` in it, `extra_info` if any.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rl_algorithms.environments.scores import Score, takes_text

__all__ = ["from_compute_score"]


def from_compute_score(compute_score: Callable[..., Any]) -> Callable[..., Any]:
    """Make a reward function of TRL's signature out of one of verl's.

    A coroutine function is awaited for all answers at once. Of a dict that it returns, `score` is the reward, and every
    other number a metric of the same name.

    Raises, from the function returned:
        ValueError: a row without a ground truth, or a dict without a `score`.
    """

    def calls(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        extras = columns.get("extra_info") or [None] * len(columns["completions"])
        texts, sources, models = (columns[name] for name in ("completions", "data_source", "reward_model"))
        return [
            {"data_source": source, "solution_str": text, "ground_truth": _ground_truth(model), "extra_info": extra}
            for text, source, model, extra in zip(texts, sources, models, extras, strict=True)
        ]

    named = {*inspect.signature(compute_score).parameters}
    variadic = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(compute_score).parameters.values())

    def ask(arguments: dict[str, Any]) -> Any:
        return compute_score(**{name: value for name, value in arguments.items() if variadic or name in named})

    # The arguments that are required of the data are named; the rest comes where there is such a column.
    def reward(
        *, completions: Sequence[str], data_source: Sequence[Any], reward_model: Sequence[Any], extra_info: Any = None
    ) -> list[Any]:
        columns = {"completions": completions, "data_source": data_source, "reward_model": reward_model}
        return [_score(ask(each)) for each in calls({**columns, "extra_info": extra_info})]

    async def reward_of_coroutines(
        *, completions: Sequence[str], data_source: Sequence[Any], reward_model: Sequence[Any], extra_info: Any = None
    ) -> list[Any]:
        columns = {"completions": completions, "data_source": data_source, "reward_model": reward_model}
        awaited = await asyncio.gather(*(ask(each) for each in calls({**columns, "extra_info": extra_info})))
        return [_score(each) for each in awaited]

    made: Callable[..., Any] = reward_of_coroutines if inspect.iscoroutinefunction(compute_score) else reward
    made.__qualname__ = made.__name__ = str(getattr(compute_score, "__qualname__", "compute_score"))
    return takes_text(made)


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
