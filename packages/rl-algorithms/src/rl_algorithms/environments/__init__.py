"""Environments: what judges answers. Each module says what it needs; importing this package costs torch and no more.

scores, reward_function    reward functions of TRL's signature, one or several, as an environment
answers, matching, math    the final answer out of a text; exact, normalised, multiple choice; math-verify
sandbox, code              Python programs under limits; answers judged by tests
runners                    the same behind a real boundary: bubblewrap, a sandbox service
judges                     an engine, or a reward model, as the judge
verl                       `compute_score` functions
episodes, asynchronous     one object for one conversation, plain or async, many at once, each call with a deadline
executor                   what makes these calls
factory                    an environment from the class or function that makes one, whichever kind it is
counted_environment        one that counts its failed conversations
tools                      Python functions that the policy calls
games                      two small ones of several turns
adapters                   gymnasium, OpenEnv, verifiers, TRL
"""

from rl_algorithms.environments.asynchronous import ConcurrentEnvironment, ConcurrentResettingEnvironment
from rl_algorithms.environments.counted_environment import CountedEnvironment, counted
from rl_algorithms.environments.episodes import Episode, EpisodeEnvironment, EpisodeError
from rl_algorithms.environments.factory import EnvironmentFactoryError, environment_from
from rl_algorithms.environments.games import GuessNumber, Recall
from rl_algorithms.environments.reward_function import RewardError, RewardFunctionEnvironment, RewardTimeoutError
from rl_algorithms.environments.scores import Score
from rl_algorithms.environments.tools import ToolEnvironment, ToolError

__all__ = [
    "ConcurrentEnvironment",
    "ConcurrentResettingEnvironment",
    "CountedEnvironment",
    "EnvironmentFactoryError",
    "Episode",
    "EpisodeEnvironment",
    "EpisodeError",
    "GuessNumber",
    "Recall",
    "RewardError",
    "RewardFunctionEnvironment",
    "RewardTimeoutError",
    "Score",
    "ToolEnvironment",
    "ToolError",
    "counted",
    "environment_from",
]
