"""Claims about bad input: one screen, exit code 2, the reason and the way out, and nothing left behind."""

import json
import sys

import pytest
from typer.testing import CliRunner

from rl_launcher.cli import app

CASES = {
    "unknown key": (
        ["grpo.objective.ratio.clip_hi=0.3"],
        ['override "grpo.objective.ratio.clip_hi=0.3"', "did you mean grpo.objective.ratio.clip_high?"],
    ),
    "unknown section": (["polcy.model_name=x"], ["did you mean", "policy"]),
    "wrong type": (["grpo.max_num_steps=many"], ["grpo.max_num_steps", "wanted int"]),
    "out of range": (["grpo.objective.ratio.clip_low=2"], ["grpo.objective.ratio", "must be between 0 and 1"]),
    "warm-up as long as the stage": (
        ["sft.optimizer.warmup_steps=6"],
        ["sft.optimizer.warmup_steps=6", "max_num_steps=6"],
    ),
    "no stage": (["sft=null", "grpo=null"], ["nothing to train"]),
    "missing data file": (["data.source={folder}/none.jsonl"], ["none.jsonl: there is no such file"]),
    "missing model folder": (["policy.model_name={folder}/none"], ["none: does not exist", "save_pretrained wrote"]),
    "no GPU": (
        ["policy.dtensor_cfg.device=cuda", "policy.model_name={folder}/model.py:build"],
        ["dtensor_cfg.device=cuda", "sees no GPU", "set device=cpu"],
    ),
    "no vLLM": (["policy.generation.backend=vllm"], ["vLLM is not installed", "rl-launcher[vllm]"]),
    "no vLLM for a cluster of its own": (
        ["policy.generation.backend=vllm", "cluster.runtime=ray", "cluster.gpus_per_node=2"],
        ["vLLM is not installed", "rl-launcher[vllm]"],
    ),
    "missing reward file": (["env.reward={folder}/none.py:score"], ["there is no file", "none.py"]),
    "missing reward function": (["env.reward={folder}/reward.py:scor"], ["has no scor", "score"]),
    "reward that is no function": (["env.reward={folder}/reward.py:not_callable"], ["must be callable"]),
    "data function that is none": (
        ["data.source={folder}/reward.py:score", "data.held_out_share=null"],
        ["raised TypeError"],
    ),
    "data function that returns none": (["data.source=builtins:dict", "data.held_out_share=null"], ["returned dict"]),
    "share for a function": (["data.source={folder}/model.py:build"], ["leave data.held_out_share out"]),
    "columns for a function": (
        ["data.source={folder}/model.py:build", "data.held_out_share=null", "data.columns={{prompt: question}}"],
        ["leave data.columns out"],
    ),
    "a column that the rows lack": (["data.columns={{prompt: promt}}"], ["rows.jsonl:1: field 'promt' is missing"]),
    "a name that no prompt has": (["data.columns={{promt: prompt}}"], ["no 'promt'", "'prompt' is the nearest"]),
    "a split of a file": (["data.split=train"], ["split='train' is for data sets", "leave it out"]),
    "a file of another kind": (["data.source={folder}/reward.py"], ["is of no known kind", ".parquet"]),
    "nothing that judges": (["env.reward=null"], ["none of them: a response gets its reward from one of", "give one"]),
    "reward and rewards": (
        ["env.rewards={{right: a.py:b}}"],
        ["a response gets its reward from one of `reward`", "set the others to null"],
    ),
    "a weight of no reward": (["env.weights={{right: 2}}"], ["weights names right", "not named"]),
    "one of the rewards is none": (
        ["env.reward=null", "env.rewards={{right: '{folder}/reward.py:scor'}}"],
        ["env.rewards.right", "has no scor"],
    ),
    "rewards compared one by one without names": (
        ["grpo.objective.advantage.normalize_each_reward=true"],
        ["compares rewards by name", "env.rewards"],
    ),
    "another vocabulary": (["policy.model_name={folder}/model.py:other_vocabulary"], ["64 embeddings", "51 tokens"]),
    "no chat template": (["policy.model_name={folder}/model.py:no_template"], ["chat template", "plain"]),
    "reward of another signature": (["env.reward={folder}/reward.py:wants_more"], ["requires solution", "answer"]),
    "no backend": (
        ["policy.dtensor_cfg.enabled=false"],
        ["dtensor_cfg.enabled and megatron_cfg.enabled are both false"],
    ),
    "impossible settings of both backends": (
        ["policy.dtensor_cfg.sequence_parallel=true", "policy.megatron_cfg.sequence_parallel=true"],
        ["2 problems", "needs tensor_parallel_size > 1", "needs tensor_model_parallel_size > 1"],
    ),
    "too many ranks": (["policy.dtensor_cfg.tensor_parallel_size=2"], ["tensor_parallel_size=2"]),
    "unwritable run directory": (["run_dir=/proc/run"], ["run_dir='/proc/run' cannot be written"]),
}


