"""SFT as a new user has it: conversations in a file and no reward; what is held out measures the loss."""

import json
import textwrap
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from rl_algorithms.data import DataError
from rl_launcher.build.build import build
from rl_launcher.build.inputs import load_dataset
from rl_launcher.checks.explain import explain
from rl_launcher.cli import app
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import RecipeError, load_recipe
from rl_launcher.run import resume, run
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.schema import Recipe
from rl_observe.glossary import metric_of

RECIPE = """
    run_dir: {folder}/run
    cpu_threads: 1
    policy:
      model_name: {folder}/model.py:build
      generation: {{max_new_tokens: 4}}
    data:
      source: {folder}/talks.jsonl
      held_out_share: 0.25
    evaluation: {{every: 8, samples: 2}}
    sft:
      max_num_steps: 24
      batch_size: 8
      optimizer: {{lr: 0.02}}
"""
DPO = "dpo={pairs: data, max_num_steps: 2, optimizer: {lr: 0.01}}"
LOG_FIELDS = {"stage", "step", "time_s"}


def said(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]}


def lay_out(folder, *rows):
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def alone(recipe, tmp_path):
    """A recipe of conversations whose only stage is sft, and that names no judge."""
    lay_out(tmp_path, *(said(f"{digit}+0=", "yes", "+1=", "no") for digit in range(9)))
    recipe.write_text(textwrap.dedent(RECIPE).format(folder=tmp_path))
    return recipe


def loaded(file, *overrides):
    return load_recipe(file, schema=Recipe, overrides=overrides)


def held_out_loss(lines):
    return [line["held_out_loss"] for line in lines if "held_out_loss" in line]


def test_conversations_are_learnt_without_a_reward_and_the_held_out_ones_measure_it(alone, tmp_path, curve):
    summary = run(loaded(alone))
    lines = curve(tmp_path / "run")
    losses = held_out_loss(lines)
    assert [line["step"] for line in lines if "held_out_loss" in line] == [0, 8, 16, 24]
    assert losses[0] > losses[1]
    assert losses[-1] < 0.2 * losses[0]
    assert (summary["held_out_loss_before"], summary["held_out_loss_after"]) == (losses[0], losses[-1])
    assert (summary["held_out_size"], summary["held_out_sampled_after"], summary["reward_errors"]) == (2, None, 0)
    assert not [name for line in lines for name in line if metric_of(name) is None and name not in LOG_FIELDS]
    assert not [name for line in lines for name in line if "greedy" in name or name == "reward"]
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [sample["when"] for sample in samples] == ["before", "before", "after", "after"]
    assert {(sample["reward"], sample["expected"]) for sample in samples} == {(None, "yes")}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "lowered" in page
    assert "held-out demonstrations" in page
    assert "no reward" not in page


def test_without_rewards_and_samples_a_run_holds_no_engine_and_measures_the_same_loss(alone, tmp_path, curve):
    with_engine = run(loaded(alone, f"run_dir={tmp_path}/with"))
    assert with_engine["refit"]["count"] == 2  # before training, and after it
    recipe = loaded(alone, "evaluation.samples=null", "policy.generation.backend=vllm")  # which is not installed
    assert not recipe.value.generates
    text = explain(recipe)
    assert text.sections["Engine"].startswith("none: nothing in this recipe samples responses")
    assert text.sections["Refit"] == "none: there is no engine"
    assert (text.figures["engines"], text.figures["engine_weight_bytes"]) == (0, 0)
    parts = build(recipe.value)
    with closing(parts), pytest.raises(RuntimeError, match="so the run holds no engine"):
        parts.engine.generate([[1]], recipe.value.policy.generation.sampling())
    summary = run(recipe)
    assert summary["refit"] is None
    assert curve(tmp_path / "run") == curve(tmp_path / "with")
    assert summary["held_out_loss_after"] == with_engine["held_out_loss_after"]
    for name in ("refits.jsonl", "samples.jsonl"):
        assert not (file := tmp_path / "run" / name).exists() or not file.read_text()
        assert (tmp_path / "with" / name).read_text()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "held-out demonstrations" in page


