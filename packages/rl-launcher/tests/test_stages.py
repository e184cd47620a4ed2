"""Each kind of stage runs, on a CPU with a tiny model: asynchronous, of several turns, distilled; and what it logs."""

import json
import textwrap

import pytest

from rl_launcher.build.build import build
from rl_launcher.build.environments import load_environment
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.schema import EnvironmentConfig, Recipe
from rl_observe import RunDirectory, read_spans
from rl_observe.glossary import metric_of

GAMES = """
    import asyncio
    import time
    from rl_algorithms.contracts import EnvironmentReturn

    class Slow:
        def reset(self, *, seed, row):
            self.digit = row["answer"]
            return row["prompt"]
        def step(self, answer):
            if self.digit == "5":
                time.sleep(30)
            return "again", float(answer == self.digit) + len(set(answer)) / 10, False, False, {}
        def close(self):
            pass

    class Broken(Slow):
        def step(self, answer):
            raise RuntimeError("the board fell over")

    class Batch:
        def __init__(self, reward=1.0):
            self.reward = reward
        def step(self, conversations):
            return [EnvironmentReturn(reward=self.reward, terminated=True) for _ in conversations]

    class Awaited:
        async def step(self, conversation):
            await asyncio.sleep(0)
            return EnvironmentReturn(reward=0.5, terminated=True)

    class Nothing:
        pass
"""
LOG_FIELDS = {"stage", "step", "time_s"}
ONLY_GRPO = ["sft=null", "grpo.max_num_steps=4", "evaluation.every=0"]


@pytest.fixture
def games(tmp_path):
    (tmp_path / "games.py").write_text(textwrap.dedent(GAMES))
    return tmp_path / "games.py"


def run_recipe(file, *overrides):
    return run(load_recipe(file, schema=Recipe, overrides=overrides))


def lines(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_asynchronous_grpo_takes_its_steps_within_the_bound_on_staleness(recipe, tmp_path):
    summary = run_recipe(
        recipe, "sft=null", "evaluation.every=4", "grpo.async_grpo={max_staleness: 3, groups_per_call: 2}"
    )
    assert summary["steps"] == 8
    logged = [line for line in lines(tmp_path) if "buffer_groups" in line]
    assert [line["step"] for line in logged] == [2, 4, 6, 8]
    assert all(line["staleness"] <= 3 for line in logged)
    assert "held_out_greedy" in logged[1]
    assert all(line["refit_verified"] == 1.0 for line in logged)
    assert not [name for line in logged for name in line if metric_of(name) is None and name not in LOG_FIELDS]
    spans = read_spans(RunDirectory.open(tmp_path / "run"))
    calls = [span for span in spans if (span["name"], span["lane"]) == ("generate", "collector 0")]
    assert len(calls) >= 4 * 4 / 2  # four batches of four prompts, two a call
    assert {span["lane"] for span in spans} == {"trainer", "collector 0"}


def test_a_conversation_of_several_turns_is_trained_on_and_measured(recipe, tmp_path):
    game = [
        "env.reward=null",
        "env.environment=rl_algorithms.environments.games:GuessNumber",
        "env.options={opening: '3+0=', higher: h, lower: l, unreadable: n, max_guesses: 3}",
        "policy.generation.max_new_tokens=2",
        "grpo.max_turns=3",
    ]
    answers_are_digits = ["sft.max_num_steps=60", "evaluation.samples=8", "logger.num_samples_with_tokens=8"]
    run_recipe(recipe, *ONLY_GRPO[1:], *game, *answers_are_digits)
    logged = [line for line in lines(tmp_path) if line["stage"] == "grpo" and line["step"]]
    assert logged
    assert all(-0.3 - 1e-9 <= line["reward"] <= 1.0 for line in logged)
    samples = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    assert max(turn for sample in samples for turn in sample["tokens"]["turns"]) >= 1


def test_a_timeout_costs_its_rollouts_and_no_others(recipe, tmp_path, games):
    slow = ["env.reward=null", f"env.environment={games}:Slow", "env.timeout_s=5.0", "grpo.max_turns=2"]
    shown_once = ["data.held_out_share=0.2", "grpo.max_num_steps=2", "grpo.num_prompts=6"]
    summary = run_recipe(recipe, *ONLY_GRPO, *slow, *shown_once)
    trained = next(line for line in lines(tmp_path) if line["step"])
    failed = trained["failed"] if "failed" in trained else trained["failed_rollouts"]
    assert summary["reward_errors"] > 0
    assert 0 <= failed < 1


def test_an_episode_that_raises_ends_the_run_unless_it_may_fail(recipe, games):
    broken = ["env.reward=null", f"env.environment={games}:Broken", "grpo.max_turns=2"]
    parts = build(load_recipe(recipe, schema=Recipe, overrides=[*ONLY_GRPO, *broken]).value)
    try:
        parts.weight_sync(version=0)
        with pytest.raises(ValueError, match="the board fell over"):
            parts.environment.step(_first_conversations(parts))
    finally:
        parts.close()


def _first_conversations(parts):
    from rl_algorithms.contracts import Conversation

    rows = [dict(parts.data.prompts[0].row.columns)]
    (start,) = parts.environment.reset(rows, seeds=[0])
    return [Conversation(messages=start.messages, answer="3", row=rows[0], state=start.state)]


@pytest.mark.parametrize(("name", "reward"), [("Batch", 1.0), ("Awaited", 0.5)])
def test_an_environment_of_a_batch_and_one_of_coroutines_judge_too(games, name, reward):
    from rl_algorithms.contracts import Conversation

    judge = load_environment(EnvironmentConfig(environment=f"{games}:{name}"))
    message = {"role": "user", "content": "?"}
    (judged,) = judge.step([Conversation(messages=(message,), answer="1", row={})])
    assert (judged.reward, judge.errors) == (reward, 0)
    judge.close()


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"environment": "{}:Nothing"}, "which has no step"),
        ({"environment": "{}:Batch", "options": {"rewrad": 1}}, "called with env.options (rewrad=1), raised TypeError"),
        ({"environment": "{}:Batch", "timeout_s": 3.0}, "scores whole batches at once"),
        ({"environment": "{}:Slow", "on_error": "zero"}, "set stop, or fail"),
    ],
)
def test_what_is_no_environment_is_refused(games, config, said):
    named = {**config, "environment": config["environment"].format(games)}
    with pytest.raises(Refusal) as refused:
        load_environment(EnvironmentConfig(**named))
    assert said in str(refused.value)


