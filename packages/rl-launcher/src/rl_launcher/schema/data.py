"""What is learnt from, what judges answers, and how the result is measured."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rl_algorithms.chat import PromptFormat
from rl_launcher.schema.strict import STRICT, refuse_below

__all__ = ["DataConfig", "EnvironmentConfig", "EvaluationConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is learnt from, and what the result is judged by."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    source: str
    """Rows with a `prompt` and, if you like, an `answer` and other columns: a .jsonl, .json or .parquet file, a folder
    of `datasets`, or the id of a data set on the hub; or `package.module:function` or `file.py:function` that returns a
    `rl_algorithms.data.Dataset`. Where sft is the only stage, rows may be conversations: `messages`, `conversations`,
    or `prompt` and `completion`. With `dpo.pairs=data` they are pairs: `prompt`, `chosen` and `rejected`."""

    split: str | None = None
    """Which split of a data set, as `train` or `train[:1000]`; needed where there are several."""

    name: str | None = None
    """Which configuration of a data set on the hub, where there are several."""

    revision: str | None = None
    """Branch, tag or commit of a data set on the hub; pin it to make the run repeatable."""

    columns: dict[str, str] = field(default_factory=dict)
    """Our name -> the data's, as in `{prompt: question, answer: reward_model.ground_truth}`. The data's columns stay,
    under their own names, too."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """What happens to a row that cannot be read, or is too long for the model. `skip` leaves it out of all stages, says
    how many there were, and why the first. Rows of a function are its own affair, and refused in any case."""

    held_out_share: float | None = None
    """Share of the prompts that is never trained on; 0.1 when not given. A function holds out its own."""

    prompt_format: PromptFormat = "chat"
    """`chat` renders prompts with the tokenizer's chat template; `plain` takes their text as it is."""

    def __post_init__(self) -> None:
        if self.held_out_share is not None and not 0.0 < self.held_out_share < 1.0:
            raise ValueError(f"held_out_share={self.held_out_share} must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What judges an answer."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    reward: str | None = None
    """`package.module:function` or `file.py:function`, called with keyword lists: `prompts`, `completions` and every
    column of the data; returns one number per answer."""

    rewards: dict[str, str] = field(default_factory=dict)
    """Several such functions by name, instead: their weighted sum is the reward, and each is logged."""

    weights: dict[str, float] = field(default_factory=dict)
    """What each of `rewards` counts; 1 for those not named, and 0 measures without rewarding. Where each is normalised
    by itself, `grpo.objective.advantage.reward_weights` weighs what comes out."""

    environment: str | None = None
    """`package.module:name` or `file.py:name` of a class or function that makes an environment of several turns: a
    `rl_algorithms.contracts.Environment`, or an episode as of `rl_algorithms.environments.games`. In the place of a
    reward; `grpo.max_turns` says how many answers."""

    options: dict[str, Any] = field(default_factory=dict)
    """What `environment` is called with, by name."""

    timeout_s: float | None = None
    """Seconds after which a call counts as failed: of a reward function on one batch (null is 300), or of one
    conversation's environment on one response (null is 60). An `environment` that scores whole batches has none."""

    on_error: Literal["stop", "zero", "fail"] = "stop"
    """What happens to an answer that the function raises on or returns NaN for. `stop` stops; `zero` counts it as 0,
    `fail` leaves it out of training and of every baseline, and both say how many."""

    def __post_init__(self) -> None:
        given = [name for name in ("reward", "rewards", "environment") if getattr(self, name)]
        if len(given) != 1:
            said = ", ".join(f"{name}={getattr(self, name)}" for name in given) or "none of them"
            raise ValueError(
                f"{said}: an answer is judged by one of `reward`, a function, `rewards`, several by name, and "
                f"`environment`, of several turns; give one, and set the others to null or {{}}"
            )
        if self.environment is None and self.options:
            raise ValueError("options are what an environment is made with, and env.environment names none")
        refuse_below(self, above={"timeout_s": 0})
        if unknown := sorted(set(self.weights) - set(self.rewards)):
            raise ValueError(
                f"weights names {', '.join(unknown)}, and the rewards are {', '.join(self.rewards) or 'not named'}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the held-out prompts are used."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    every: int = 0
    """Optimizer steps between evaluations while training; 0 evaluates before and after only."""

    max_prompts: int = 1000
    """At most so many held-out prompts before and after training."""

    max_prompts_while_training: int = 256
    """At most so many while training, with greedy answers only. `held_out_loss` is of as many demonstrations, the same
    ones before, while and after."""

    samples_per_prompt: int = 1
    """Sampled answers to each held-out prompt, before and after. More narrow the interval, and allow pass@k."""

    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k, none beyond `samples_per_prompt`: does one of k sampled answers pass?"""

    pass_reward: float = 1.0
    """The reward from which on an answer passes."""

    samples: int = 12
    """Held-out answers that are kept, before and after, for the report."""

    def __post_init__(self) -> None:
        at_least = {
            "every": 0,
            "samples": 0,
            "max_prompts": 1,
            "max_prompts_while_training": 1,
            "samples_per_prompt": 1,
        }
        refuse_below(self, at_least=at_least)
        if beyond := [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]:
            raise ValueError(
                f"pass_at={list(self.pass_at)} has {beyond[0]}, and each k must be from 1 to samples_per_prompt="
                f"{self.samples_per_prompt}"
            )
