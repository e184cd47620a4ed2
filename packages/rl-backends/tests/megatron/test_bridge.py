"""Claims about Megatron-Bridge: what is refused before it can be silently wrong, and on a GPU that it agrees."""

import importlib.util
import json
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch

from rl_backends.errors import MissingDependencyError, ModelError
from rl_backends.megatron import bridge
from rl_backends.megatron.config import MegatronConfig


def provider(**fields):
    """The fields of a provider that positions are read from, as Megatron-Bridge 0.3.1 names and defaults them."""
    plain = {
        "position_embedding_type": "rope",
        "rotary_base": 1_000_000.0,
        "rotary_percent": 1.0,
        "rope_scaling": False,
        "rope_scaling_factor": 1.0,
        "yarn_rotary_scaling_factor": None,
        "yarn_original_max_position_embeddings": None,
    }
    return SimpleNamespace(**plain | fields)


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
AS_YARN = {
    "position_embedding_type": "yarn",
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        ({"rope_theta": 1e6}, {}),
        ({"rope_theta": 1_000_000, "rope_scaling": None}, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {}),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.5}, {"rotary_percent": 0.5}),
        ({"rope_theta": 1e6, "rope_scaling": LLAMA3}, {"rope_scaling": True, "rope_scaling_factor": 32.0}),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, AS_YARN),
        ({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, {"rotary_base": (1e4, 1e6)}),
        ({}, {"position_embedding_type": "learned_absolute"}),
    ],
)
def test_positions_that_agree_pass(config, fields):
    assert bridge.rope_differences(config, provider(**fields)) == []


@pytest.mark.parametrize(
    ("config", "fields", "said"),
    [
        ({"rope_theta": 1e6}, {"rotary_base": 10000}, "rope_theta=1000000.0 of config.json is rotary_base=10000"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            {"rotary_base": 10000},
            "rope_theta=500000.0 of config.json is rotary_base=10000",
        ),
        ({}, {}, "rope_theta=None of config.json is rotary_base=1000000.0"),
        (
            {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
            {},
            "partial_rotary_factor=0.25 of config.json is rotary_percent=1.0",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": LLAMA3},
            {},
            "rope_type=llama3 of config.json is rope_scaling=default",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}},
            {"rope_scaling": True, "rope_scaling_factor": 32.0},
            "original_max_position_embeddings=4096 of config.json is megatron-core's constant=8192",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {},
            "rope_type=linear of config.json is position_embedding_type=rope",
        ),
        (
            {"rope_parameters": YARN | {"rope_theta": 1e6}},
            {},
            "rope_type=yarn of config.json is position_embedding_type=rope",
        ),
        (
            {"rope_theta": 1e6, "rope_scaling": YARN},
            AS_YARN | {"yarn_rotary_scaling_factor": 1.0},
            "factor=4.0 of config.json is yarn_rotary_scaling_factor=1.0",
        ),
        ({"rope_theta": 1e6}, {"rope_scaling": True}, "rope_type=default of config.json is rope_scaling=llama3"),
        (
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {},
            "rope_theta=(10000.0, 1000000.0) of config.json is rotary_base=1000000.0",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            {},
            "one kind of positions for each kind of layer cannot be compared",
        ),
    ],
)
def test_positions_that_differ_are_named(config, fields, said):
    differences = bridge.rope_differences(config, provider(**fields))
    assert any(said in difference for difference in differences), differences


def test_a_model_whose_positions_would_be_wrong_is_refused_by_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"rope_theta": 1e6}}))
    with pytest.raises(ModelError, match=r"other positions than .*rotary_base=10000\. Weights would be the same"):
        bridge._require_same_positions(tmp_path, provider(rotary_base=10000))


@pytest.fixture
def pretend_installed(monkeypatch):
    """Releases as metadata names them, and whether there are Transformer Engine and a GPU."""

    def pretend(*, engine=True, gpu=True, **releases):
        def version(name):
            if (release := releases.get(name.replace("-", "_"))) is None:
                raise metadata.PackageNotFoundError(name)
            return release

        def find_spec(name, real=importlib.util.find_spec):
            return (object() if engine else None) if name == "transformer_engine" else real(name)

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return pretend


def test_the_releases_that_it_was_made_for_pass(pretend_installed):
    pretend_installed(megatron_bridge="0.3.1", transformers="4.57.6")
    assert bridge.bridge_problem() is None


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ({"transformers": "4.57.6"}, "megatron-bridge is not installed, and >=0.3.1,<0.4 is needed"),
        ({"megatron_bridge": "0.2.0", "transformers": "4.57.6"}, "megatron-bridge 0.2.0 is installed"),
        ({"megatron_bridge": "0.4.1", "transformers": "4.57.6"}, "megatron-bridge 0.4.1 is installed"),
        (
            {"megatron_bridge": "0.3.1", "transformers": "5.19.0"},
            "transformers 5.19.0 is installed, and >=4.57,<5 is needed",
        ),
        (
            {"megatron_bridge": "0.3.1", "transformers": "4.57.6", "engine": False},
            "transformer_engine is not installed",
        ),
        ({"megatron_bridge": "0.3.1", "transformers": "4.57.6", "gpu": False}, "torch sees no GPU"),
    ],
)
def test_what_it_was_not_made_for_is_said(pretend_installed, installed, said):
    pretend_installed(**installed)
    assert said in bridge.bridge_problem()


def test_all_that_is_missing_is_said_at_once(pretend_installed):
    pretend_installed(transformers="5.19.0", engine=False, gpu=False)
    assert len(bridge.bridge_problem().split("; ")) == 4


@pytest.mark.skipif(bridge.bridge_problem() is None, reason="Megatron-Bridge can be used here")
def test_where_it_cannot_be_used_nothing_of_it_is_imported(tmp_path, imported):
    with pytest.raises(MissingDependencyError, match=r"Megatron-Bridge cannot be used here: .*need none of it"):
        bridge.build_through_bridge(tmp_path, MegatronConfig())
    assert not [name for name in sys.modules if name.startswith("megatron.bridge")]


@pytest.mark.gpu
@pytest.mark.skipif(bridge.bridge_problem() is not None, reason=f"Megatron-Bridge: {bridge.bridge_problem()}")
def test_a_bridged_model_computes_what_hugging_face_does_and_exports_the_same_bits(world, tmp_path):
    from rl_backends.megatron.groups import ParallelGroups

    reference = world.make_model("Qwen3", rope_theta=1e6, max_position_embeddings=512).cuda()
    reference.save_pretrained(tmp_path)
    config = MegatronConfig(device="cuda")
    groups = ParallelGroups.join(config)
    try:
        bridged = bridge.build_through_bridge(tmp_path, config)
        tokens = torch.randint(0, 67, (1, 256), device="cuda")
        with torch.no_grad():
            ours = bridged.module(tokens, torch.arange(256, device="cuda")[None], None)[..., :67]
            theirs = reference(tokens).logits
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-4, atol=1e-4)
        for name, tensor in bridged.export():
            assert torch.equal(tensor, reference.state_dict()[name].cpu()), name
    finally:
        groups.leave()
