"""Claims about a run: what it leaves, that it repeats, that the user's own parts take three keys."""

import dataclasses
import json
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
import transformers
import yaml
from pydantic import TypeAdapter
from typer.testing import CliRunner

from rl_algorithms import presets
from rl_algorithms.objective import Objective
from rl_backends.loading.source import stop_token_ids
from rl_backends.metrics.step import StepMetrics
from rl_launcher.build.inputs import load_dataset
from rl_launcher.checkpoints.disk import claimed
from rl_launcher.checks.explain import explain
from rl_launcher.cli import app
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.run.record import TRAINER_FIGURES, trainer_figures
from rl_launcher.schema import DataConfig, Recipe
from rl_observe import RunDirectory
from rl_observe.glossary import metric_of


def run_recipe(recipe, *overrides):
    return run(load_recipe(recipe, schema=Recipe, overrides=overrides))


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_leaves_all_that_it_promises_and_ends_with_its_result(recipe, tmp_path):
    result = CliRunner().invoke(app, ["run", str(recipe)])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    run_dir = tmp_path / "run"
    assert summary["run_dir"] == str(run_dir)
    assert summary["steps"] == 14
    assert summary["interrupted"] is False
    assert sum(summary["phase_share"].values()) == pytest.approx(1.0, abs=1e-2)
    assert {"generate", "reward", "train", "refit", "other"} <= summary["phase_share"].keys()
    for name in ("held_out_sampled_before", "held_out_sampled_after", "held_out_greedy_after", "wall_s"):
        assert isinstance(summary[name], float)
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    promised = (
        "metrics.jsonl model recipe.yaml recipe_origins.json refits.jsonl report.html samples.jsonl spans.jsonl "
        "steps summary.json tensorboard versions.json"
    )
    assert sorted(path.name for path in run_dir.iterdir()) == promised.split()
    steps = read_lines(run_dir / "metrics.jsonl")
    assert [(line["stage"], line["step"]) for line in steps] == [
        *(("sft", step) for step in range(1, 7)),
        *(("grpo", step) for step in (0, 2, 4, 6, 8)),
    ]
    assert steps[-1]["version"] == 14
    assert steps[-1]["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
    assert [line["when"] for line in read_lines(run_dir / "samples.jsonl")] == ["before"] * 2 + ["after"] * 2
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert load_recipe(run_dir / "recipe.yaml", schema=Recipe).value == load_recipe(recipe, schema=Recipe).value


def test_the_saved_model_is_a_hugging_face_folder_that_goes_on_training(recipe, tmp_path):
    run_recipe(recipe)
    folder = tmp_path / "run" / "model"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert tokenizer.chat_template
    again = run_recipe(recipe, f"policy.model_name={folder}", "sft=null", f"run_dir={tmp_path}/again")
    first = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert again["held_out_greedy_before"] == first["held_out_greedy_after"]


def curve(run_dir):
    of_the_machine = ("time_s", "tokens_per_s", "refit_s", "phase_s", "memory_")
    return [
        {name: value for name, value in line.items() if not name.startswith(of_the_machine)}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(recipe, tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        run_recipe(recipe, f"run_dir={tmp_path}/{name}", f"seed={seed}")
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert curve(tmp_path / "a") != curve(tmp_path / "c")


def test_the_engine_is_refitted_after_every_batch_and_says_so(recipe, tmp_path):
    summary = run_recipe(recipe)
    assert summary["refit"]["version"] == 14
    assert summary["refit"]["count"] == 1 + 2 + 4  # at the start, twice in sft (evaluations), after each GRPO batch
    assert summary["refit"]["digest"]
    weights = sum(
        p.numel() * 4
        for p in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").parameters()
    )
    assert summary["refit"]["bytes"] >= weights


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_run_may_be_sft_alone_or_sft_and_dpo(recipe, tmp_path, algorithm):
    overrides = ["grpo=null"]
    if algorithm == "dpo":
        stage = (
            "{max_num_steps: 3, batch_size: 4, num_prompts: 6, num_generations_per_prompt: 8, optimizer: {lr: 0.001}}"
        )
        overrides += [f"dpo={stage}", "evaluation.every=1"]
    summary = run_recipe(recipe, *overrides)
    assert summary["algorithm"] == algorithm
    assert summary["steps"] == (9 if algorithm == "dpo" else 6)
    last = read_lines(tmp_path / "run" / "metrics.jsonl")[-1]
    if algorithm == "dpo":
        assert {"held_out_margin", "held_out_pair_accuracy", "held_out_greedy"} <= last.keys()


def test_rewards_that_cannot_be_given_count_as_zero_only_when_asked_for(recipe, tmp_path):
    summary = run_recipe(recipe, f"env.reward={tmp_path}/reward.py:returns_nan", "env.on_error=zero")
    assert summary["reward_errors"] > 0


@pytest.mark.parametrize("suffix", [".json", ".parquet", ""])
def test_rows_of_any_format_and_under_any_names_are_the_same_data(recipe, tmp_path, suffix):
    columns = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    theirs = [{"question": row["prompt"], "meta": {"solution": row["answer"]}} for row in columns]
    source = tmp_path / f"theirs{suffix}"
    if suffix == ".json":
        source.write_text(json.dumps(theirs))
    else:
        dataset = datasets.Dataset.from_list(theirs)
        if suffix:
            dataset.to_parquet(source)
        else:
            datasets.DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(source)
    names = {"prompt": "question", "answer": "meta.solution"}
    split = None if suffix else "train"
    plain = replace(load_recipe(recipe, schema=Recipe).value, data=DataConfig(source=str(tmp_path / "rows.jsonl")))
    ours, _ = load_dataset(plain)
    other, _ = load_dataset(replace(plain, data=DataConfig(source=str(source), columns=names, split=split)))
    for part in ("train", "held_out", "demonstrations"):
        said = [[(row.messages, row.answer) for row in getattr(data, part)] for data in (ours, other)]
        assert said[0] == said[1]


def test_bad_rows_are_left_out_only_when_asked_for_and_the_run_says_which(recipe, tmp_path, capsys):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"prompt": 9, "answer": "9"}\n{"answer": "no prompt"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:9: field 'prompt'"):
        run_recipe(recipe)
    summary = run_recipe(recipe, "data.on_bad_row=skip", "grpo=null")
    assert summary["rows_skipped"] == 2
    said = " ".join(capsys.readouterr().out.split())
    assert "data.on_bad_row=skip: skipped 2 of 10 rows" in said
    assert "rows.jsonl:10: field 'prompt' is missing" in said
    explained = CliRunner().invoke(app, ["explain", str(recipe), "data.on_bad_row=skip"]).output
    assert "6 prompts to train on, 2 held out" in explained
    assert "skipped 2 of 10 rows" in explained


def test_rows_that_the_model_cannot_read_are_left_out_of_all_stages_when_asked_for(recipe, tmp_path, capsys):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"prompt": 9, "answer": "9"}\n' + json.dumps({"prompt": "1" * 40, "answer": "1"}))
        file.write('\n{"prompt": "naïve", "answer": "1"}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:9: field 'prompt'"):
        run_recipe(recipe)
    summary = run_recipe(recipe, "data.on_bad_row=skip", "grpo.max_num_steps=2", "data.held_out_share=0.2")
    assert summary["rows_skipped"] == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "data.on_bad_row=skip: skipped 3 of 11 rows" in said
    assert "rows.jsonl:9: field 'prompt'" in said
    assert "rows.jsonl:10: " in said
    assert "rows.jsonl:11: the tokenizer cannot encode" in said


def test_data_of_which_no_row_can_be_read_is_refused_even_where_bad_rows_are_left_out(recipe, tmp_path):
    rows = [{"prompt": f"{digit}" * 40, "answer": "1"} for digit in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    with pytest.raises(
        ValueError, match=r"none of the \d held-out prompts can be used; the first: .*:\d: the prompt has"
    ):
        run_recipe(recipe, "data.on_bad_row=skip")
    assert not (tmp_path / "run").exists()


def test_several_rewards_are_weighed_added_and_logged_each(recipe, tmp_path):
    (tmp_path / "reward.py").write_text(
        "def length(completions):\n    return [float(len(c)) for c in completions]\n"
        "def variety(completions):\n    return [float(len(set(c))) for c in completions]\n"
    )
    rewards = f"env.rewards={{length: '{tmp_path}/reward.py:length', variety: '{tmp_path}/reward.py:variety'}}"
    gdpo = "grpo.objective.advantage={normalize_each_reward: true, reward_weights: {variety: 2}, whiten: sequences}"
    run_recipe(recipe, "sft=null", "env.reward=null", rewards, "env.weights={length: -0.5}", gdpo)
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "sampled_tokens" in line]
    assert steps
    for step in steps:
        assert step["reward/length"] == pytest.approx(-0.5 * step["environment/length"])
        assert step["reward"] == pytest.approx(step["reward/length"] + step["reward/variety"])


def test_every_figure_that_a_run_logs_is_explained(recipe, tmp_path):
    (tmp_path / "two.py").write_text("def ones(completions):\n    return [1.0] * len(completions)\n")
    rewards = f"env.rewards={{score: '{tmp_path}/reward.py:score', ones: '{tmp_path}/two.py:ones'}}"
    everything = [
        "grpo.steps_per_generation=1",
        (
            "grpo.objective={kl: {weight: 0.1}, correction: {weight: token}, ratio: {proximal: recomputed}, "
            "selection: {max_generation_batches: 2}, entropy_weight: 0.01}"
        ),
    ]
    dpo = "dpo={max_num_steps: 2, batch_size: 4, num_prompts: 6, num_generations_per_prompt: 8, optimizer: {lr: 0.001}}"
    run_recipe(recipe, "env.reward=null", rewards, *everything)
    run_recipe(recipe, "grpo=null", dpo, f"run_dir={tmp_path}/dpo")
    lines = [line for name in ("run", "dpo") for line in read_lines(tmp_path / name / "metrics.jsonl")]
    logged = {name for line in lines for name in line} - {"stage", "step", "time_s"}
    assert {"kl_reference", "effective_sample_size", "reward/ones", "environment/ones", "staleness"} <= logged
    assert not [name for name in logged if metric_of(name) is None]


def test_each_optimizer_step_logs_what_the_trainer_measured(recipe, tmp_path):
    def of_trainer(name, *overrides):
        run_recipe(recipe, f"run_dir={tmp_path}/{name}", *overrides)
        lines = [line for line in read_lines(tmp_path / name / "metrics.jsonl") if line["step"]]
        assert {line["stage"] for line in lines} == {"sft", "grpo"}
        return [({*line} & {*TRAINER_FIGURES.values()}, line) for line in lines]

    known = {"padding_share", "load_balance"}
    for names, line in of_trainer("cpu"):
        assert names == (known if line.get("loss") is not None else set())
    with_peak = of_trainer("peak", "policy.dtensor_cfg.peak_flops_per_s=1.0e+12")
    trained = [line for names, line in with_peak if names == known | {"mfu"}]
    assert trained
    for line in trained:
        assert 0 < line["mfu"] < 1
        assert 0 <= line["padding_share"] < 1
        assert line["load_balance"] == 1  # of one rank
    assert metric_of("mfu").unit == metric_of("padding_share").unit == "share"


def test_trainer_figures_are_of_whatever_measures_them():
    assert trainer_figures(SimpleNamespace()) == trainer_figures(SimpleNamespace(metrics=lambda **_: None)) == {}
    measured = SimpleNamespace(
        mfu=None, padding_share=0.25, load_balance=1.5, peak_allocated_bytes=2**30, device_used_bytes=2**31
    )
    assert trainer_figures(SimpleNamespace(metrics=lambda **_: measured)) == {
        "padding_share": 0.25,
        "load_balance": 1.5,
        "memory_trainer_peak_bytes": 2**30,
        "memory_device_bytes/training": 2**31,
    }
    fields = {field.name for field in dataclasses.fields(StepMetrics)}
    assert fields.issuperset(TRAINER_FIGURES)
    assert all(metric_of(name) for name in TRAINER_FIGURES.values())


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "every step logs its padding_share and load_balance; no mfu, since nobody states the peak of a CPU"),
        (["policy.dtensor_cfg.peak_flops_per_s=1.0e+12"], "every step logs its mfu, padding_share and load_balance"),
    ],
)
def test_explain_says_which_figures_of_the_trainer_are_logged(recipe, overrides, said):
    assert said in explain(load_recipe(recipe, schema=Recipe, overrides=overrides)).sections["Backend"]


