"""Hypothesis without a clock: no timing decides a test. And the path of the simulator, a tool of the repository."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parents[3] / "docs" / "tools"))

settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")
