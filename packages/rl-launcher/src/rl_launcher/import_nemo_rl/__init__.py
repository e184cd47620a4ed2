"""Translate NeMo-RL recipes into ours: what translates, what does not and why, and what has no effect here.

`key_map.yaml` lists the keys that need no rule. NeMo-RL itself is not imported.
"""

from rl_launcher.import_nemo_rl.read import NemoRLError, Note
from rl_launcher.import_nemo_rl.translate import Translation, translate

__all__ = ["NemoRLError", "Note", "Translation", "translate"]