def test_the_shipped_recipe_of_dapo_is_the_preset(request):
    objective = load_recipe(request.config.rootpath / "recipes" / "dapo.yaml", schema=Recipe).value.grpo.objective
    assert objective == presets.dapo(max_length=256, overlong_buffer=64)


def test_the_objectives_that_the_reference_spells_are_the_presets():
    readme = (Path(__file__).parents[1] / "REFERENCE.md").read_text()
    block = readme.partition("<!-- objectives -->")[2].partition("```yaml\n")[2].partition("```")[0]
    spelt = yaml.safe_load(block)
    assert len(spelt) >= 5
    for name, objective in spelt.items():
        known = {"dr_grpo": {"max_length": 256}}.get(name, {})
        assert TypeAdapter(Objective).validate_python(objective) == getattr(presets, name)(**known), name


def test_the_shipped_recipes_are_valid(request):
    recipes = sorted((request.config.rootpath / "recipes").glob("*.yaml"))
    assert len(recipes) >= 2
    for file in recipes:
        load_recipe(file, schema=Recipe)


@pytest.mark.parametrize("name", ["grpo", pytest.param("dapo", marks=pytest.mark.slow)])
def test_a_recipe_for_ones_own_takes_model_data_and_reward_by_three_keys(request, recipe, tmp_path, name):
    mine = [
        f"policy.model_name={tmp_path}/model.py:build",
        f"data.source={tmp_path}/rows.jsonl",
        f"env.reward={tmp_path}/reward.py:score",
    ]
    short = [
        "grpo.max_num_steps=4",
        "grpo.optimizer.warmup_steps=0",
        "grpo.num_prompts=2",
        "policy.generation.max_new_tokens=4",
        f"run_dir={tmp_path}/run",
    ]
    file = request.config.rootpath / "recipes" / f"{name}.yaml"
    summary = run_recipe(file, *mine, *short)
    assert summary["algorithm"] == "grpo"
    assert summary["steps"] == 4
    explained = CliRunner().invoke(app, ["explain", str(file), *mine, *short, f"run_dir={tmp_path}/other"]).output
    assert "A = (R - mean(R of the group)) / (std(R of the group) + 1e-06)" in explained
    assert ("up to 10 batches of prompts" in explained) == (name == "dapo")


