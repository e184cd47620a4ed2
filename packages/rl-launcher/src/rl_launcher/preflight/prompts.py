"""Whether the tokenizer can render the prompts, and the rows have what the reward asks for. Loads no weights.

Knows no hub: a tokenizer or rows that cannot be had from there are left to the run.
"""

from pathlib import Path

from rl_backends import ModelError, load_tokenizer
from rl_launcher.environments import load_environment
from rl_launcher.errors import LauncherError
from rl_launcher.loading_data import columns_of, load_dataset
from rl_launcher.recipe_schema import Recipe
from rl_launcher.user_code import is_import_string

__all__ = ["check_prompt_format", "check_rows"]


def check_prompt_format(recipe: Recipe) -> None:
    """Refuse chat with a tokenizer that has no chat template; one that a function makes is not asked for.

    Raises:
        LauncherError: naming both keys.
    """
    policy = recipe.policy
    if recipe.data.prompt_format != "chat" or is_import_string(policy.model_name):
        return
    try:
        tokenizer = load_tokenizer(
            policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code
        )
    except ModelError:
        return  # a folder of a configuration alone can be explained; loading says what it lacks
    if not tokenizer.chat_template:
        raise LauncherError(
            f"data.prompt_format=chat needs a tokenizer with a chat template, and that of policy.model_name="
            f"{policy.model_name} has none; say data.prompt_format=plain (text as it is, no roles), or give the "
            f"tokenizer a template"
        )


def check_rows(recipe: Recipe) -> None:
    """Read the rows that lie on this machine, and refuse bad ones, and a reward that asks for a column they lack.

    An environment of several turns is not made: it asks nothing of the rows before an episode begins.

    Raises:
        ValueError: naming file, line and field; or the reward's argument, and the columns that there are.
    """
    source = recipe.data.source
    if not is_import_string(source) and not Path(source).expanduser().exists():
        return
    judge = None if recipe.env is None or recipe.env.environment is not None else load_environment(recipe.env)
    dataset, _ = load_dataset(recipe)
    if judge is not None:
        judge.check(columns_of(dataset))