def test_a_student_comes_closer_to_its_teacher(recipe, tmp_path):
    distill = (
        f"distill={{max_num_steps: 30, num_prompts: 6, k: 16, optimizer: {{lr: 0.02}}, "
        f"teacher: {{model_name: '{tmp_path}/model.py:teacher'}}}}"
    )
    with (tmp_path / "model.py").open("a") as file:
        file.write("\n\ndef teacher(seed):\n    return build(seed + 17)\n")
    summary = run_recipe(recipe, "sft=null", "grpo=null", distill)
    assert (summary["algorithm"], summary["steps"]) == ("distill", 30)
    assert not [name for line in lines(tmp_path) for name in line if metric_of(name) is None and name not in LOG_FIELDS]
    losses = [line["loss"] for line in lines(tmp_path) if line["step"]]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


def test_a_teacher_with_another_tokenizer_is_refused(recipe, tmp_path):
    with (tmp_path / "model.py").open("a") as file:
        file.write(
            "\n\ndef teacher(seed):\n    model, tokenizer = build(seed, vocabulary=60)\n"
            "    tokenizer.add_tokens(['<more>'])\n    return model, tokenizer\n"
        )
    optimizer = "optimizer: {lr: 0.01}"
    distill = f"distill={{max_num_steps: 2, {optimizer}, teacher: {{model_name: '{tmp_path}/model.py:teacher'}}}}"
    with pytest.raises(Refusal, match=r"distill.teacher.model_name=.*52"):
        run_recipe(recipe, "sft=null", "grpo=null", distill)
    assert not (tmp_path / "run").exists()


def test_several_answers_to_a_prompt_are_measured_as_pass_at_k(recipe):
    several = ["evaluation.samples_per_prompt=6", "evaluation.pass_at=[1, 3, 6]", "evaluation.pass_reward=1.2"]
    loaded = load_recipe(recipe, schema=Recipe, overrides=several).value
    parts = build(loaded)
    try:
        parts.weight_sync(version=0)
        evaluator = Evaluator(parts, loaded)
        measured = evaluator.both()
        again = evaluator.both()
    finally:
        parts.close()
    figures = measured.metrics()
    assert figures == again.metrics()
    passed = measured.sampled.pass_at
    assert passed[1].mean <= figures["held_out_pass@3"] <= figures["held_out_pass@6"]
    first, *others = measured.sampled.rollouts.answers[:6]
    assert any(other != first for other in others), "the answers to one prompt are all the same"
    assert f"pass@6          {figures['held_out_pass@6']:.3f}" in measured.table()