def test_a_run_that_never_stepped_fails_and_names_the_likely_causes(recipe, tmp_path):
    (tmp_path / "reward.py").write_text("def score(completions):\n    return [0.5] * len(completions)\n")
    result = CliRunner().invoke(app, ["run", str(recipe), "sft=null"])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "grpo took no optimizer step: the rewards were equal within every group" in said
    assert "rl-launcher try-reward RECIPE" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["ended_by"], summary["batches"], summary["steps"]) == ("no_signal", 4, 0)
    assert not (tmp_path / "run" / "error.txt").exists()  # nothing was raised that a traceback would explain


def test_online_dpo_that_never_finds_a_pair_fails_in_the_same_way(recipe, tmp_path):
    (tmp_path / "reward.py").write_text("def score(completions):\n    return [0.5] * len(completions)\n")
    online = (
        "dpo={pairs: online, max_num_steps: 2, num_prompts: 2, num_generations_per_prompt: 2, optimizer: {lr: 0.01}}"
    )
    with pytest.raises(RunStoppedError, match="dpo took no optimizer step: no two responses to a prompt had different"):
        run_recipe(recipe, "sft=null", "grpo=null", online)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["ended_by"], summary["batches"], summary["steps"]) == ("no_signal", 2, 0)


def test_batches_and_optimizer_steps_are_counted_apart(recipe, tmp_path, capsys):
    (tmp_path / "reward.py").write_text(
        "calls = []\n"
        "def score(completions):\n"
        "    calls.append(1)\n"
        "    return [float(len(calls) == 3 and row % 2) for row, _ in enumerate(completions)]\n"
    )
    summary = run_recipe(recipe, "sft=null", "evaluation.every=0")  # calls 1 and 2 are the evaluation before
    assert (summary["batches"], summary["steps"]) == (4, 2)
    assert "grpo  2/8 (+6 without a signal)" in capsys.readouterr().out


