"""The command line: there at once, documented, one line of JSON for whoever measures, one screen for a mistake."""

import functools
import json
import operator
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from rl_launcher.cli import app
from rl_launcher.cli.arguments import complete_keys, complete_recipes
from rl_launcher.cli.console import or_refuse
from rl_launcher.recipe_files import load_recipe
from rl_launcher.recipe_files.shipped import shipped_recipes
from rl_launcher.schema import Recipe

COMMANDS = {
    "run",
    "resume",
    "explain",
    "validate",
    "try-reward",
    "evaluate",
    "report",
    "export",
    "recipes",
    "keys",
    "schema",
    "import-nemo-rl",
    "import-verl",
    "import-trl",
    "doctor",
    "render",
}


def invoke(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert "Traceback" not in result.output
    return result


def said(result):
    return " ".join(result.output.split())


def last_line(result):
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def finished(tmp_path_factory, write_recipe):
    """A run of a few steps of SFT, and its recipe."""
    folder = tmp_path_factory.mktemp("finished")
    file = write_recipe(folder)
    result = invoke("run", file, "grpo=null", "checkpointing.save_period=3")
    assert result.exit_code == 0, result.output
    return folder, file, result


def test_help_and_completion_import_nothing_heavy():
    code = (
        "import sys, rl_launcher.cli as cli\n"
        "from rl_launcher.cli.arguments import complete_keys\n"
        "assert complete_keys('grpo.num_p') == ['grpo.num_prompts=']\n"
        "print(sorted({'torch', 'transformers', 'ray', 'vllm', 'wandb'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_help_lists_every_command_and_the_exit_codes():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output
    for meaning in ("0 it holds", "2 refused or misused", "75 saved and ended at its time limit", "130 interrupted"):
        assert meaning in said(result)


def test_names_of_shipped_recipes_and_keys_complete():
    assert complete_recipes("grpo-8gpu-a") == ["grpo-8gpu-async"]
    assert "policy.dtensor_cfg.tensor_parallel_size=" in complete_keys("policy.dtensor_cfg.t")
    assert complete_keys("seed=") == []


def test_a_shipped_recipe_is_run_by_its_name_and_a_misspelt_one_is_answered():
    assert "quickstart" in shipped_recipes()
    valid = invoke("validate", "quickstart", "--json")
    assert valid.exit_code == 0
    ok, figures = valid.stdout.splitlines()
    assert ok == "OK: quickstart: sft (100 steps), then grpo (480 steps); run directory runs/quickstart"
    assert json.loads(figures)["stages"] == ["sft", "grpo"]
    result = invoke("validate", "quikstart")
    assert result.exit_code == 2
    assert "did you mean quickstart?" in said(result)


def test_recipes_are_listed_and_shown():
    listed = invoke("recipes", "list").output
    assert all(name in listed for name in shipped_recipes())
    assert invoke("recipes", "show", "dapo").output == shipped_recipes()["dapo"].read_text()
    assert invoke("recipes", "show", "dapoo").exit_code == 2


def test_keys_below_a_prefix_are_printed_and_a_wrong_prefix_is_answered():
    rows = invoke("keys", "grpo.async_grpo").output.splitlines()
    assert rows[2].startswith("| `grpo.async_grpo`")
    assert all("grpo.async_grpo" in row for row in rows[2:])
    wrong = invoke("keys", "grpo.asinc")
    assert wrong.exit_code == 2
    assert "did you mean grpo.async_grpo" in said(wrong)


@pytest.mark.parametrize("command", [["validate", "--print"], ["explain"]], ids=["validate", "explain"])
def test_credentials_are_not_printed(recipe, command):
    long, short = "verysecret" * 9, "zebrasecret"
    variables = f"cluster.env_vars={{MY_TOKEN: {long}, MY_PASSWORD: {short}, NCCL_DEBUG: INFO}}"
    result = invoke(*command, recipe, variables)
    assert result.exit_code == 0, result.output
    assert "verysecret" not in result.output
    assert short not in result.output
    assert "<redacted>" in result.output
    assert "INFO" in result.output


def test_a_place_in_an_error_is_no_emoji(recipe):
    assert "nope.py:x" in said(invoke("validate", recipe, "env.reward=nope.py:x:y"))
    assert "rows:smile:.jsonl" in said(invoke("validate", recipe, "data.source=rows:smile:.jsonl"))


def test_a_path_to_a_shipped_recipe_that_is_not_there_is_answered_with_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("validate", "recipes/grpo.yaml")
    assert result.exit_code == 2
    assert "a recipe of that name is shipped: write grpo instead" in said(result)


def test_a_file_that_cannot_be_written_is_answered_in_words(tmp_path):
    result = invoke("schema", "--out", tmp_path / "none" / "x.json")
    assert result.exit_code == 2
    assert f"there is no folder {tmp_path}/none; make it" in said(result)
    assert "Errno" not in result.output


def test_a_refusal_is_one_message_and_a_bug_is_raised(tmp_path, capsys):
    missing = tmp_path / "missing.yaml"
    refuse = functools.partial(load_recipe, missing, schema=Recipe)
    fail = functools.partial(operator.getitem, {}, "nothing")
    with pytest.raises(typer.Exit) as refused:
        or_refuse(refuse)
    assert refused.value.exit_code == 2
    message = capsys.readouterr().err
    assert message.startswith("rl-launcher: ")
    assert str(missing) in message
    assert "in load_recipe" not in message
    with pytest.raises(typer.Exit):
        or_refuse(refuse, traceback=True)
    assert "in load_recipe" in capsys.readouterr().err
    with pytest.raises(KeyError):
        or_refuse(fail)


def test_the_command_line_is_a_module_too():
    finished = subprocess.run(
        [sys.executable, "-m", "rl_launcher", "--help"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0
    assert "Usage: rl-launcher" in finished.stdout


def test_the_version_is_printed():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.startswith("rl-launcher ")


def test_a_model_is_evaluated_by_a_recipe(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = invoke("evaluate", tmp_path)
    assert result.exit_code == 2
    assert f"rl-launcher evaluate RECIPE --model {tmp_path}" in said(result)


def test_another_name_of_a_key_is_taken_and_explain_says_so(recipe):
    result = invoke("explain", recipe, "grpo=null", "policy.dtensor_config.micro_batch_size=3")
    assert result.exit_code == 0, result.output
    assert "policy.dtensor_cfg.micro_batch_size" in result.output
    assert "policy.dtensor_config" in result.output
    assert "is another name of policy.dtensor_cfg" in said(result)


def test_explain_ends_with_its_figures_where_asked(recipe):
    figures = last_line(invoke("explain", recipe, "--json"))
    assert figures["stages"] == ["sft", "grpo"]
    assert figures["rank_peak_bytes"] > figures["engine_weight_bytes"] > 0


def test_a_finished_run_is_evaluated_reported_and_exported(finished):
    folder, _, ran = finished
    summary = last_line(ran)
    measured = invoke("evaluate", folder / "run", "--json")
    assert measured.exit_code == 0, measured.output
    figures = last_line(measured)
    assert figures["held_out_greedy"] == summary["held_out_greedy_after"]
    assert "greedy reward" in measured.output
    report = invoke("report", folder / "run", "--trace", "--json")
    assert report.exit_code == 0, report.output
    assert (folder / "run" / "trace.json").is_file()
    assert str(folder / "run" / "report.html") in last_line(report)["written"]
    exported = invoke("export", folder / "run", folder / "exported")
    assert exported.exit_code == 0, exported.output
    assert (folder / "exported" / "model.safetensors").is_file()
    assert invoke("export", folder / "run", folder / "exported").exit_code == 2


def test_a_recipe_and_another_model_are_evaluated_with_pass_at_k(finished):
    folder, file, _ = finished
    several = ["evaluation.samples_per_prompt=4", "evaluation.pass_at=[1, 4]"]
    figures = last_line(invoke("evaluate", file, "--model", folder / "run" / "model", "--json", *several))
    assert figures["model"] == str(folder / "run" / "model")
    assert 0 <= figures["held_out_pass@4"] <= 1
    assert figures["samples_per_prompt"] == 4


def test_a_folder_that_is_no_run_is_not_evaluated(tmp_path):
    result = invoke("evaluate", tmp_path)
    assert result.exit_code == 2
    assert "is no run: it holds no recipe.yaml" in said(result)


def test_a_translation_lists_what_it_drops_where_asked_and_its_exit_code_says_whether_it_loads(tmp_path):
    theirs = tmp_path / "theirs.yaml"
    text = (
        "grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, max_num_steps: 9}\n"
        "policy: {model_name: a/b, train_global_batch_size: 32, dtensor_cfg: {enabled: true, _v2: true}}\n"
    )
    theirs.write_text(text)
    out = tmp_path / "ours.yaml"
    plain, verbose = (invoke("import-nemo-rl", theirs, "--out", out, *more) for more in ((), ("--verbose",)))
    assert (plain.exit_code, verbose.exit_code) == (0, 0), plain.output
    assert "policy.dtensor_cfg._v2" not in plain.output
    assert "policy.dtensor_cfg._v2" in verbose.output
    theirs.write_text(text.replace("max_num_steps: 9", "max_num_steps: -9"))
    refused = invoke("import-nemo-rl", theirs, "--out", out)
    assert refused.exit_code == 2, refused.output
    assert "refused by our schema" in refused.output


def test_explain_names_a_shipped_recipe_and_not_the_folder_that_it_is_installed_in():
    text = load_recipe(shipped_recipes()["grpo"], schema=Recipe).explain()
    assert "  shipped grpo.yaml:" in text
    assert "/recipes/" not in text


def test_jobs_are_rendered_for_slurm_and_kubernetes(tmp_path):
    slurm = invoke("render", "slurm", "grpo-2node", "seed=3", "--time", "04:00:00", "--out", tmp_path / "run.sbatch")
    assert slurm.exit_code == 0, slurm.output
    script = (tmp_path / "run.sbatch").read_text()
    assert "#SBATCH" in script
    # A shipped recipe goes by its name: where this rl-launcher is installed is no path of another machine.
    assert "ARGUMENTS=(grpo-2node seed=3 cluster.address=auto)" in script
    pods = invoke("render", "kubernetes", "grpo-2node", "--image", "me/mine:1", "--claim", "shared", "--port-gcs", 7000)
    assert pods.exit_code == 0, pods.output
    assert "kind: RayJob" in pods.output
    assert "ARGUMENTS=(grpo-2node cluster.address=auto)" in pods.output
    assert "the memory that a node needs is not known" in said(pods), "no model of 32B is here"
    own = tmp_path / "mine.yaml"
    own.write_text(f"defaults: {shipped_recipes()['grpo-2node']}\n")
    pods = invoke("render", "kubernetes", own, "--image", "me/mine:1", "--claim", "shared")
    assert "ARGUMENTS=(/shared/mine.yaml cluster.address=auto)" in pods.output, pods.output
    refused = invoke("render", "slurm", "quickstart", "--time", "04:00:00")
    assert refused.exit_code == 2
    assert "cluster.runtime" in said(refused)
