"""Recipes of NeMo-RL as ours: what translates, what does not and why, and what means nothing here.

It reads their YAML and knows their keys; it imports nothing of theirs.
"""

from rl_launcher.import_nemo_rl.read import NemoRLError, Note
from rl_launcher.import_nemo_rl.translate import Translation, translate

__all__ = ["NemoRLError", "Note", "Translation", "translate"]
