"""Claims about reward functions: how they are called, and what becomes of those that fail."""

import asyncio
import contextlib
import functools
import math
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn
from rl_algorithms.environments import (
    RewardError,
    RewardFunctionEnvironment,
    RewardTimeoutError,
    Score,
    reward_function,
)
from rl_algorithms.environments.executor import TimedOutError
from rl_algorithms.environments.reward_function import call_within
from rl_algorithms.environments.verl import from_compute_score


def judge(environment, answers=("4", "5"), **columns):
    conversations = [
        Conversation(
            messages=({"role": "user", "content": "2+2="},),
            answer=answer,
            row={"prompt": "2+2=", "answer": "4", **columns},
        )
        for answer in answers
    ]
    return environment.step(conversations)


def ask(reward, answers=("4", "5"), *, on_error="stop", **columns):
    environment = RewardFunctionEnvironment(reward=reward, on_error=on_error)
    return environment, [item.reward for item in judge(environment, answers, **columns)]


def test_it_is_called_with_the_arguments_that_it_names():
    def reward(completions, answer):
        return [float(c == a) for c, a in zip(completions, answer, strict=True)]

    assert ask(reward)[1] == [1.0, 0.0]


def test_keyword_arguments_get_every_column():
    seen = {}

    def reward(**columns):
        seen.update(columns)
        return [0, torch.tensor(0.5)]

    assert ask(reward, level=3)[1] == [0.0, 0.5]
    assert seen["prompts"] == ["2+2=", "2+2="]
    assert seen["completions"] == ["4", "5"]
    assert seen["level"] == [3, 3]


def test_a_column_that_it_requires_and_the_data_lack_is_named():
    with pytest.raises(
        RewardError,
        match=r"requires solution, and the data rows have answer, prompt \(prompts, completions,",
    ):
        ask(lambda completions, solution: [0.0] * len(completions))


def test_columns_are_checked_again_where_a_later_batch_has_others():
    environment = RewardFunctionEnvironment(reward=lambda completions, solution: [0.0] * len(completions))
    judge(environment, solution=1)
    with pytest.raises(RewardError, match="requires solution"):
        judge(environment, other=1)


def fails_on_five(completions):
    if "5" in completions:
        raise KeyError("five")
    return [1.0] * len(completions)


def test_one_that_raises_stops_the_run_and_names_the_sample():
    with pytest.raises(
        RewardError, match=r"fails_on_five .*prompt '2\+2=', answer '5': it raised KeyError: 'five'"
    ) as caught:
        ask(fails_on_five)
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", 10**400, torch.ones(2)])
def test_a_reward_that_is_no_finite_number_stops_the_run_and_names_the_sample(value):
    with pytest.raises(RewardError, match=r"(?s)answer '5': it returned .*not a finite number"):
        ask(lambda completions: [1.0, value])


def test_another_number_of_rewards_than_answers_is_refused():
    with pytest.raises(RewardError, match="returned 1 rewards for 2 answers"):
        ask(lambda completions: [1.0])


@pytest.mark.parametrize(
    "reward", [fails_on_five, lambda completions: [math.nan if c == "5" else 1.0 for c in completions]]
)
def test_when_asked_for_failures_count_as_zero_and_are_counted(reward):
    environment, rewards = ask(reward, on_error="zero")
    assert rewards == [1.0, 0.0]
    assert environment.errors == 1


@pytest.mark.parametrize(
    ("reward", "kind"),
    [(lambda completions: dict.fromkeys(completions, 1.0), "dict"), (lambda completions: "12", "str")],
)
def test_what_is_no_list_of_numbers_is_refused(reward, kind):
    with pytest.raises(RewardError, match=f"it returned a {kind}, and must return a list"):
        ask(reward)


