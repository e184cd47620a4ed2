"""What a run looks like while it runs: a panel on a terminal, aligned lines elsewhere."""

from rl_launcher.observe.live.progress import StageTotal
from rl_launcher.observe.live.view import LiveView

__all__ = ["LiveView", "StageTotal"]
