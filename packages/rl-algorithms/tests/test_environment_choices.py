"""A claim about choices: outside of tests, where nothing checks types, a misspelt one is refused by name."""

import subprocess
import sys
import textwrap

PROGRAM = """
    from rl_algorithms.chat import Chat
    from rl_algorithms.data import read_rows, stream_rows
    from rl_algorithms.environments import (
        ConcurrentEnvironment, ConcurrentResettingEnvironment, EpisodeEnvironment, GuessNumber,
        RewardFunctionEnvironment, ToolEnvironment,
    )
    from rl_algorithms.environments.code import CodeTests
    from rl_algorithms.environments.judges import EngineJudge
    from rl_algorithms.environments.sandbox import Limits
    from rl_algorithms.environments.tool_calls import parse_tool_calls

    class Later:
        async def step(self, conversation): ...

    def tool() -> str:
        "Do nothing."

    reward = RewardFunctionEnvironment(reward=lambda completions: completions)
    for wrong in (
        lambda: EpisodeEnvironment(GuessNumber, on_error="zero"),
        lambda: ConcurrentEnvironment(Later(), on_error="Stop"),
        lambda: ConcurrentResettingEnvironment(Later(), on_error="Stop"),
        lambda: ToolEnvironment([tool], reward=reward, on_tool_error="stop"),
        lambda: ToolEnvironment([tool], reward=reward, call_format="xml"),
        lambda: parse_tool_calls("", call_format="xml"),
        lambda: RewardFunctionEnvironment(reward=lambda completions: completions, on_error="Zero"),
        lambda: EngineJudge(engine=None, sampling=None, chat=None, on_unreadable="zero"),
        lambda: Limits(network="off"),
        lambda: Limits(open_files=2.5),
        lambda: CodeTests(num_workers=1.5),
        lambda: read_rows([], kind=dict),
        lambda: stream_rows([], kind="Row"),
    ):
        try:
            wrong()
        except ValueError as refused:
            print(refused)
"""

REFUSED = """\
on_error='zero' is not one of 'stop', 'fail'
on_error='Stop' is not one of 'stop', 'fail'; did you mean 'stop'?
on_error='Stop' is not one of 'stop', 'fail'; did you mean 'stop'?
on_tool_error='stop' is not one of 'tell', 'fail'
call_format='xml' is not one of 'hermes', 'fenced'
call_format='xml' is not one of 'hermes', 'fenced'
on_error='Zero' is not one of 'stop', 'zero', 'fail'; did you mean 'zero'?
on_unreadable='zero' is not one of 'fail', 'stop'
network='off' is not one of 'auto', 'none', 'host'
open_files=2.5 must be a whole number
num_workers=1.5 must be a whole number
kind=<class 'dict'> is not one of Row, ConversationRow, PreferenceRow, LabelledRow
kind='Row' is not one of Row, ConversationRow, PreferenceRow, LabelledRow
"""


def test_a_choice_that_is_none_is_refused_by_name():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(PROGRAM)], capture_output=True, text=True, check=True)
    assert done.stdout == REFUSED
