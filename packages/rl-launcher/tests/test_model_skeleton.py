"""The model as the driver of a Ray run sees it, and the name under which its ranks load it."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from rl_launcher.quickstart.tiny_model import build
from rl_launcher.ray.build import read_skeleton
from rl_launcher.user_code import Objects


def named(name):
    return SimpleNamespace(model_name=str(name), revision=None, trust_remote_code=False)


@pytest.fixture
def read(tmp_path):
    def read(name, **objects):
        return read_skeleton(
            named(name),
            seed=0,
            key="policy.model_name",
            padded_vocabulary=False,
            folder=tmp_path / "initial",
            objects=Objects(**objects),
        )

    return read


def test_a_model_that_a_function_makes_is_saved_where_ranks_find_it(read, tmp_path):
    (tmp_path / "initial").mkdir()
    (tmp_path / "initial" / "of an earlier start").write_text("")
    skeleton = read("rl_launcher.quickstart.tiny_model:build")
    assert skeleton.name == str(tmp_path / "initial")
    assert not (tmp_path / "initial" / "of an earlier start").exists()
    expected = build(0)[0].state_dict()
    for name, tensor in load_file(tmp_path / "initial" / "model.safetensors").items():
        assert torch.equal(tensor, expected[name])


def test_a_model_object_is_saved_as_it_is_whatever_the_recipe_names(read, tmp_path):
    model, tokenizer = build(3)
    skeleton = read("nobody/has-this", model=model, tokenizer=tokenizer)
    assert (skeleton.name, skeleton.model, skeleton.tokenizer) == (str(tmp_path / "initial"), model, tokenizer)
    saved = load_file(tmp_path / "initial" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in saved.items())


def test_a_folder_is_read_without_its_weights_and_a_tokenizer_object_replaces_its_own(read, tmp_path):
    model, tokenizer = build(0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    skeleton = read(tmp_path / "model", tokenizer=tokenizer)
    assert (skeleton.name, skeleton.tokenizer) == (str(tmp_path / "model"), tokenizer)
    assert {parameter.device.type for parameter in skeleton.model.parameters()} == {"meta"}
    assert not (tmp_path / "initial").exists()