def refuse(arguments):
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert len(result.output.splitlines()) < 24
    return " ".join(result.output.split())


@pytest.mark.parametrize(("overrides", "said"), CASES.values(), ids=CASES)
def test_a_refusal_says_what_and_why_and_leaves_nothing(recipe, tmp_path, overrides, said):
    output = refuse([str(recipe), *(override.format(folder=tmp_path) for override in overrides)])
    for text in said:
        assert text in output
    assert not (tmp_path / "run").exists()


def test_several_ranks_are_refused(recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE=2; start it without torchrun" in refuse([str(recipe)])


def test_an_unknown_key_in_the_file_is_found_by_its_line(recipe):
    recipe.write_text(recipe.read_text().replace("num_prompts", "number_of_prompts"))
    line = next(n for n, text in enumerate(recipe.read_text().splitlines(), 1) if "number_of_prompts" in text)
    output = refuse([str(recipe)])
    assert f"recipe.yaml:{line}" in output
    assert "grpo.num_prompts" in output


def test_a_missing_recipe_is_named(tmp_path):
    assert "none.yaml" in refuse([str(tmp_path / "none.yaml")])


def test_a_malformed_row_is_found_by_file_line_and_field(recipe, tmp_path):
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows[4] = json.dumps({"prompt": 4, "answer": "4"})
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert "rows.jsonl:5: field 'prompt' must be text or a list of messages, found int 4" in refuse([str(recipe)])


def test_a_format_whose_reader_is_missing_is_refused_with_what_to_install(recipe, tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    output = refuse([str(recipe), f"data.source={tmp_path}/rows.parquet"])
    assert "rows.parquet: reading it needs pyarrow" in output
    assert "pip install 'rl-algorithms[data]'" in output


def test_a_row_without_the_answer_that_sft_needs_is_named(recipe, tmp_path):
    rows = [json.dumps({"prompt": f"{digit}+0="}) for digit in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    judged_by_length = f"env.reward={tmp_path}/reward.py:returns_nan"
    assert "field 'answer' is missing, and SFT needs it" in refuse([str(recipe), judged_by_length])


def test_a_prompt_that_the_tokenizer_cannot_encode_is_named(recipe, tmp_path):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('\n{"prompt": "naïve", "answer": "1"}')
    assert "rows.jsonl:9: the tokenizer cannot encode" in refuse([str(recipe)])


def test_a_prompt_longer_than_the_context_is_named_before_anything_is_trained(recipe, tmp_path):
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"prompt": "1" * 40, "answer": "1"}))
    assert "rows.jsonl:9: the prompt has 43 tokens" in refuse([str(recipe)])


def test_a_second_run_into_the_same_directory_is_refused_and_the_first_stays(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious.txt").write_text("mine")
    assert "exists and is not empty" in refuse([str(recipe)])
    assert (tmp_path / "run" / "precious.txt").read_text() == "mine"


def test_a_reward_that_raises_stops_the_run_names_the_sample_and_keeps_the_weights(recipe, tmp_path):
    result = CliRunner().invoke(app, ["run", str(recipe), f"env.reward={tmp_path}/reward.py:fails_on_five"])
    assert result.exit_code == 1
    output = " ".join(result.output.split())
    assert "prompt '5+0='" in output
    assert "ZeroDivisionError" in output
    assert "env.on_error" in output
    assert "Traceback" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert list((tmp_path / "run" / "checkpoints").glob("*/complete.json"))
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_reward_that_is_nan_stops_the_run_and_names_the_sample(recipe, tmp_path):
    result = CliRunner().invoke(app, ["run", str(recipe), f"env.reward={tmp_path}/reward.py:returns_nan"])
    assert result.exit_code == 1
    assert "it returned nan, which is not a finite number" in " ".join(result.output.split())