def test_a_run_without_an_engine_goes_on_with_the_same_bits(alone, tmp_path, curve, monkeypatch, stop_after):
    none = ["evaluation.samples=0"]
    run(loaded(alone, *none, f"run_dir={tmp_path}/whole"))
    with monkeypatch.context() as patched:
        stop_after(patched, 11)
        with pytest.raises(RunStoppedError):
            run(loaded(alone, *none))
    assert resume(tmp_path / "run")["refit"] is None
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "generates", "samples"),
    [
        (["evaluation.samples=null"], False, 0),
        (["evaluation.samples=0"], False, 0),
        ([], True, 2),
        (["evaluation.samples=null", "env.reward=reward.py:score"], True, 12),
        (["evaluation.samples=0", "env.reward=reward.py:score"], True, 0),
        (["sft=null", "evaluation.samples=null", DPO], False, 0),
        (["sft=null", "evaluation.samples=null", DPO, "dpo.pairs=online", "env.reward=reward.py:score"], True, 12),
    ],
)
def test_an_engine_is_held_for_whatever_samples(alone, overrides, generates, samples):
    recipe = loaded(alone, *overrides).value
    assert (recipe.generates, recipe.num_samples) == (generates, samples)


def test_the_held_out_loss_is_the_weighted_mean_over_learnt_tokens(alone, tmp_path):
    rows = [{**said("1+0=", "1"), "weight": 3.0}, said("2+0=", "22", "+0=", "222"), said("3+0=", "3")]
    lay_out(tmp_path, *rows)
    recipe = loaded(alone, "data.held_out_share=0.6").value
    parts = build(recipe)
    try:
        measured = Evaluator(parts, recipe).loss()["held_out_loss"]
        total = count = 0.0
        for item in parts.data.held_out_demonstrations:
            with torch.no_grad():
                logits = parts.policy.model(torch.tensor([item.tokens])).logits[0].double()
            logp = logits.log_softmax(-1)
            for place, is_learnt in enumerate(item.trainable):
                if is_learnt:
                    total -= item.row.weight * logp[place - 1, item.tokens[place]].item()
                    count += item.row.weight
    finally:
        parts.close()
    assert len(parts.data.held_out_demonstrations) == 2
    assert measured == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("train_on", "learnt"),
    [
        ("assistant", "7<eos>8<eos>"),
        ("last_turn", "8<eos>"),
        ("all", "<user>7+0=<assistant>7<eos><user>+1=<assistant>8<eos>"),
    ],
)
def test_the_tokens_that_are_learnt_are_those_asked_for(alone, tmp_path, train_on, learnt):
    lay_out(tmp_path, said("7+0=", "7", "+1=", "8"), said("7+0=", "7", "+1=", "8"), said("5+0=", "5"))
    parts = build(loaded(alone, f"sft.train_on={train_on}").value)
    parts.close()
    items = [*parts.data.demonstrations, *parts.data.held_out_demonstrations]
    (item, *_) = [item for item in items if len(item.row.messages) == 4]
    marked = parts.tokenizer.decode([t for t, is_learnt in zip(item.tokens, item.trainable, strict=True) if is_learnt])
    assert marked == learnt
    assert not item.trainable[0]


def test_a_message_may_be_left_out_of_what_is_learnt(alone, tmp_path):
    row = said("7+0=", "9", "+1=", "8")
    row["messages"][1]["train"] = False
    lay_out(tmp_path, row, said("5+0=", "5"), said("4+0=", "4"))
    parts = build(loaded(alone).value)
    parts.close()
    (item,) = [
        item
        for item in (*parts.data.demonstrations, *parts.data.held_out_demonstrations)
        if len(item.row.messages) == 4
    ]
    assert sum(item.trainable) == 2  # the 8 and what ends it


@pytest.fixture
def stop_at(stop_after, monkeypatch):
    """Run a recipe, and end it after so many steps."""

    def stop(file, steps):
        with monkeypatch.context() as patched:
            stop_after(patched, steps)
            with pytest.raises(RunStoppedError):
                run(loaded(file))

    return stop


@pytest.mark.slow
def test_a_run_that_goes_on_ends_with_the_same_bits(alone, tmp_path, curve, stop_at):
    run(loaded(alone, f"run_dir={tmp_path}/whole"))
    stop_at(alone, 11)
    summary = resume(tmp_path / "run")
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert summary["held_out_loss_before"] == held_out_loss(curve(tmp_path / "whole"))[0]
    ours, whole = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(ours[name], whole[name]) for name in whole)


