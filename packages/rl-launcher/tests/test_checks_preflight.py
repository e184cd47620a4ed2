"""What cannot be is refused before any model is loaded: exit code 2, one screen, what, where and what to do."""

import os
import re

import pytest
from transformers import Qwen3Config
from typer.testing import CliRunner

from rl_backends.least_memory import host_bytes
from rl_launcher.checkpoints.disk import DiskSpaceError, claimed
from rl_launcher.checks import preflight
from rl_launcher.checks.preflight import KnownModel, check_disk, known_model, lacking_memory, least_needed
from rl_launcher.cli import app
from rl_launcher.errors import Refusal
from rl_launcher.quickstart.tiny_model import character_tokenizer
from rl_launcher.ray.placement import plan_placement
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory

GIB = 2**30
CASES = {
    "typo": (["grpo.num_promts=4"], ['override "grpo.num_promts=4"', "did you mean grpo.num_prompts?"]),
    "wrong type": (["grpo.num_prompts=many"], ['given "many" (a string), wanted int']),
    "missing model folder": (["policy.model_name={folder}/gpt"], ["policy.model_name=", "gpt: does not exist"]),
    "model folder of nearly that name": (["policy.model_name={folder}/modle"], ["did you mean", "model?"]),
    "folder without a model": (["policy.model_name={folder}"], ["has no config.json", "save_pretrained wrote"]),
    "key of no section": (["nonsense=1"], ["unknown key", "valid keys here: run_dir, seed,", "distill"]),
    "missing data file": (["data.source={folder}/row.jsonl"], ["there is no such file", "did you mean", "rows.jsonl?"]),
    "missing reward file": (
        ["env.reward={folder}/rewards.py:score"],
        ["there is no file", "did you mean", "reward.py?"],
    ),
    "missing file of one of several rewards": (
        ["env.reward=null", "env.rewards={{right: '{folder}/wrong.py:score'}}"],
        ["env.rewards.right=", "there is no file"],
    ),
    "missing environment": (
        ["env.reward=null", "env.environment={folder}/game.py:Game"],
        ["env.environment=", "there is no file"],
    ),
    "impossible mesh": (
        ["cluster={{runtime: ray, gpus_per_node: 4}}", "policy.dtensor_cfg.tensor_parallel_size=3"],
        ["policy.dtensor_cfg.tensor_parallel_size=3 needs a multiple of 3", "for 3 or 6 ranks"],
    ),
    "a mesh of several ranks in one process": (
        ["policy.dtensor_cfg.tensor_parallel_size=2"],
        ["tensor_parallel_size=2"],
    ),
    "too little memory": (["policy.model_name={folder}/huge"], ["at least", "of memory", "this machine has"]),
    "teacher that is not there": (
        ["grpo=null", "distill={{max_num_steps: 2, optimizer: {{lr: 0.1}}, teacher: {{model_name: '{folder}/big'}}}}"],
        ["distill.teacher.model_name=", "does not exist"],
    ),
}


@pytest.fixture
def folder(recipe, tmp_path):
    """Beside the recipe: a small model's configuration, and one that no machine of today holds; no weights."""
    assert recipe.is_file()
    shape = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 4}
    Qwen3Config(**shape, hidden_size=64, intermediate_size=64, vocab_size=64).save_pretrained(tmp_path / "model")
    huge = {**shape, "hidden_size": 262144, "intermediate_size": 1048576, "num_hidden_layers": 2}
    Qwen3Config(**huge, vocab_size=64).save_pretrained(tmp_path / "huge")
    (tmp_path / "model.py").write_text("raise SystemExit('the model was loaded')")
    return tmp_path


@pytest.mark.parametrize(("overrides", "said"), CASES.values(), ids=CASES)
def test_it_is_refused_before_the_model_is_loaded(recipe, folder, overrides, said):
    named = any(each.startswith("policy.model_name") for each in overrides)
    own = [] if named else [f"policy.model_name={folder}/model"]
    given = [*own, *(override.format(folder=folder) for override in overrides)]
    result = CliRunner().invoke(app, ["validate", str(recipe), *given])
    output = " ".join(result.output.split())
    assert result.exit_code == 2, output
    assert "the model was loaded" not in output
    assert "Traceback" not in output
    assert len(result.output.splitlines()) < 24
    for text in said:
        assert text in output


def test_a_run_directory_that_is_taken_is_refused_by_a_new_run_alone(recipe, folder):
    (folder / "run").mkdir()
    (folder / "run" / "precious.txt").write_text("mine")
    loaded = load_recipe(recipe, schema=Recipe).value
    preflight.check(loaded, new_run=False)
    with pytest.raises(Refusal, match=r"is not empty \(it holds precious.txt, …\); choose another run_dir"):
        preflight.check(loaded, new_run=True)


def said_by(*arguments):
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.parametrize("command", ["run", "validate", "explain"])
def test_a_tokenizer_without_a_template_is_refused_without_the_weights(recipe, folder, command):
    tokenizer = character_tokenizer()
    Qwen3Config(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1).save_pretrained(folder / "model")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder / "model")
    (folder / "model" / "model.safetensors").write_bytes(b"no weights")
    code, output = said_by(command, recipe, f"policy.model_name={folder}/model")
    assert code == 2
    assert "data.prompt_format=chat needs a tokenizer with a chat template" in output
    assert "data.prompt_format=plain" in output


