"""The configuration of a data set: where its rows are, what their columns are called, how many are held out."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rl_algorithms.chat import PromptFormat
from rl_algorithms.data.sources import Source

__all__ = ["DataConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data set, of which a part is held out for evaluation."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

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

    @property
    def rows(self) -> Source:
        """Where the rows are, if `source` names no function."""
        return Source(path=self.source, split=self.split, name=self.name, revision=self.revision)
