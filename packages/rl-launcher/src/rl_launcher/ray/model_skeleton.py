"""The model of a recipe as the driver needs it: configuration and tokenizer, and a name that all ranks can load.

A model that a Python function makes, or that was given as an object, is saved here where every rank finds it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_backends import check_vocabulary, load_tokenizer, open_model
from rl_backends.checkpoints.atomic import atomic_folder
from rl_launcher.load_model import NamedModel, load_model
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSkeleton:
    """A model without the need for its weights."""

    name: str
    """What the ranks load: a folder, or a hub id."""
    revision: str | None
    """Of a hub id."""
    model: Any
    """With its configurations; its weights may be on the meta device."""
    tokenizer: Any


def read_skeleton(
    named: NamedModel,
    *,
    seed: int,
    key: str,
    padded_vocabulary: bool,
    folder: Path,
    objects: Objects = NO_OBJECTS,
) -> ModelSkeleton:
    """Read the model that a section of the recipe names; `key` is for errors.

    A model that a function makes (from `seed`), or that is given as an object, is saved in `folder` for the ranks; what
    an earlier start left there is replaced. `padded_vocabulary` accepts more embeddings than tokens.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer has another vocabulary.
    """
    model: Any
    if objects.model is not None or is_import_string(named.model_name):
        model, tokenizer = load_model(named, seed=seed, key=key, padded_vocabulary=padded_vocabulary, objects=objects)
        with atomic_folder(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        return ModelSkeleton(name=str(folder.absolute()), revision=None, model=model, tokenizer=tokenizer)
    options: dict[str, Any] = {"revision": named.revision, "trust_remote_code": named.trust_remote_code}
    tokenizer = objects.tokenizer
    if tokenizer is None:  # an object may be falsy: a tokenizer has a length
        tokenizer = load_tokenizer(named.model_name, **options)
    model = open_model(named.model_name, **options).skeleton()
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    path = Path(named.model_name).expanduser()
    name = str(path.absolute()) if path.is_dir() else named.model_name
    return ModelSkeleton(name=name, revision=named.revision, model=model, tokenizer=tokenizer)