@pytest.mark.parametrize("command", ["validate", "explain"])
def test_a_reward_that_asks_for_a_column_of_no_row_is_refused(recipe, folder, command):
    (folder / "model.py").write_text("raise SystemExit('the model was loaded')")
    other = (folder / "reward.py").read_text() + "\ndef wants_more(completions, solution):\n    return []\n"
    (folder / "reward.py").write_text(other)
    model = f"policy.model_name={folder}/model"
    code, output = said_by(command, recipe, model, f"env.reward={folder}/reward.py:wants_more")
    assert code == 2
    assert "requires solution" in output


def test_explain_shows_what_is_too_large_and_ends_with_the_refusal(recipe, folder):
    code, output = said_by("explain", recipe, f"policy.model_name={folder}/huge")
    assert code == 2
    assert output.index("Placement") < output.index("a rank needs") < output.index("and training it takes at least")
    assert "explain shows the details" not in output


def test_validate_says_that_a_run_would_find_its_directory_taken(recipe, folder):
    (folder / "run").mkdir()
    (folder / "run" / "precious.txt").write_text("mine")
    code, output = said_by("validate", recipe, f"policy.model_name={folder}/model")
    assert code == 0
    assert "`rl-launcher run` will refuse it as it is: run_dir=" in output


def test_a_run_directory_of_a_run_that_goes_on_names_its_process(recipe, folder):
    (folder / "run").mkdir()
    loaded = load_recipe(recipe, schema=Recipe).value
    with (
        claimed(RunDirectory(folder / "run"), new=True),
        pytest.raises(Refusal, match=f"process {os.getpid()} of .* is running it now"),
    ):
        preflight.check(loaded, new_run=True)


def test_a_place_that_cannot_be_written_is_not_told_to_be_full(recipe, folder):
    code, output = said_by("run", recipe, f"policy.model_name={folder}/model", "run_dir=/proc/x")
    assert code == 2
    assert "run_dir='/proc/x' cannot be written" in output


def loaded_with(recipe, *overrides):
    value = load_recipe(recipe, schema=Recipe, overrides=overrides).value
    model = known_model(value.policy) or KnownModel(name="billion", parameters=10**9)
    return value, model, plan_placement(value)


def test_what_a_run_holds_at_least_is_its_weights_gradients_moments_and_engine(recipe):
    value, model, placement = loaded_with(recipe)
    needs = least_needed(value, model=model, placement=placement)
    assert (needs.trainer_bytes, needs.frozen_bytes, needs.engine_bytes) == (16 * 10**9, 0, 4 * 10**9)
    value, _, _ = loaded_with(recipe, "grpo.objective.kl.weight=0.1")
    assert least_needed(value, model=model, placement=placement).frozen_bytes == 4 * 10**9
    value, _, _ = loaded_with(recipe, "sft=null", "grpo=null")
    assert least_needed(value, model=model, placement=placement).trainer_bytes == 4 * 10**9


def test_an_engine_of_vllm_has_the_trainers_precision_unless_the_recipe_gives_it_another(recipe):
    vllm = "policy.generation.backend=vllm"
    trainer, engine = "policy.dtensor_cfg.precision=bfloat16", "policy.generation.vllm_cfg.precision=float32"
    for overrides, wanted in (([vllm], 4), ([vllm, trainer], 2), ([vllm, trainer, engine], 4)):
        value, model, placement = loaded_with(recipe, *overrides)
        assert least_needed(value, model=model, placement=placement).engine_bytes == wanted * 10**9, overrides


def test_memory_is_refused_exactly_where_the_least_is_more_than_there_is(recipe):
    value, model, placement = loaded_with(recipe)
    assert lacking_memory(value, model=model, placement=placement, available_bytes=20 * 10**9) is None
    lacking = lacking_memory(value, model=model, placement=placement, available_bytes=20 * 10**9 - 1)
    assert re.search(r"has 1.00 billion parameters.*at least 18.6 GiB.*cluster.gpus_per_node", lacking)


def test_replicas_of_the_shards_and_each_engine_count(recipe):
    cluster = "cluster={runtime: ray, gpus_per_node: 4}"
    value, model, placement = loaded_with(recipe, cluster, "policy.dtensor_cfg.data_parallel_replicate_size=2")
    needs = least_needed(value, model=model, placement=placement)
    assert (needs.trainer_bytes, needs.engine_bytes) == (32 * 10**9, 16 * 10**9)


def test_other_machines_memory_is_not_guessed(recipe):
    value, model, placement = loaded_with(
        recipe, "cluster={runtime: ray, address: auto, num_nodes: 2, gpus_per_node: 2}"
    )
    huge = KnownModel(name="x", parameters=10**13)
    assert lacking_memory(value, model=huge, placement=placement) is None
    assert model.parameters == 10**9


def test_this_machine_has_memory():
    assert host_bytes() > GIB


def test_a_disk_without_room_for_what_is_kept_is_refused(recipe):
    value, model, _ = loaded_with(recipe, "checkpointing={save_period: 2, ft_keep_latest_k: 2}")
    needed = 12 * 10**9 * 3 + 4 * 10**9
    check_disk(value, model=model, free_bytes=needed)
    with pytest.raises(DiskSpaceError, match=r"needs at least .*ft_keep_latest_k=2"):
        check_disk(value, model=model, free_bytes=needed - 1)
