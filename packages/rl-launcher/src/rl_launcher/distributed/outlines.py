"""A model as the driver of a run on Ray sees it: configuration and tokenizer. Its weights are the ranks' affair.

Only what a function makes is made whole, here and once, and written where all ranks find it.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_backends import check_vocabulary, load_tokenizer, open_model
from rl_launcher.loading_policy import NamedModel, load_model
from rl_launcher.user_code import is_import_string

__all__ = ["Outline", "outline_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """Of one model."""

    name: str
    """Under which the ranks load it: a folder, or a hub id."""

    revision: str | None
    """Of a hub id."""

    model: Any
    """With its configurations; its weights may be on the meta device."""

    tokenizer: Any


def outline_of(named: NamedModel, *, seed: int, key: str, padded_vocabulary: bool, folder: Path) -> Outline:
    """Look at the model that a recipe names under `key`.

    Args:
        named: the recipe's section.
        seed: of the weights of a model that a function makes.
        key: of the recipe, for errors.
        padded_vocabulary: accept more embeddings than tokens.
        folder: where a model that a function makes is written to; what an earlier start left there is replaced.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer is of another vocabulary.
    """
    model: Any
    if is_import_string(named.model_name):
        model, tokenizer = load_model(named, seed=seed, key=key, padded_vocabulary=padded_vocabulary)
        _write(model, tokenizer, folder)
        return Outline(name=str(folder.absolute()), revision=None, model=model, tokenizer=tokenizer)
    origin, trust = named.revision, named.trust_remote_code
    tokenizer = load_tokenizer(named.model_name, revision=origin, trust_remote_code=trust)
    model = open_model(named.model_name, revision=origin, trust_remote_code=trust).skeleton()
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    path = Path(named.model_name).expanduser()
    name = str(path.absolute()) if path.is_dir() else named.model_name
    return Outline(name=name, revision=named.revision, model=model, tokenizer=tokenizer)


def _write(model: Any, tokenizer: Any, folder: Path) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    for old in (unfinished, folder):
        shutil.rmtree(old, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(folder)