def test_the_condition_no_signal_quotes_two_responses_with_their_rewards(recipe, tmp_path):
    (tmp_path / "reward.py").write_text("def score(completions):\n    return [0.25] * len(completions)\n")
    with pytest.raises(RunStoppedError):
        run_recipe(recipe, "sft=null", "health={no_signal_batches: 2, on_no_signal: stop}")
    events = read_lines(tmp_path / "run" / "events.jsonl")
    assert [event["name"] for event in events] == ["no_signal", "no_signal"]  # it was noticed, and ended the run
    assert events[0]["step"] == 4
    assert events[0]["message"].count("0.25") == 2


def test_trainer_and_engine_agree_at_another_temperature_too(recipe, tmp_path):
    run_recipe(recipe, "policy.generation.temperature=0.6")
    errors = [
        line["token_mult_prob_error"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "entropy" in line
    ]
    assert errors
    assert max(errors) <= 1.0001


def test_every_stop_token_of_the_model_ends_an_answer():
    model = types.SimpleNamespace(generation_config=types.SimpleNamespace(eos_token_id=[7, 2, 9]))
    assert stop_token_ids(model, types.SimpleNamespace(eos_token_id=2)) == (2, 7, 9)


def test_a_refused_run_removes_no_folder_of_the_users(recipe, tmp_path):
    (tmp_path / "mine").mkdir()
    for run_dir, left in ((tmp_path / "mine", True), (tmp_path / "new" / "deep", False)):
        with pytest.raises(ValueError, match="there is no such file"):
            run_recipe(recipe, f"run_dir={run_dir}", "data.source=none.jsonl")
        assert run_dir.exists() == left
    assert not (tmp_path / "new").exists()


def test_a_second_run_in_the_same_folder_at_the_same_moment_takes_nothing_from_the_first(recipe, tmp_path, monkeypatch):
    first = RunDirectory.create(tmp_path / "run")
    monkeypatch.setattr(RunDirectory, "create", lambda path: replace(first, path=Path(path)))  # found empty before
    monkeypatch.setattr("rl_launcher.checks.preflight.check", lambda *_, **__: None)
    with claimed(first):
        first.recipe.write_text("seed: 1")
        with pytest.raises(Refusal, match="is in use by"):
            run_recipe(recipe)
    with pytest.raises(Refusal, match=r"has just been filled by another run \(it holds recipe\.yaml\)"):
        run_recipe(recipe)
    assert first.recipe.read_text() == "seed: 1"


def test_a_column_that_only_some_rows_have_may_be_asked_for(recipe, tmp_path):
    rows = (tmp_path / "rows.jsonl").read_text().replace(', "answer": "0"', "")
    (tmp_path / "rows.jsonl").write_text(rows)
    (tmp_path / "reward.py").write_text(
        "def score(completions, answer):\n"
        "    return [float(a is None) + len(set(c)) / 5 for c, a in zip(completions, answer)]\n"
    )
    assert run_recipe(recipe, "sft=null")["reward_errors"] == 0


def test_explain_says_what_would_happen_and_trains_nothing(recipe, tmp_path):
    result = CliRunner().invoke(app, ["explain", str(recipe), "seed=7"])
    assert result.exit_code == 0, result.output
    for text in (
        'override "seed=7"',
        "6 prompts to train on, 2 held out",
        "dtensor trains the policy: dtensor_cfg.enabled is true, and megatron_cfg.enabled is false",
        "DTensorBackend of Qwen3ForCausalLM (2.80 K parameters) on 1 cpu rank",
        "tied: model.embed_tokens.weight = lm_head.weight",
        "memory: a rank needs",
        "into 1 engine, in this process",
    ):
        assert text in result.stdout
    assert not (tmp_path / "run").exists()


def test_validate_prints_the_recipe_resolved(recipe, tmp_path):
    result = CliRunner().invoke(app, ["validate", "--print", str(recipe), "sft=null"])
    assert result.exit_code == 0, result.output
    (tmp_path / "resolved.yaml").write_text(result.stdout)
    resolved = load_recipe(tmp_path / "resolved.yaml", schema=Recipe).value
    assert resolved == load_recipe(recipe, schema=Recipe, overrides=["sft=null"]).value


def test_keys_lists_every_key_with_its_meaning():
    result = CliRunner().invoke(app, ["keys"])
    assert result.exit_code == 0
    rows = [line for line in result.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) > 50
    assert all(row.split("|")[-2].strip() for row in rows)


def test_a_report_is_written_again_from_the_log(recipe, tmp_path):
    run_recipe(recipe)
    report = tmp_path / "run" / "report.html"
    report.unlink()
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert report.read_text().lstrip().startswith("<!")


def test_help_and_version_of_the_command_need_no_torch():
    code = "import sys, rl_launcher.cli; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_threads_are_what_the_recipe_says(recipe):
    before = torch.get_num_threads()
    try:
        run_recipe(recipe, "cpu_threads=2", "grpo=null", "sft.max_num_steps=1")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
