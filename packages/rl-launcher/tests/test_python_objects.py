"""Data, rewards and environments given as Python objects replace what the recipe names as strings."""

import json
from dataclasses import replace

import pytest

from rl_algorithms.contracts import Conversation, EnvironmentReturn
from rl_algorithms.data import DataError
from rl_algorithms.environments import RewardError
from rl_launcher.build.environments import load_environment
from rl_launcher.build.inputs import load_dataset, read_inputs
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import EnvironmentConfig, Recipe
from rl_launcher.user_code import Objects

ROWS = [{"prompt": f"{number}+0=", "answer": str(number)} for number in range(10)]


def conversation(text="4", answer="4"):
    return Conversation(messages=({"role": "user", "content": "2+2="},), answer=text, row={"answer": answer})


def right(completions, answer):
    return [float(each == wanted) for each, wanted in zip(completions, answer, strict=True)]


def short(completions):
    return [1.0 / len(each) for each in completions]


@pytest.fixture
def plain(recipe):
    return load_recipe(recipe, schema=Recipe, overrides=["sft=null"]).value


def prompts(rows):
    return sorted(row.prompt for row in rows)


def test_rows_as_a_list_are_read_and_cut_as_the_same_rows_of_a_file(plain, tmp_path):
    (tmp_path / "others.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    of_list, _ = load_dataset(plain, Objects(data=ROWS))
    of_path, _ = load_dataset(plain, Objects(data=tmp_path / "others.jsonl"))
    for part in ("train", "held_out"):
        assert prompts(getattr(of_list, part)) == prompts(getattr(of_path, part)) != []


def test_a_data_set_of_hugging_face_is_read_as_its_rows(plain):
    datasets = pytest.importorskip("datasets")
    of_list, _ = load_dataset(plain, Objects(data=ROWS))
    of_dataset, _ = load_dataset(plain, Objects(data=datasets.Dataset.from_list(ROWS)))
    assert prompts(of_dataset.held_out) == prompts(of_list.held_out)


def test_held_out_rows_that_are_given_are_the_ones_held_out_and_no_others(plain):
    dataset, _ = load_dataset(plain, Objects(data=ROWS[:7], held_out=ROWS[7:]))
    assert prompts(dataset.train) == prompts_of(ROWS[:7])
    assert prompts(dataset.held_out) == prompts_of(ROWS[7:])


def prompts_of(rows):
    return sorted(row["prompt"] for row in rows)


def test_held_out_rows_may_stand_beside_data_that_the_recipe_names(plain):
    dataset, _ = load_dataset(plain, Objects(held_out=[{"prompt": "never seen", "answer": "1"}]))
    assert prompts(dataset.held_out) == ["never seen"]


def test_a_held_out_row_that_is_trained_on_is_refused(plain):
    with pytest.raises(DataError, match="also trained on"):
        load_dataset(plain, Objects(data=ROWS, held_out=ROWS[:1]))


@pytest.mark.parametrize("stages", [["grpo=null", "env=null", "sft={max_num_steps: 1}"]])
def test_conversations_and_their_held_out_ones_are_objects_too(recipe, stages):
    only_sft = load_recipe(recipe, schema=Recipe, overrides=stages).value
    chats = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": str(n)}]} for n in range(4)
    ]
    dataset, _ = load_dataset(only_sft, Objects(data=chats[:3], held_out=chats[3:]))
    assert (len(dataset.demonstrations), len(dataset.held_out_demonstrations)) == (3, 1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (iter(ROWS), r"data must be a list of dicts.* found list_iterator; give list"),
        (lambda: ROWS, r"data must be a list of dicts.* found function; call it"),
        ({"train": ROWS, "test": ROWS}, r"found dict with 'train', 'test'; give one of its values"),
        (7, r"data must be a list of dicts, a datasets\.Dataset or a path, found int$"),
    ],
)
def test_data_of_a_wrong_kind_are_refused_by_name(plain, data, said):
    with pytest.raises(DataError, match=said):
        load_dataset(plain, Objects(data=data))


