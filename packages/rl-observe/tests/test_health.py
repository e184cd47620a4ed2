"""Conditions that are found in a run's log: when each is reported, how often, and in which words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_observe import HealthConfig, HealthError
from rl_observe.health import CONDITIONS, EventQueue, Reporter, Watch, conditions_table, is_disk_full, name_of
from rl_observe.run_directory import RunDirectoryError


def noticed(config, rewards, **values):
    watch = Watch(config)
    return [
        (step, each.name, each.stop)
        for step, reward in enumerate(rewards)
        for each in watch.observe("grpo", {"reward": reward, **values})
    ]


def test_a_reward_that_collapses_is_reported_once_until_it_recovers():
    rewards = [1.0, 1.0, 0.4, 0.4, 0.3, 1.0, 1.0, 0.0, 0.0]
    config = HealthConfig(reward_collapse_steps=2, on_reward_collapse="stop")
    assert noticed(config, rewards) == [(3, "reward_collapse", True), (8, "reward_collapse", True)]
    assert noticed(HealthConfig(reward_collapse_steps=2, on_reward_collapse="ignore"), rewards) == []


@given(st.lists(st.floats(-1, 0), max_size=30))
def test_a_reward_that_was_never_positive_cannot_collapse(rewards):
    assert noticed(HealthConfig(reward_collapse_steps=2), rewards) == []


def test_engine_and_trainer_that_disagree_are_reported_with_the_number():
    watch = Watch(HealthConfig(max_token_mult_prob_error=1.02))
    assert watch.observe("grpo", {"token_mult_prob_error": 1.01}) == []
    (found,) = watch.observe("grpo", {"token_mult_prob_error": 1.03})
    assert "token_mult_prob_error=1.03 is above health.max_token_mult_prob_error=1.02" in found.message
    assert not found.stop
    assert watch.observe("grpo", {"token_mult_prob_error": 1.04}) == []


def test_failed_rollouts_are_reported_at_powers_of_two():
    watch = Watch(HealthConfig())
    assert [errors for errors in range(20) if watch.observe("grpo", {}, errors=errors)] == [1, 2, 4, 8, 16]
    resumed = Watch(HealthConfig())
    resumed.replay([], errors=9)
    assert [errors for errors in range(9, 20) if resumed.observe("grpo", {}, errors=errors)] == [16]


SAMPLES = [
    {"prompt": "2 + 2 =", "response": "I think\nfour", "reward": 0.0},
    {"prompt": "3 + 3 =", "response": "x" * 500, "reward": 0.0},
    {"prompt": "4 + 4 =", "response": "never quoted", "reward": 0.0},
]


def steps_reported(shares, config):
    watch = Watch(config)
    return [step for step, share in enumerate(shares, 1) if watch.observe("grpo", {"groups_with_signal": share})]


def test_rollouts_of_older_weights_may_differ_and_a_nan_may_not():
    watch = Watch(HealthConfig())
    assert watch.observe("grpo", {"token_mult_prob_error": 1.07, "staleness": 0.8}) == []
    assert watch.observe("grpo", {"token_mult_prob_error": float("nan"), "staleness": 0.8})
    assert Watch(HealthConfig()).observe("grpo", {"token_mult_prob_error": 1.07, "staleness": 0.0})


def test_no_signal_is_reported_once_after_so_many_batches_in_a_row_and_again_after_a_signal():
    config = HealthConfig(no_signal_batches=3)
    assert steps_reported([0, 0, 0.25, 0, 0, 0, 0, 0, 0.5, 0, 0, 0], config) == [6, 12]
    assert steps_reported([0.1] * 30, config) == []
    assert steps_reported([0] * 30, HealthConfig()) == [10]
    assert steps_reported([0] * 30, HealthConfig(on_no_signal="ignore")) == []


def test_a_step_that_does_not_measure_the_signal_neither_counts_nor_ends_the_condition():
    watch = Watch(HealthConfig(no_signal_batches=2))
    without = {"groups_with_signal": 0.0}
    assert [bool(watch.observe("grpo", each)) for each in (without, {"loss": 1.0}, without)] == [False, False, True]
    assert watch.observe("sft", {"loss": 1.0}) == []


def test_no_signal_quotes_two_responses_with_their_rewards_on_one_line():
    watch = Watch(HealthConfig(no_signal_batches=1, on_no_signal="stop"))
    (found,) = watch.observe("grpo", {"groups_with_signal": 0.0}, samples=SAMPLES)
    message = found.message
    assert (found.name, found.stop) == ("no_signal", True)
    assert "For example, the response 'I think four' to the prompt '2 + 2 =' got reward 0.0; and 'xxx" in message
    assert "never quoted" not in message
    assert "\n" not in message
    assert len(message) < 900


def test_the_responses_are_asked_for_only_when_no_signal_is_reported():
    calls = []
    watch = Watch(HealthConfig(no_signal_batches=2))

    def samples():
        calls.append(len(calls))
        return SAMPLES

    for share in (1.0, 0.0, 0.0, 0.0):
        found = watch.observe("grpo", {"groups_with_signal": share}, samples=samples)
    assert calls == [0]
    assert found == []


def test_a_resumed_run_counts_the_batches_before_and_does_not_report_twice():
    rows = [{"stage": "grpo", "step": step, "groups_with_signal": 0.0} for step in range(1, 5)]
    fresh, warned = Watch(HealthConfig(no_signal_batches=5)), Watch(HealthConfig(no_signal_batches=3))
    for watch in (fresh, warned):
        watch.replay(rows, errors=0)
    assert len(fresh.observe("grpo", {"groups_with_signal": 0.0})) == 1
    assert warned.observe("grpo", {"groups_with_signal": 0.0}) == []


@pytest.mark.parametrize("name", ["no_signal_batches", "reward_collapse_steps"])
def test_a_window_of_no_steps_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be >= 1"):
        HealthConfig(**{name: 0})


def test_every_condition_has_a_cause_and_a_reaction_in_the_table():
    table = conditions_table().splitlines()
    assert len(table) == len(CONDITIONS) + 2
    assert all(re.fullmatch(r"\| `\w+` \| .{10,} \| .{10,} \|", row) for row in table[2:])


def behind(cause):
    try:
        try:
            raise cause
        except type(cause) as error:
            raise ValueError("metrics.jsonl cannot be written") from error
    except ValueError as outer:
        return outer


def test_a_full_disk_is_recognized_behind_any_error():
    assert is_disk_full(behind(OSError(28, "No space left on device")))
    assert is_disk_full(RuntimeError("rank 1: OSError: [Errno 28] No space left on device"))
    assert not is_disk_full(behind(OSError(13, "Permission denied")))


def test_what_ended_a_run_has_a_name():
    assert name_of(behind(OSError(28, "No space left on device"))) == "disk_full"
    assert name_of(HealthError("no_signal", "nothing was learned")) == "no_signal"
    assert name_of(KeyboardInterrupt()) == "interrupted"
    assert name_of(KeyError("else")) == "failed"


def test_events_are_taken_once_in_their_order():
    events = EventQueue()
    events.add("engine_restarted", "engine 1 died", "restarted")
    events.add("engine_healed", "engine 1 has weights", "generates")
    assert [each.name for each in events.take()] == ["engine_restarted", "engine_healed"]
    assert events.take() == []


def test_an_event_that_the_disk_refuses_is_shown_and_kept_as_unwritten():
    class Disk:
        def write(self, name, step, message, *, reaction, stage=None):
            raise RunDirectoryError("events.jsonl cannot be written: no space is left on the device")

    class View:
        shown = []

        def event(self, name, step, message):
            self.shown.append((name, step, message))

    reporter = Reporter(Disk(), View())
    reporter.report("no_signal", "nothing to learn", reaction="the run continues", step=3)
    assert View.shown == [("no_signal", 3, "nothing to learn; the run continues")]
    assert reporter.unwritten == ["events.jsonl cannot be written: no space is left on the device"]
