"""From prompts to judged rollouts.

driver              one or several turns between engine and environment
batches             one batch of a loop that samples and trains in turn, and the seeds of its episodes
dynamic_sampling    more prompts until enough groups have a signal
episode, checks     one conversation as it grows; what engine and environment may not return
"""

from rl_algorithms.collecting.batches import collect_batch, require_some_judged, ticket_seeds
from rl_algorithms.collecting.driver import collect
from rl_algorithms.collecting.dynamic_sampling import collect_with_signal
from rl_algorithms.collecting.seeds import episode_seed

__all__ = ["collect", "collect_batch", "collect_with_signal", "episode_seed", "require_some_judged", "ticket_seeds"]