def test_a_bad_row_of_a_list_is_named_by_its_index(plain):
    with pytest.raises(DataError, match=r"^data\[1\]: field 'prompt' is missing"):
        load_dataset(plain, Objects(data=[ROWS[0], {"question": "?"}]))
    with pytest.raises(DataError, match=r"^held_out\[0\]: field 'prompt' is missing"):
        load_dataset(plain, Objects(data=ROWS, held_out=[{"question": "?"}]))


def test_rows_replace_the_source_and_what_selects_a_part_of_it(plain):
    recipe = replace(plain, data=replace(plain.data, source="of/the-hub", split="train", name="main", revision="v1"))
    dataset, _ = load_dataset(recipe, Objects(data=ROWS))
    assert prompts([*dataset.train, *dataset.held_out]) == prompts_of(ROWS)


def test_a_reward_function_scores_in_place_of_the_recipes(plain):
    judge = load_environment(plain.env, Objects(reward=right))
    assert [each.reward for each in judge.step([conversation(), conversation("5")])] == [1.0, 0.0]


@pytest.mark.parametrize("reward", [[right, short], {"right": right, "short": short}])
def test_several_reward_functions_are_named_and_weighted(plain, reward):
    config = EnvironmentConfig(rewards={"right": "x:y", "short": "x:z"}, weights={"short": 0.5})
    (returned,) = load_environment(config, Objects(reward=reward)).step([conversation("44", "44")])
    assert dict(returned.rewards) == {"right": 1.0, "short": 0.25}


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        (7, "reward must be a function"),
        ([right, "rewards.py:score"], r"reward\[1\] must be a function"),
        ({"right": None}, r"reward\['right'\] must be a function"),
        ([], "has no function"),
        ([right, right], "several functions named right"),
    ],
)
def test_a_reward_of_a_wrong_kind_is_refused_by_name(reward, said):
    with pytest.raises(RewardError, match=said):
        load_environment(None, Objects(reward=reward))


class Batch:
    def __init__(self, reward=1.0):
        self.reward = reward

    def step(self, conversations):
        return [EnvironmentReturn(reward=self.reward, terminated=True) for _ in conversations]


def test_an_environment_class_is_made_with_the_options_of_the_recipe():
    config = EnvironmentConfig(environment="x:y", options={"reward": 0.5})
    (returned,) = load_environment(config, Objects(environment=Batch)).step([conversation()])
    assert returned.reward == 0.5
    (returned,) = load_environment(None, Objects(environment=Batch)).step([conversation()])
    assert returned.reward == 1.0


def test_an_environment_that_is_made_already_is_refused():
    with pytest.raises(Refusal, match=r"environment must be a class or function.* found an object of type Batch"):
        load_environment(None, Objects(environment=Batch()))
    with pytest.raises(Refusal, match="both given"):
        load_environment(None, Objects(environment=Batch, reward=right))


def test_the_columns_of_the_rows_are_checked_against_the_reward_that_is_given(plain):
    def needs_solution(completions, solution):
        return [0.0 for _ in completions]

    with pytest.raises(ValueError, match="needs_solution requires solution"):
        read_inputs(plain, Objects(data=ROWS, reward=needs_solution))


def test_env_timeout_s_is_the_deadline_of_reward_functions(tmp_path):
    (tmp_path / "slow.py").write_text("import time\n\n\ndef slow(completions):\n    time.sleep(60)\n")
    judge = load_environment(EnvironmentConfig(reward=f"{tmp_path}/slow.py:slow", timeout_s=0.05))
    with pytest.raises(RewardError, match=r"slow took longer than timeout_s=0\.05 \(env\.timeout_s in a recipe\)"):
        judge.step([conversation()])
    assert load_environment(None, Objects(reward=right)).timeout_s == 300.0
