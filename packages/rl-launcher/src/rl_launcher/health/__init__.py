"""What may go wrong in a run, by name: noticed, reacted to as stated, and told. Nothing here trains or saves."""

from rl_launcher.health.conditions import CONDITIONS, Condition, conditions_table, is_disk_full, name_of, reaction_to
from rl_launcher.health.happenings import Happening, Happenings
from rl_launcher.health.reporting import Reporter, count_events
from rl_launcher.health.watching import Watch

__all__ = [
    "CONDITIONS",
    "Condition",
    "Happening",
    "Happenings",
    "Reporter",
    "Watch",
    "conditions_table",
    "count_events",
    "is_disk_full",
    "name_of",
    "reaction_to",
]