def test_failures_may_be_left_out_of_training_instead():
    environment = RewardFunctionEnvironment(reward=fails_on_five, on_error="fail")
    right, broken = judge(environment)
    assert (right.reward, right.failed) == (1.0, None)
    assert "it raised KeyError: 'five'" in broken.failed
    assert broken.reward == 0.0
    assert environment.errors == 1


def test_an_answer_that_a_function_does_not_apply_to_failed_and_is_no_error():
    environment = RewardFunctionEnvironment(reward=lambda completions: [1.0, None])
    applies, does_not = judge(environment)
    assert applies.failed is None
    assert "no reward function applies to this answer" in does_not.failed
    assert environment.errors == 0


def test_every_conversation_ends_after_one_answer():
    assert all(item.terminated for item in judge(RewardFunctionEnvironment(reward=lambda completions: [0, 1])))


def test_the_environment_is_one():
    assert isinstance(RewardFunctionEnvironment(reward=fails_on_five), Environment)


def test_nothing_to_judge_is_no_error():
    assert RewardFunctionEnvironment(reward=fails_on_five).step([]) == []


# -- Several functions ---------------------------------------------------------------------------------------------


def parts(**options):
    return RewardFunctionEnvironment(
        reward={
            "right": lambda completions, answer: [float(c == a) for c, a in zip(completions, answer, strict=True)],
            "short": lambda completions: [Score(0.5, metrics={"characters": float(len(each))}) for each in completions],
        },
        **options,
    )


def test_the_reward_is_the_weighted_sum_of_the_parts_and_names_them():
    right, wrong = judge(parts(weights={"right": 2.0, "short": -1.0}), ("4", "55"))
    assert (right.reward, right.rewards) == (1.5, {"right": 2.0, "short": -0.5})
    assert (wrong.reward, wrong.rewards) == (-0.5, {"right": 0.0, "short": -0.5})
    assert wrong.metrics == {"right": 0.0, "short": 0.5, "short/characters": 2.0}


def test_a_part_of_weight_zero_is_measured_and_not_rewarded():
    right, _ = judge(parts(weights={"short": 0.0}))
    assert (right.reward, right.rewards) == (1.0, {"right": 1.0})
    assert right.metrics["short"] == 0.5


def test_a_part_of_weight_zero_that_fails_is_counted_and_fails_nobody():
    watching = {"right": lambda completions: [1.0, None], "watch": lambda completions: [Score.failure("down"), 1.0]}
    first, second = judge(RewardFunctionEnvironment(reward=watching, weights={"watch": 0.0}))
    assert (first.reward, first.failed, first.metrics) == (1.0, None, {"right": 1.0, "watch/failed": 1.0})
    assert second.metrics == {"watch": 1.0, "watch/failed": 0.0}
    assert "no reward function applies to this answer: " in second.failed, "to be measured is not to be judged"


@pytest.mark.parametrize("name", ["prompts", "completions"])
def test_a_column_that_would_be_hidden_is_refused(name):
    with pytest.raises(RewardError, match=f"have a column '{name}', .*rename the column"):
        ask(lambda completions: [0.0] * len(completions), on_error="zero", **{name: "mine"})
    assert judge(RewardFunctionEnvironment(reward=Judge()), ("4",), **{name: "mine"})[0].failed is None


def test_a_part_that_does_not_apply_counts_nothing_and_every_answer_names_the_same_parts():
    environment = RewardFunctionEnvironment(
        reward={"a": lambda completions: [None, 1.0, None], "b": lambda completions: [2.0, 3.0, None]}
    )
    first, both, neither = judge(environment, ("x", "y", "z"))
    assert (first.reward, first.rewards, first.failed) == (2.0, {"a": 0.0, "b": 2.0}, None)
    assert "a" not in first.metrics
    assert (both.reward, both.rewards) == (4.0, {"a": 1.0, "b": 3.0})
    assert neither.failed is not None
    assert set(neither.rewards) == {"a", "b"}


