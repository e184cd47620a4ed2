"""What a refit will move, in words and figures, before it moves anything; `python -m rl_refit explain` asks for it.

Knows plans and the headers of checkpoints; reads no weights and starts no process.
"""

from __future__ import annotations

from rl_refit.explain.text import explain_plan

__all__ = ["explain_plan"]
