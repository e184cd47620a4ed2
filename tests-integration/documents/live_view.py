"""What the line of the live view needs; the page's earlier run of the same name is laid aside."""

from pathlib import Path

from rl_observe import RunLog
from rl_observe.live import LiveView, StageTotal

Path("runs/sine").rename("runs/wider")