def test_held_out_conversations_that_change_are_noticed_by_resume(alone, tmp_path, stop_at):
    stop_at(alone, 3)
    dataset, _ = load_dataset(loaded(alone).value)
    question = dataset.held_out_demonstrations[0].messages[0]["content"]
    talks = (tmp_path / "talks.jsonl").read_text().splitlines()
    changed = [talk.replace('"no"', '"maybe"') if f'"{question}"' in talk else talk for talk in talks]
    assert changed != talks
    (tmp_path / "talks.jsonl").write_text("\n".join(changed))
    with pytest.raises(Refusal, match="the data have changed since"):
        resume(tmp_path / "run")


def test_a_prompt_with_an_answer_gives_the_same_tokens_as_the_conversation(alone, tmp_path):
    rows = [{"prompt": f"{digit}+0=", "answer": str(digit)} for digit in range(8)]
    lay_out(tmp_path, *rows)
    as_prompts = build(loaded(alone).value)
    lay_out(tmp_path, *(said(row["prompt"], row["answer"]) for row in rows))
    as_talks = build(loaded(alone).value)
    for parts in (as_prompts, as_talks):
        parts.close()
    for name in ("demonstrations", "held_out_demonstrations"):
        ours, theirs = (getattr(parts.data, name) for parts in (as_prompts, as_talks))
        assert [item.tokens for item in ours] == [item.tokens for item in theirs]
        assert [item.prompt_length for item in ours] == [item.trainable.index(True) for item in theirs]


def test_with_a_reward_conversations_are_asked_and_measured_by_both(alone, tmp_path, curve):
    summary = run(loaded(alone, f"env.reward={tmp_path}/reward.py:score"))
    logged = [line for line in curve(tmp_path / "run") if "held_out_loss" in line]
    assert [line["step"] for line in logged] == [0, 8, 16, 24]
    assert all("held_out_greedy" in line for line in logged)
    assert summary["held_out_greedy_after"] == pytest.approx(3 / 5)  # "yes" has three letters
    assert summary["held_out_loss_after"] < summary["held_out_loss_before"]


