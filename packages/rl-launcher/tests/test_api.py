"""`rl_launcher.train` and its neighbours do with Python objects what the command line does with names and files."""

import asyncio
import json
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

import rl_launcher
from rl_algorithms.contracts import EnvironmentReturn
from rl_launcher import Refusal, RunResult, RunStoppedError
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.recipe_files import RecipeError

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
TINY = {
    "cpu_threads": 1,
    "policy": {"generation": {"max_new_tokens": 3}},
    "evaluation": {"max_prompts": 2, "every": 0, "samples": 1},
    "logger": {"tensorboard_enabled": False},
}
GRPO = {"max_num_steps": 2, "num_prompts": 8, "optimizer": {"lr": 1e-3, "warmup_steps": 1}}


def score(completions, answer, **_):
    return [(text[:1] == right[:1]) + len(text) / 9 for text, right in zip(completions, answer, strict=True)]


def short(completions, **_):
    return [1.0 / (1 + len(text)) for text in completions]


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, tokenizer = build(0)
    return {"model": model, "tokenizer": tokenizer, "data": ROWS, "reward": score}


def train(parts, recipe="grpo", **keys):
    return rl_launcher.train(recipe, **{**parts, **TINY, "grpo": GRPO, **keys})


def test_importing_rl_launcher_loads_neither_torch_nor_transformers():
    code = "import rl_launcher, sys; print({'torch', 'transformers', 'ray', 'pydantic'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"


def test_a_model_rows_and_a_reward_are_trained_and_the_result_holds_what_came_of_it(parts, tmp_path):
    result = train(parts)
    assert result.run_dir == tmp_path / "runs" / "grpo"
    assert [line["step"] for line in result.metrics if "loss" in line] == [1, 2]
    assert result.summary["algorithm"] == "grpo"
    assert result.report.is_file()
    assert str(result.run_dir) in repr(result)
    assert len(repr(result).splitlines()) <= 24


def test_the_model_object_is_trained_in_place_and_the_result_holds_a_copy_of_the_same_weights(parts):
    before = {name: tensor.clone() for name, tensor in parts["model"].state_dict().items()}
    saved = train(parts).model
    after = parts["model"].state_dict()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(after[name], tensor) for name, tensor in saved.state_dict().items())
    assert saved is not parts["model"]


def test_a_model_may_be_a_folder_and_a_model_object_finds_the_tokenizer_that_it_was_loaded_with(parts, tmp_path):
    for part in ("model", "tokenizer"):
        parts[part].save_pretrained(tmp_path / "mine")
    by_name = train({**parts, "model": tmp_path / "mine", "tokenizer": None})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    by_object = train({**parts, "model": loaded, "tokenizer": None})
    assert [line["loss"] for line in by_object.metrics if "loss" in line] == [
        line["loss"] for line in by_name.metrics if "loss" in line
    ]


def test_rows_that_are_held_out_are_given_or_cut_from_the_others(parts):
    result = train(parts, held_out=[{"prompt": "9+9=", "answer": "18"}], evaluation={"max_prompts": 5, "samples": 1})
    assert result.summary["held_out_size"] == 1
    assert "held out list of 1 rows" in (result.run_dir / "recipe.yaml").read_text()


def test_an_environment_class_replaces_the_reward(parts):
    class Once:
        def reset(self, *, seed, row):
            return row["prompt"]

        def step(self, response):
            return EnvironmentReturn(reward=float(len(response)), terminated=True)

        def close(self):
            pass

    result = train({**parts, "reward": None, "environment": Once})
    assert result.summary["steps"] == 2
    assert "<python object: class " in (result.run_dir / "recipe.yaml").read_text()


def test_the_recorded_recipe_describes_objects_and_where_functions_are_defined(parts):
    text = (train(parts).run_dir / "recipe.yaml").read_text()
    assert "model_name: '<python object: Qwen3ForCausalLM>'" in text
    assert "source: '<python object: list of 36 rows>'" in text
    assert "<python object: function score at" in text
    assert "test_api.py:" in text


def test_a_second_run_gets_a_directory_of_its_own(parts):
    assert [train(parts).run_dir.name for _ in range(2)] == ["grpo", "grpo-2"]


def test_a_run_directory_that_is_named_and_holds_a_run_is_refused(parts):
    train(parts, run_dir="runs/mine")
    with pytest.raises(Refusal, match="exists and is not empty"):
        train(parts, run_dir="runs/mine")


def test_a_list_of_rewards_is_logged_by_the_names_of_its_functions(parts):
    result = train({**parts, "reward": [score, short]}, env={"weights": {"short": 0.1}})
    assert {"reward/score", "reward/short"} <= {key for line in result.metrics for key in line}


def test_conversational_prompts_are_read_as_trl_writes_them(parts):
    chats = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    texts = train(parts).metrics[-1]["reward"]
    _, again = build(0)
    model, _ = build(0)

    def score_messages(completions, answer, **_):
        return score([messages[-1]["content"] for messages in completions], answer)

    chat = {**parts, "model": model, "tokenizer": again, "data": chats, "reward": score_messages}
    assert train(chat).metrics[-1]["reward"] == texts


