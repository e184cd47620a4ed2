"""The configuration of a data set: where its rows are, what their columns are called, how many are held out.

`read_configured` reads it.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from rl_algorithms.chat import PromptFormat
from rl_algorithms.choices import check_fields
from rl_algorithms.data.datasets import Dataset, Form, MixedSource, RowSource, are_conversations, load_dataset
from rl_algorithms.data.reading import PromptTemplate, SkippedRows
from rl_algorithms.data.sources import Source
from rl_algorithms.rows import DataError

__all__ = ["DataConfig", "read_configured"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data set, of which a part is held out for evaluation."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    source: str
    """A .jsonl, .json, .csv, .parquet or .arrow file, a pattern of them (`shards/*.jsonl.gz`), a folder saved by
    `datasets`, a data set id on the Hub, or a function
    `package.module:name` or `file.py:name` that returns a `rl_algorithms.data.Dataset`. Rows have a `prompt` and
    optionally an `answer` and other columns. If sft is the only stage, rows may be conversations: `messages`,
    `conversations`, or `prompt` and `completion`. For orpo, reward_model and `dpo.pairs=data` rows are pairs: `prompt`,
    `chosen`, `rejected`; for kto they are `prompt`, `completion` and `label`, true or false."""

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

    held_out: str | None = None
    """A validation set apart from the training data, as `source`; instead of `held_out_share`."""

    held_out_split: str | None = None
    """Its split; without `held_out`, a split of `source` itself, such as `test`."""

    mix: dict[str, str] = field(default_factory=dict)
    """Further sets to learn from: a name of yours, mapped to what `source` may be. Columns as in `columns`."""

    mix_splits: dict[str, str] = field(default_factory=dict)
    """The split of a set of `mix`, by its name."""

    mix_weights: dict[str, float] = field(default_factory=dict)
    """How often a row is drawn from a set of `mix`, by its name, and from `source` itself under the name `source`; 1
    for those not named."""

    system_prompt: str | None = None
    """System message put before every prompt that has none of its own."""

    prompt_template: str | None = None
    """Text that every prompt is put into, with `{prompt}` and other columns in braces."""

    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template's own, such as `{enable_thinking: false}`."""

    prompt_format: PromptFormat = "chat"
    """`chat` renders prompts with the tokenizer's chat template; `plain` takes the text as it is."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.held_out_share is not None and (self.held_out or self.held_out_split):
            raise ValueError(
                f"held_out_share={self.held_out_share} cuts a part of the training data, and held_out names rows apart "
                f"from it; set one of them"
            )
        for field_name, known in (("mix_splits", [*self.mix]), ("mix_weights", ["source", *self.mix])):
            if unknown := sorted(set(getattr(self, field_name)) - set(known)):
                raise ValueError(
                    f"{field_name} names {', '.join(unknown)}, and the sets are {', '.join(known) or 'none'}"
                )
        for name, weight in self.mix_weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"mix_weights.{name}={weight} must be finite and > 0; leave out what is not wanted")
        if "source" in self.mix:
            raise ValueError("mix has a set named source, which is what data.source is called in mix_weights")
        if self.prompt_format == "plain" and self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs are for a chat template, and prompt_format=plain has none")
        self.prompts  # noqa: B018 - refuses a template that cannot be one
        if self.held_out_share is not None and not 0.0 < self.held_out_share < 1.0:
            raise ValueError(f"held_out_share={self.held_out_share} must be between 0 and 1")

    @property
    def prompts(self) -> PromptTemplate | None:
        """What every prompt is put into."""
        if self.system_prompt is None and self.prompt_template is None:
            return None
        return PromptTemplate(system_prompt=self.system_prompt, prompt_template=self.prompt_template)

    @property
    def mixed(self) -> dict[str, MixedSource]:
        """The sets of `mix` with their splits and weights."""
        return {
            name: MixedSource(
                source=source,
                split=self.mix_splits.get(name),
                weight=self.mix_weights.get(name, 1.0),
                columns=self.columns,
            )
            for name, source in self.mix.items()
        }

    @property
    def held_out_rows(self) -> Source | None:
        """Where the validation set is, if it is apart from `source`."""
        if self.held_out is not None:
            return Source(path=self.held_out, split=self.held_out_split)
        return None if self.held_out_split is None else replace(self.rows, split=self.held_out_split)

    @property
    def rows(self) -> Source:
        """Where the rows are, if `source` names no function."""
        return Source(path=self.source, split=self.split, name=self.name, revision=self.revision)


def read_configured(
    config: DataConfig,
    *,
    rows: RowSource | None = None,
    held_out: RowSource | None = None,
    form: Form | None = None,
    imitates: bool = False,
    sampled_by: str | None = None,
    seed: int = 0,
    skipped: SkippedRows,
) -> Dataset:
    """Read a data set as `config` says, in the form that training needs.

    Args:
        config: of the data.
        rows: instead of those that `config` names.
        held_out: rows to hold out, instead of those that `config` names and of `config.held_out_share`.
        form: of the rows; None reads prompts, or conversations if nothing is sampled and the first row is one.
        imitates: whether SFT trains on the data.
        sampled_by: the stage that samples responses to the prompts, which conversations are not for.
        seed: which prompts are held out.
        skipped: filled with the rows that were left out, if `config.on_bad_row` is skip.

    Raises:
        DataError: the data cannot be read, or a row is bad; the message names file, line and field.
        ImportError: reading needs the extra `rl-algorithms[data]`.
    """
    source = config.rows if rows is None else rows
    held_out = config.held_out_rows if held_out is None else held_out
    if form is None and sampled_by is None:
        found = are_conversations(source, columns=config.columns)
        # Where no row can be read, SFT reads them as conversations, whose refusal says more.
        form = "conversations" if found or (found is None and imitates) else "prompts"
    try:
        return load_dataset(
            source,
            form=form or "prompts",
            columns=config.columns,
            held_out=held_out,
            held_out_share=config.held_out_share,
            seed=seed,
            imitate_chosen=imitates,
            skipped=skipped if config.on_bad_row == "skip" else None,
            prompts=config.prompts,
            mix=config.mixed,
            weight=config.mix_weights.get("source", 1.0),
        )
    except DataError as error:
        if sampled_by is not None and are_conversations(source, columns=config.columns):
            raise DataError(
                f"{error}; {sampled_by} samples responses to prompts, and conversations are for a recipe whose only "
                f"stage is sft: give rows with a prompt, or set {sampled_by}=null"
            ) from error
        raise