def test_the_best_checkpoint_may_be_that_of_the_lowest_loss(alone, tmp_path):
    best = ["checkpointing.keep_top_k=1", "checkpointing.metric_name=held_out_loss"]
    with pytest.raises(RecipeError, match="higher_is_better=false"):
        loaded(alone, *best)
    run(loaded(alone, *best, "checkpointing.higher_is_better=false", "checkpointing.save_period=8"))
    assert [*(tmp_path / "run" / "checkpoints").glob("step_*")]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("held_out_los", "did you mean held_out_loss"),
        ("held_out_pair_accuracy", "only dpo, orpo and reward_model log that"),
        ("of_mine", "no run logs that"),
    ],
)
def test_a_best_checkpoint_by_what_no_step_logs_is_refused(alone, tmp_path, name, reason):
    with pytest.raises(Refusal, match=f"keep_top_k=1 keeps the best by metric_name={name}, and .*{reason}"):
        run(loaded(alone, "checkpointing.keep_top_k=1", f"checkpointing.metric_name={name}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("as_rows", [False, True])
def test_prompts_that_leave_no_room_for_an_answer_are_learnt_from_and_counted(alone, tmp_path, capsys, as_rows):
    long = [(f"{digit}" + "+0" * 14 + "=", "1") for digit in range(9)]
    rows = [{"prompt": prompt, "answer": answer} if as_rows else said(prompt, answer) for prompt, answer in long]
    lay_out(tmp_path, *rows)
    summary = run(loaded(alone, "sft.max_num_steps=2", "data.prompt_format=plain"))
    assert summary["steps"] == 2
    told = "2 held-out prompts leave no room for a response of policy.generation.max_new_tokens=4"
    assert told in " ".join(capsys.readouterr().out.split())


def test_bad_rows_are_left_out_and_counted_where_the_recipe_says_so(alone, tmp_path):
    bad = {"messages": [{"role": "bot", "content": "3"}]}
    lay_out(tmp_path, bad, *(said(f"{digit}+0=", str(digit)) for digit in range(8)))
    with pytest.raises(DataError, match=r"talks.jsonl:1: field 'messages\[0\].role' must be one of"):
        load_dataset(loaded(alone).value)
    _, skipped = load_dataset(loaded(alone, "data.on_bad_row=skip").value)
    assert skipped.count == 1


@pytest.mark.parametrize(
    ("rows", "reasons"),
    [
        ([said("1+0=", "1"), {"message": []}], ["talks.jsonl:2", "'messages'", "the row has 'message'"]),
        ([{"messages": [{"role": "bot", "content": "3"}]}] * 2, ["talks.jsonl:1", "messages[0].role"]),
        ([{"prompt": "1+0="}, {"prompt": "2+0="}], ["talks.jsonl:1", "'prompt' + 'answer'"]),
        ([{"prompt": "1+0=", "answer": "1"}, said("2+0=", "2")], ["talks.jsonl:2", "field 'prompt' is missing"]),
        ([said("1+0=", "1" * 40), said("2+0=", "2")], ["the conversation has", "context is 32"]),
    ],
)
def test_a_bad_row_is_refused_by_file_line_and_field(alone, tmp_path, rows, reasons):
    lay_out(tmp_path, *rows)
    with pytest.raises(DataError) as refused:
        run(loaded(alone))
    assert all(reason in str(refused.value) for reason in reasons), refused.value
    assert not (tmp_path / "run").exists()


GRPO = "grpo={max_num_steps: 2, num_prompts: 2, num_generations_per_prompt: 2, optimizer: {lr: 0.01}}"


@pytest.mark.parametrize(
    ("overrides", "reasons"),
    [
        ([GRPO], ["grpo learns from rewards, and env is missing", 'env: {reward: "reward.py:score"}']),
        (
            ["distill={max_num_steps: 2, num_prompts: 2, optimizer: {lr: 0.01}, teacher: {model_name: a/b}}"],
            ["distill", "env is missing"],
        ),
        (["dpo={max_num_steps: 2, optimizer: {lr: 0.01}}"], ["dpo", "env is missing", "dpo.pairs=data"]),
        (["checkpointing.keep_top_k=1"], ["metric_name=held_out_greedy", "set metric_name=held_out_loss"]),
        (["evaluation.samples_per_prompt=4"], ["evaluation.samples_per_prompt=4 concerns responses with rewards"]),
        (["evaluation.pass_reward=0.5"], ["evaluation.pass_reward=0.5 concerns", "leave the key out, or write env:"]),
        (["sft.train_on=last"], ["sft.train_on", "last_turn"]),
    ],
)
def test_what_needs_a_judge_is_refused_with_what_to_write(alone, overrides, reasons):
    with pytest.raises(RecipeError) as refused:
        loaded(alone, *overrides)
    assert all(reason in " ".join(str(refused.value).split()) for reason in reasons), refused.value


def test_conversations_are_refused_where_prompts_are_asked(alone, tmp_path):
    judged = [GRPO, f"env.reward={tmp_path}/reward.py:score"]
    with pytest.raises(DataError, match=r"talks.jsonl:1: field 'prompt' is missing.*set grpo=null"):
        load_dataset(loaded(alone, *judged).value)


def test_data_that_nothing_could_be_measured_by_are_refused(alone, tmp_path):
    (tmp_path / "made.py").write_text(
        "from rl_algorithms.data import Dataset, make_row\n"
        "def rows(*numbers):\n"
        "    return [make_row({'prompt': f'{n}+0='}, where=str(n)) for n in numbers]\n"
        "def data():\n"
        "    return Dataset(train=rows(1), held_out=rows(2), demonstrations=rows(1))\n"
    )
    with pytest.raises(Refusal, match="nothing would be measured"):
        load_dataset(loaded(alone, f"data.source={tmp_path}/made.py:data", "data.held_out_share=null").value)


def test_the_commands_know_runs_without_a_judge(alone, tmp_path):
    def invoke(*arguments):
        result = CliRunner().invoke(app, [*map(str, arguments)])
        return result.exit_code, " ".join(result.output.split())

    code, output = invoke("validate", alone)
    assert code == 0, output
    code, output = invoke("explain", alone)
    assert code == 0, output
    assert "7 conversations to train on, 2 held out" in output
    assert "no reward (env is null)" in output
    code, output = invoke("run", alone, "sft.max_num_steps=2")
    assert code == 0, output
    code, output = invoke("report", tmp_path / "run")
    assert code == 0, output
    code, output = invoke("evaluate", tmp_path / "run")
    assert code == 2
    assert "the recipe has no env" in output
    assert 'env: {reward: "reward.py:score"}' in output