def test_a_list_of_functions_is_named_after_them():
    def right(completions):
        return [1.0] * len(completions)

    def short(completions):
        return [2.0] * len(completions)

    (item,) = judge(RewardFunctionEnvironment(reward=[right, short], weights={"short": 0.5}), ("x",))
    assert item.rewards == {"right": 1.0, "short": 1.0}
    with pytest.raises(RewardError, match="several functions named right; give a dict"):
        RewardFunctionEnvironment(reward=[right, right])
    with pytest.raises(RewardError, match="has no function"):
        RewardFunctionEnvironment(reward=[])


def test_one_part_that_failed_fails_the_answer():
    environment = RewardFunctionEnvironment(
        reward={"a": lambda completions: [Score.failure("the sandbox died")], "b": lambda completions: [1.0]}
    )
    (item,) = judge(environment, ("x",))
    assert (item.failed, item.reward) == ("the sandbox died", 0.0)


def constant(completions, *, value):
    return [value] * len(completions)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-10, 10)), min_size=1, max_size=5))
def test_the_parts_sum_to_the_reward(pairs):
    functions = {f"f{index}": functools.partial(constant, value=value) for index, (value, _) in enumerate(pairs)}
    weights = {f"f{index}": weight for index, (_, weight) in enumerate(pairs)}
    (item,) = judge(RewardFunctionEnvironment(reward=functions, weights=weights), ("x",))
    assert item.reward == math.fsum(item.rewards.values())
    assert item.reward == pytest.approx(sum(value * weight for value, weight in pairs), abs=1e-6)


class Judge:
    """A single-turn environment, or one that goes on."""

    def __init__(self, *, terminated=True):
        self.terminated = terminated

    def step(self, conversations):
        return [
            EnvironmentReturn(
                reward=float(len(each.messages)),
                terminated=self.terminated,
                failed="it is five" if each.answer == "5" else None,
            )
            for each in conversations
        ]


def test_a_single_turn_environment_may_be_a_part():
    four, five = judge(RewardFunctionEnvironment(reward={"judge": Judge(), "one": lambda completions: [1.0, 1.0]}))
    assert four.rewards == {"judge": 1.0, "one": 1.0}
    assert five.failed == "it is five"


def test_an_environment_that_goes_on_cannot_be_a_part():
    with pytest.raises(RewardError, match="did not end 1 of 1 conversations"):
        judge(RewardFunctionEnvironment(reward=Judge(terminated=False)), ("4",))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"weights": {"write": 1.0}}, "weights name 'write', and the reward functions are 'right', 'short'"),
        ({"weights": {"right": math.nan}}, r"weights\['right'\]=nan must be finite"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be > 0"),
    ],
)
def test_nonsense_is_refused_by_name(options, match):
    with pytest.raises(ValueError, match=match):
        parts(**options)


# -- Coroutine functions -------------------------------------------------------------------------------------------


def test_coroutine_functions_are_awaited_together():
    async def meet():
        barrier = asyncio.Barrier(2)

        async def one(completions):
            await barrier.wait()
            return [1.0] * len(completions)

        return one

    one = asyncio.run(meet())  # either would wait for ever without the other
    environment = RewardFunctionEnvironment(reward={"a": one, "b": one}, timeout_s=30.0)
    assert [item.reward for item in judge(environment)] == [2.0, 2.0]