def test_a_recipe_may_be_a_dict_and_names_may_stand_for_objects(parts, tmp_path):
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "judge.py").write_text(
        "def score(completions, **_):\n    return [float(len(c)) for c in completions]\n"
    )
    recipe = {"policy": {"model_name": "rl_launcher.quickstart.tiny_model:build"}, "sft": None, "grpo": GRPO}
    recipe["policy"] |= TINY["policy"]
    recipe |= {"env": {"reward": "judge.py:score"}, "data": {"source": "rows.jsonl"}}
    assert train({}, recipe).run_dir.name == "grpo"


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        ({"grpo": {"max_num_steps": 7}}, 7),
        ({"grpo.max_num_steps": 7}, 7),
        ({"overrides": ["grpo.max_num_steps=7"]}, 7),
        ({"overrides": {"grpo.max_num_steps": 7}}, 7),
    ],
)
def test_overrides_are_nested_dotted_or_as_on_the_command_line(keys, value):
    keys = {"grpo.optimizer.warmup_steps": 1, **keys}
    assert rl_launcher.load_recipe("grpo", **keys).value.grpo.max_num_steps == value


def test_a_wrong_key_is_answered_by_the_nearest_one():
    with pytest.raises(RecipeError, match=r"did you mean grpo\.max_num_steps"):
        rl_launcher.load_recipe("grpo", grpo={"max_step": 3})


def test_rows_that_are_given_are_not_read_with_the_recipes_columns_and_split(parts):
    recipe = {"policy": {"model_name": "x", **TINY["policy"]}, "grpo": GRPO, "env": {"rewards": {"a": "a.py:b"}}}
    recipe["data"] = {"source": "openai/gsm8k", "name": "main", "split": "train", "columns": {"prompt": "question"}}
    assert train(parts, recipe).summary["steps"] >= 1


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"model": 3}, "model= is a int"),
        ({"tokenizer": None}, "give tokenizer= too"),
        ({"reward": 0.5}, "reward= is a float"),
        ({"reward": {"right": score, "long": 1}}, "reward 'long' is a int"),
        ({"environment": dict}, "exclude each other"),
        ({"reward": None, "environment": object()}, "environment= is a object"),
        ({"data": iter(ROWS)}, "give list"),
        ({"data": None, "held_out": ROWS}, "give data= too"),
        ({"overrides": "seed=1"}, "give a list"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_by_its_name_and_nothing_is_left(parts, tmp_path, wrong, reason):
    with pytest.raises(Refusal, match=reason):
        train({**parts, **wrong})
    assert not (tmp_path / "runs").exists()


def stopping_at(calls):
    count = 0

    def score(completions, **_):
        nonlocal count
        count += 1
        if count > calls:
            raise KeyError("the judge is ill")
        return [float(len(text)) for text in completions]

    return score


def test_a_run_that_stops_carries_its_result_and_goes_on_when_the_objects_are_given_again(parts):
    with pytest.raises(RunStoppedError) as stopped:
        train({**parts, "reward": stopping_at(3)})
    result = stopped.value.result
    assert result.metrics
    with pytest.raises(Refusal, match="holds no model"):
        _ = result.model
    with pytest.raises(Refusal) as refused:
        rl_launcher.resume(result)
    assert "model was a Python object (python object: Qwen3ForCausalLM)" in str(refused.value)
    assert "rl_launcher.resume(" in str(refused.value)
    assert "model=..., data=..., reward=..." in str(refused.value)
    model, tokenizer = build(5)  # other weights: those of the checkpoint are what counts
    again = rl_launcher.resume(result, model=model, tokenizer=tokenizer, data=ROWS, reward=stopping_at(99))
    assert again.summary["steps"] == 2


def test_evaluate_measures_the_model_of_a_run_by_the_objects_that_it_is_given(parts):
    result = train(parts)
    with pytest.raises(Refusal, match=r"data was a Python object .* and reward was"):
        rl_launcher.evaluate(result)
    measured = rl_launcher.evaluate(result, data=ROWS, reward=score)
    assert measured.figures()["held_out_greedy"] == pytest.approx(result.summary["held_out_greedy_after"])


def test_explain_reports_what_train_would_do_with_the_same_objects(parts):
    explained = rl_launcher.explain("grpo", **parts, **TINY)
    assert "32 prompts to train on, 4 held out" in explained.text()
    assert explained.figures["rank_peak_bytes"] > 0


def test_it_trains_off_the_main_thread_and_within_a_running_event_loop(parts):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(parts)))
    thread.start()
    thread.join()
    assert found[0].summary["steps"] == 2

    async def cell():
        model, tokenizer = build(0)
        return train({**parts, "model": model, "tokenizer": tokenizer})

    assert asyncio.run(cell()).summary["steps"] == 2


def test_a_data_frame_without_pandas_is_refused_by_the_package_it_needs(parts, monkeypatch):
    result = train(parts)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(Refusal, match="pip install pandas"):
        _ = result.dataframe


def test_a_notebook_shows_the_summary_of_the_report(parts):
    html = train(parts)._repr_html_()
    assert "held-out" in html
    assert "<script" not in html


def test_a_result_is_opened_from_the_directory_of_an_earlier_run(parts):
    result = train(parts)
    assert RunResult(result.run_dir).metrics == result.metrics
