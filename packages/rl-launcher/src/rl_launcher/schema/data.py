"""The sections `data`, `env` and `evaluation`: what is trained on, what gives rewards, how the result is measured."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rl_algorithms.chat import PromptFormat
from rl_launcher.schema.strict import STRICT, refuse_below

__all__ = ["DataConfig", "EnvironmentConfig", "EvaluationConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data set, of which a part is held out for evaluation."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    source: str
    """A .jsonl, .json or .parquet file, a folder saved by `datasets`, a data set id on the Hub, or a function
    `package.module:name` or `file.py:name` that returns a `rl_algorithms.data.Dataset`. Rows have a `prompt` and
    optionally an `answer` and other columns. If sft is the only stage, rows may be conversations: `messages`,
    `conversations`, or `prompt` and `completion`. With `dpo.pairs=data` rows are pairs: `prompt`, `chosen`,
    `rejected`."""

    split: str | None = None
    """Split of a data set, such as `train` or `train[:1000]`; required if it has several."""

    name: str | None = None
    """Configuration of a data set on the Hub, if it has several."""

    revision: str | None = None
    """Branch, tag or commit of a data set on the Hub. Pin it to make the run repeatable."""

    columns: dict[str, str] = field(default_factory=dict)
    """Our column names mapped to those of the data, as in `{prompt: question, answer: reward_model.ground_truth}`. The
    data's columns stay available under their own names."""

    on_bad_row: Literal["stop", "skip"] = "stop"
    """What to do with a row that cannot be read or is too long for the model. `skip` leaves it out of all stages, and
    reports how many rows were skipped and why the first one was. Bad rows of a function are always refused."""

    held_out_share: float | None = None
    """Share of the prompts that is never trained on; null is 0.1. A function holds out its own rows."""

    prompt_format: PromptFormat = "chat"
    """`chat` renders prompts with the tokenizer's chat template; `plain` takes the text as it is."""

    def __post_init__(self) -> None:
        if self.held_out_share is not None and not 0.0 < self.held_out_share < 1.0:
            raise ValueError(f"held_out_share={self.held_out_share} must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What gives a response its reward."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    reward: str | None = None
    """`package.module:function` or `file.py:function`. It is called with keyword lists, `prompts`, `completions` and
    every column of the data, and returns one number for each response."""

    rewards: dict[str, str] = field(default_factory=dict)
    """Several such functions by name, instead of `reward`. Their weighted sum is the reward, and each is logged."""

    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each of `rewards` in the sum; 1 for those not named, and 0 logs a reward without using it. If each
    reward is normalized separately, `grpo.objective.advantage.reward_weights` weights the normalized ones."""

    environment: str | None = None
    """`package.module:name` or `file.py:name` of a class or function that makes a multi-turn environment: a
    `rl_algorithms.contracts.Environment`, or an episode as in `rl_algorithms.environments.games`. Instead of a reward;
    `grpo.max_turns` bounds the number of responses."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `environment`."""

    timeout_s: float | None = None
    """Deadline in seconds for one call of a reward function, or for an environment's reply to one response. A call that
    misses it is handled as `on_error` says; other rollouts are not affected. Null takes the default: 300 for reward
    functions, 60 for environments."""

    on_error: Literal["stop", "zero", "fail"] = "stop"
    """What to do with a response for which the function raises or returns NaN. `stop` ends the run; `zero` gives it
    the reward 0; `fail` leaves it out of training and of every baseline. The last two log how many there were."""

    def __post_init__(self) -> None:
        given = [name for name in ("reward", "rewards", "environment") if getattr(self, name)]
        if len(given) != 1:
            found = ", ".join(f"{name}={getattr(self, name)}" for name in given) or "none of them"
            raise ValueError(
                f"{found}: a response gets its reward from one of `reward`, a function, `rewards`, several by name, "
                f"and `environment`, of several turns; give one, and set the others to null or {{}}"
            )
        if self.environment is None and self.options:
            raise ValueError("options are the arguments of an environment, and env.environment names none")
        refuse_below(self, above={"timeout_s": 0})
        if unknown := sorted(set(self.weights) - set(self.rewards)):
            raise ValueError(
                f"weights names {', '.join(unknown)}, and the rewards are {', '.join(self.rewards) or 'not named'}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the policy is measured on held-out prompts."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    every: int = 0
    """Optimizer steps between evaluations during training; 0 evaluates before and after training only."""

    max_prompts: int = 1000
    """Number of held-out prompts before and after training, at most."""

    max_prompts_while_training: int = 256
    """Number of held-out prompts during training, at most; they are decoded greedily. `held_out_loss` uses as many
    demonstrations, the same ones before, during and after."""

    samples_per_prompt: int = 1
    """Sampled responses to each held-out prompt, before and after. More narrow the interval and allow pass@k."""

    pass_at: tuple[int, ...] = (1,)
    """The values of k for pass@k, the chance that one of k sampled responses passes; at most `samples_per_prompt`."""

    pass_reward: float = 1.0
    """Reward at or above which a response passes."""

    samples: int = 12
    """Held-out responses, before and after, that are kept for the report."""

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
