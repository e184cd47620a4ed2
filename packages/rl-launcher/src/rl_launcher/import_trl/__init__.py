"""Translate TRL's configurations, commands and example scripts into recipes.

`read.py` finds the keys in a file, without running it; `translate.py` makes a recipe of them.
"""

from rl_launcher.import_trl.read import TRLError as TRLError
from rl_launcher.import_trl.translate import translate as translate

__all__ = ["TRLError", "translate"]