def test_coroutine_functions_work_where_a_loop_runs_already():
    async def reward(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    async def notebook():
        return judge(RewardFunctionEnvironment(reward=reward))

    assert [item.reward for item in asyncio.run(notebook())] == [1.0, 1.0]


async def never(completions):
    await asyncio.Event().wait()


def test_a_coroutine_function_that_takes_too_long_is_named():
    with pytest.raises(
        RewardError,
        match=r"never took longer than timeout_s=0\.01 .* batch of 2 answers, the first: prompt '2\+2=', answer '4'",
    ):
        judge(RewardFunctionEnvironment(reward=never, timeout_s=0.01))


def test_a_function_s_own_timeout_is_not_taken_for_the_deadline():
    async def refused(completions):
        raise TimeoutError("the judge did not answer")

    with pytest.raises(RewardError, match="raised TimeoutError: the judge did not answer"):
        judge(RewardFunctionEnvironment(reward=refused))


def test_a_coroutine_function_that_blocks_the_event_loop_has_a_deadline_too():
    async def blocks(completions):
        time.sleep(60)  # noqa: ASYNC251 - the mistake

    with pytest.raises(RewardTimeoutError, match="blocks took longer"):
        judge(RewardFunctionEnvironment(reward=blocks, timeout_s=0.05))


# -- Deadlines of plain functions ----------------------------------------------------------------------------------


def hangs(completions):
    try:
        time.sleep(60)
    except Exception:  # noqa: BLE001 - what a careless function does must not swallow the interruption
        return [0.0] * len(completions)


def elsewhere(call):
    """Call on another thread, as asynchronous GRPO does."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("where", [lambda call: call(), elsewhere])
def test_a_plain_function_that_hangs_is_refused_by_its_name_row_and_seconds(where):
    begun = time.monotonic()
    with pytest.raises(RewardTimeoutError, match=r"function hangs took longer than timeout_s=0\.05 .* answer '4'"):
        where(lambda: judge(RewardFunctionEnvironment(reward=hangs, timeout_s=0.05), ("4",)))
    assert time.monotonic() - begun < 30


def test_the_interrupted_line_is_in_the_cause_so_that_it_can_be_shown():
    with pytest.raises(RewardTimeoutError) as refused:
        judge(RewardFunctionEnvironment(reward=hangs, timeout_s=2.0), ("4",))  # by then the call has begun
    error, lines = refused.value, ""
    while (error := error.__cause__) is not None:
        lines += "".join(traceback.format_tb(error.__traceback__))
    assert "time.sleep(60)" in lines


@pytest.mark.parametrize(("on_error", "failed"), [("zero", [False, False]), ("fail", [True, True])])
def test_answers_of_a_function_that_hangs_obey_on_error(on_error, failed):
    environment = RewardFunctionEnvironment(reward=hangs, timeout_s=0.05, on_error=on_error)
    assert [item.failed is not None for item in judge(environment)] == failed
    assert environment.errors == 2


def test_a_function_that_swallows_every_interruption_is_interrupted_again():
    def stubborn(completions):
        for _ in range(2):
            with contextlib.suppress(BaseException):
                time.sleep(60)
        time.sleep(60)

    with pytest.raises(RewardTimeoutError):
        judge(RewardFunctionEnvironment(reward=stubborn, timeout_s=0.05))


def test_a_plain_function_stays_on_the_main_thread_and_may_use_alarms_of_its_own():
    def timed(completions):
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(0.03)
        return [float(threading.current_thread() is threading.main_thread())] * len(completions)

    before = signal.getsignal(signal.SIGALRM)
    try:
        assert ask(timed)[1] == [1.0, 1.0]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_part_has_the_deadline_of_its_own_environment_and_that_of_the_whole():
    inner = RewardFunctionEnvironment(reward=hangs, timeout_s=0.05)
    with pytest.raises(RewardError, match=r"timeout_s=0\.05"):
        judge(RewardFunctionEnvironment(reward={"inner": inner}, timeout_s=30.0), ("4",))
    slow = RewardFunctionEnvironment(reward=hangs, timeout_s=30.0)
    with pytest.raises(RewardTimeoutError, match=r"timeout_s=0\.05"):
        judge(RewardFunctionEnvironment(reward={"inner": slow}, timeout_s=0.05), ("4",))


def test_functions_have_five_minutes_unless_told_otherwise_and_none_waits_for_ever():
    assert RewardFunctionEnvironment(reward=hangs).timeout_s == 300.0
    environment = RewardFunctionEnvironment(reward=lambda completions: [1.0, 1.0], timeout_s=None)
    assert [item.reward for item in judge(environment)] == [1.0, 1.0]


def test_a_function_that_exits_fails_as_one_that_raises_and_does_not_end_the_run():
    with pytest.raises(RewardError, match=r"it raised SystemExit\(3\)"):
        ask(lambda completions: sys.exit(3))


def test_the_error_of_a_function_is_the_cause_of_the_refusal():
    def broken(completions):
        raise KeyError("solution")

    with pytest.raises(RewardError) as refused:
        ask(broken)
    assert isinstance(refused.value.__cause__, KeyError)


def test_an_answer_to_which_nothing_applies_says_so_in_a_sentence():
    def none(completions):
        return [None] * len(completions)

    (item,) = judge(RewardFunctionEnvironment(reward=none), ("4",))
    assert item.failed.startswith("no reward function applies to this answer: the reward function `")
    assert item.failed.endswith(".none` returned None for it")


def test_a_coroutine_function_that_cancels_itself_says_so():
    async def cancels(completions):
        raise asyncio.CancelledError

    with pytest.raises(RewardError, match=r"cancels.*it cancelled itself"):
        judge(RewardFunctionEnvironment(reward=cancels))


def test_a_coroutine_function_that_takes_too_long_may_fail_its_answers_only():
    environment = RewardFunctionEnvironment(reward=never, timeout_s=0.01, on_error="fail")
    assert all(item.failed for item in judge(environment))
    assert environment.errors == 2


# -- verl ----------------------------------------------------------------------------------------------------------

VERL = {"data_source": "gsm8k", "reward_model": {"style": "rule", "ground_truth": "4"}, "extra_info": {"index": 7}}


def test_a_function_of_verls_gets_its_arguments_and_its_numbers_become_metrics():
    seen = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return {"score": float(solution_str == ground_truth), "acc": solution_str == ground_truth, "pred": "text"}

    right, wrong = judge(RewardFunctionEnvironment(reward=from_compute_score(compute_score)), **VERL)
    assert seen[0] == ("gsm8k", "4", "4", {"index": 7})
    assert (right.reward, right.metrics) == (1.0, {"acc": 1.0})
    assert (wrong.reward, wrong.metrics) == (0.0, {"acc": 0.0})


def test_a_function_of_verls_may_return_a_number_and_its_errors_name_it():
    def compute_score(data_source, solution_str, ground_truth, extra_info):
        return float(solution_str)

    assert [
        item.reward for item in judge(RewardFunctionEnvironment(reward=from_compute_score(compute_score)), **VERL)
    ] == [
        4.0,
        5.0,
    ]
    with pytest.raises(
        RewardError, match=r"compute_score cannot judge .*'reward_model' must be an object with a 'grou"
    ):
        judge(RewardFunctionEnvironment(reward=from_compute_score(compute_score)), **{**VERL, "reward_model": {}})


def test_importing_environments_costs_no_extra():
    code = (
        "import sys, rl_algorithms.environments as e; e.RewardFunctionEnvironment, e.RewardError; "
        "assert not {'math_verify', 'sympy', 'transformers', 'gymnasium'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_deadline_that_ends_as_the_call_begins_or_returns_interrupts_nothing_else():
    """The signal may come while the deadline is being set up or taken down, more often on a busy machine."""

    def work(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass

    chance = random.Random(0)
    for _ in range(300):
        timeout_s = chance.choice([1e-5, 5e-4, 2e-3])
        with contextlib.suppress(TimedOutError):
            call_within(functools.partial(work, timeout_s * chance.uniform(0.7, 1.1)), timeout_s=timeout_s)
    while any(each.name == "rl-reward-deadline" for each in threading.enumerate()):
        time.sleep(0.01)
    assert reward_function._deadlines == []
