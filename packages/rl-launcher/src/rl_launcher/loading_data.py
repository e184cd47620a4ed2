"""The data that a recipe names, read and cut before any model is loaded. Knows no tokenizer.

A function returns a `Dataset` that it has cut itself; whatever else `rl_algorithms.data` reads is cut here. Rows are
prompts; conversations, where sft is all that learns; or pairs, where dpo takes given ones.
"""

from typing import TypeVar

from rl_algorithms.data import (
    ConversationRow,
    DataError,
    Dataset,
    PreferenceRow,
    Row,
    SkippedRows,
    Source,
    read_rows,
    split_held_out,
    stream_rows,
)
from rl_launcher.errors import LauncherError
from rl_launcher.loading_conversations import cut_conversations, held_out_demonstrations
from rl_launcher.loading_preferences import cut_preferences
from rl_launcher.recipe_schema import HEADLINES, HOW_TO_JUDGE, DataConfig, Recipe
from rl_launcher.user_code import call, is_import_string

__all__ = ["columns_of", "load_dataset"]

RowT = TypeVar("RowT", Row, ConversationRow, PreferenceRow)

HELD_OUT_SHARE = 0.1


def load_dataset(recipe: Recipe) -> tuple[Dataset, SkippedRows]:
    """The data set that `data.source` names, as the recipe's stages need it, and which of its rows were left out.

    Raises:
        DataError: it cannot be read, or one of its rows is bad; the message names file, line and field.
        LauncherError: the function is none, or fails; a package is missing that reads the format; or nothing that is
            held out could measure the run.
    """
    dataset, skipped = _load(recipe)
    if recipe.env is None and [*recipe.stages] == ["sft"] and not held_out_demonstrations(dataset):
        raise LauncherError(
            f"env is missing, and no held-out row of data.source={recipe.data.source} has an answer that counts, so "
            f"that nothing would be measured; give them answers, or {HOW_TO_JUDGE}"
        )
    return dataset, skipped


def columns_of(dataset: Dataset) -> set[str]:
    """Of the rows that are learnt from: what a reward may ask for."""
    return {name for row in dataset.train or dataset.demonstrations for name in row.columns}


def _load(recipe: Recipe) -> tuple[Dataset, SkippedRows]:
    config = recipe.data
    share = config.held_out_share or HELD_OUT_SHARE
    if recipe.dpo is not None and recipe.dpo.pairs == "data":
        if is_import_string(config.source):
            raise LauncherError(
                f"dpo.pairs=data reads columns chosen and rejected, and data.source={config.source} is a function, "
                f"which returns prompts; name a file or a data set, or say dpo.pairs=sampled"
            )
        pairs, skipped = _read(config, kind=PreferenceRow)
        return cut_preferences(pairs, share=share, seed=recipe.seed, imitate=recipe.sft is not None), skipped
    if is_import_string(config.source):
        return _made_by_function(config), SkippedRows()
    asking = [name for name in HEADLINES if name in recipe.stages]
    if not asking and _are_conversations(config, unreadable=recipe.sft is not None):
        conversations, skipped = _read(config, kind=ConversationRow)
        return cut_conversations(conversations, share=share, seed=recipe.seed), skipped
    try:
        rows, skipped = _read(config, kind=Row)
    except DataError as error:
        if asking and _are_conversations(config, unreadable=False):
            raise DataError(
                f"{error}; {asking[0]} asks prompts, and conversations are for a recipe whose only stage is sft: give "
                f"rows with a prompt, or set {asking[0]}=null"
            ) from error
        raise
    train, held_out = split_held_out(rows, share=share, seed=recipe.seed)
    return Dataset(train=train, held_out=held_out, demonstrations=train), skipped


def _read(config: DataConfig, *, kind: type[RowT]) -> tuple[list[RowT], SkippedRows]:
    skipped = SkippedRows()
    report = skipped if config.on_bad_row == "skip" else None
    try:
        return read_rows(_source(config), kind=kind, columns=config.columns, skipped=report), skipped
    except ImportError as error:
        raise LauncherError(f"data.source={error}") from error


def _source(config: DataConfig) -> Source:
    return Source(path=config.source, split=config.split, name=config.name, revision=config.revision)


def _are_conversations(config: DataConfig, *, unreadable: bool) -> bool:
    """Whether the first good row says more than a prompt and its answer; `unreadable` where there is none.

    Then whoever reads the rows says what is wrong with them, and that is who will say most.
    """
    if {"prompt", "answer"} <= config.columns.keys():
        return False
    try:
        rows = stream_rows(_source(config), kind=ConversationRow, columns=config.columns, skipped=SkippedRows())
        first = next(rows)
    except (DataError, ImportError):
        return unreadable
    given = {name for name, value in first.columns.items() if value is not None}
    return bool(given & {"messages", "conversations"}) or {"prompt", "completion"} <= given or "prompt" not in given


def _made_by_function(config: DataConfig) -> Dataset:
    for name, unset in (
        ("held_out_share", None),
        ("columns", {}),
        ("on_bad_row", "stop"),
        ("split", None),
        ("name", None),
        ("revision", None),
    ):
        if (value := getattr(config, name)) != unset:
            raise LauncherError(
                f"data.{name}={value} is for rows that are read from a file or a data set, and data.source="
                f"{config.source} is a function, which reads, checks and holds out its own; leave data.{name} out"
            )
    dataset = call(config.source, wanted="a function that returns a Dataset (data.source)")
    if not isinstance(dataset, Dataset):
        raise LauncherError(
            f"data.source={config.source} returned {type(dataset).__name__}, and must return a "
            f"rl_algorithms.data.Dataset"
        )
    return dataset
