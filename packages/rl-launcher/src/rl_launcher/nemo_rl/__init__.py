"""Recipes of NeMo-RL as ours: what translates, what does not and why, and what means nothing here.

It reads their YAML and knows their keys; it imports nothing of theirs.
"""

from rl_launcher.nemo_rl.notes import Note
from rl_launcher.nemo_rl.reading import NemoRLError
from rl_launcher.nemo_rl.translation import Translation, translate

__all__ = ["NemoRLError", "Note", "Translation", "translate"]
