"""What a run cannot be, found out before any model is loaded or any process is started: files, mesh, memory, disk.

Every check is sure of what it refuses: where only a guess is possible (a hub that does not answer, GPUs of another
machine), nothing is refused, and `explain` says what is not known.
"""

from rl_launcher.distributed.placement import plan_placement
from rl_launcher.preflight.disk import check_disk
from rl_launcher.preflight.files import check_files, taken
from rl_launcher.preflight.memory import check_memory, lacking_memory
from rl_launcher.preflight.models import known_policy
from rl_launcher.preflight.prompts import check_prompt_format, check_rows
from rl_launcher.recipe_schema import Recipe

__all__ = ["check", "check_rows", "explained", "taken"]


def check(recipe: Recipe, *, new_run: bool) -> None:
    """Refuse what `recipe` asks for in vain; seconds, whatever the size of the model.

    Args:
        recipe: valid by itself.
        new_run: a run directory will be made: it must not be there, and its disk must have room.

    Raises:
        ValueError: the first reason, with the key and what to do.
    """
    check_files(recipe, new_run=new_run)
    placement = plan_placement(recipe)
    model = known_policy(recipe.policy)
    if model is None:
        return
    check_memory(recipe, model=model, placement=placement)
    check_prompt_format(recipe)
    if new_run:
        check_disk(recipe, model=model)


def explained(recipe: Recipe) -> str | None:
    """As `check` of a run that is not begun, for who wants to see why: what `check_memory` refuses is returned.

    Raises:
        ValueError: any other reason.
    """
    check_files(recipe, new_run=False)
    placement = plan_placement(recipe)
    model = known_policy(recipe.policy)
    if model is None:
        return None
    check_prompt_format(recipe)
    return lacking_memory(recipe, model=model, placement=placement)
