"""Configurations from wherever they lie, models without weights, and what is refused on the way."""

import json
import sys

import pytest
import torch
import transformers
from parallel_plans_cases.models import SHAPE

from rl_parallel_plans import PlanError
from rl_parallel_plans.model_source import build, read_config


@pytest.fixture
def folder(tmp_path):
    """A model's folder with a configuration and no weights."""
    transformers.Qwen3Config(
        **SHAPE, architectures=["Qwen3ForCausalLM"], dtype="bfloat16", tie_word_embeddings=True
    ).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_folder_and_file_are_the_same_configuration(folder):
    for source in (folder, str(folder), folder / "config.json"):
        config = read_config(source)
        assert (config.model_type, config.hidden_size) == ("qwen3", 64)


def test_type_of_model_is_its_default_configuration():
    assert read_config("qwen3").to_diff_dict() == transformers.Qwen3Config().to_diff_dict()


def test_hub_name_revision_and_trust_are_handed_on(monkeypatch):
    asked = {}
    monkeypatch.setattr(
        transformers.AutoConfig, "from_pretrained", lambda name, **options: asked.update(options, name=name)
    )
    read_config("somebody/model", revision="v1", trust_remote_code=True)
    assert asked == {"name": "somebody/model", "revision": "v1", "trust_remote_code": True}
    asked.clear()
    read_config("somebody/model")
    assert asked == {"name": "somebody/model", "trust_remote_code": False}


def test_what_the_hub_says_is_passed_on_in_one_line(monkeypatch):
    def refuse(name, **_):
        raise OSError(f"no route to {name}\nand a page of advice")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(PlanError, match=r"^somebody/model gave no configuration to .*: no route to somebody/model$"):
        read_config("somebody/model")


def test_bare_name_that_nothing_knows_is_refused_with_the_nearest_types(monkeypatch):
    def refuse(name, **_):
        raise OSError("nothing there")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(
        PlanError, match=r"^qwen33 is no folder, .* \(the nearest: qwen3, .*on the Hub .*: nothing there$"
    ):
        read_config("qwen33")


def test_folder_without_a_configuration_says_what_it_holds(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(PlanError, match=r"holds no config.json, but model.safetensors: pass the folder that does"):
        read_config(tmp_path)


@pytest.mark.parametrize("source", ["./qwen3-8b", "some/where/qwen3-8b", "missing/config.json"])
def test_path_that_does_not_exist_is_no_hub_name(source):
    with pytest.raises(PlanError, match=r"does not exist: pass a folder with a config.json"):
        read_config(source)


def test_unknown_type_of_model_is_refused_with_the_nearest(folder):
    rewrite(folder, model_type="qwen33")
    with pytest.raises(
        PlanError, match=rf"transformers {transformers.__version__} knows no model type 'qwen33'.*qwen3"
    ):
        read_config(folder)


def test_file_that_is_no_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(PlanError, match=r"gave no configuration to transformers"):
        read_config(tmp_path)


def test_missing_transformers_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PlanError, match="pip install transformers"):
        read_config("qwen3")


def test_model_has_the_class_dtype_and_ties_of_its_configuration_and_no_memory(folder):
    config = read_config(folder)
    before = config.to_dict()
    model = build(config)
    assert type(model) is transformers.Qwen3ForCausalLM
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config._attn_implementation == "sdpa"
    assert config.to_dict() == before
    assert torch.get_default_dtype() is torch.float32


def test_device_and_dtype_are_the_callers_where_given(folder):
    model = build(read_config(folder), device="cpu", dtype=torch.float64)
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("cpu", torch.float64)}
    logits = model(input_ids=torch.arange(4)[None]).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("llama4", "Llama4ForConditionalGeneration"),
        ("t5", "T5ForConditionalGeneration"),
    ],
)
def test_configuration_without_architectures_gets_the_class_of_its_type(kind, expected):
    config = read_config(kind)
    assert config.architectures is None
    if kind == "llama4" and transformers.__version__.startswith("4."):
        pytest.skip("the default Llama4Config of transformers 4 builds no model")
    assert type(build(config)).__name__ == expected


def test_class_that_this_release_lacks_is_refused_with_the_nearest(folder):
    rewrite(folder, architectures=["Qwen3ForCausalLMs"])
    match = (
        rf"Qwen3ForCausalLMs, which transformers {transformers.__version__} does not have: .*Qwen3ForCausalLM.*install"
    )
    with pytest.raises(PlanError, match=match):
        build(read_config(folder))


def test_name_of_something_else_is_no_model(folder):
    rewrite(folder, architectures=["AutoTokenizer"])
    with pytest.raises(PlanError, match=r"names AutoTokenizer, which is no torch model"):
        build(read_config(folder))


def test_configuration_that_its_class_refuses_is_told_with_the_reason(folder):
    rewrite(folder, hidden_act="no_such_activation")
    with pytest.raises(PlanError, match=r"Qwen3Config .* cannot be built by transformers .*no_such_activation"):
        build(read_config(folder))


REMOTE = {
    "configuration_mine.py": """
from transformers import PretrainedConfig
class MineConfig(PretrainedConfig):
    model_type = "mine"
""",
    "modeling_mine.py": """
import torch
from transformers import PreTrainedModel
from .configuration_mine import MineConfig
class MineForCausalLM(PreTrainedModel):
    config_class = MineConfig
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = torch.nn.Linear(2, 3)
        self.post_init()
""",
    "config.json": json.dumps(
        {
            "model_type": "mine",
            "architectures": ["MineForCausalLM"],
            "auto_map": {
                "AutoConfig": "configuration_mine.MineConfig",
                "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
            },
        }
    ),
}


def test_code_that_comes_with_a_model_runs_only_where_the_caller_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    source = tmp_path / "mine"
    source.mkdir()
    for name, text in REMOTE.items():
        (source / name).write_text(text)
    with pytest.raises(PlanError, match=r"comes with code of its own: read it, then pass --trust-remote-code"):
        read_config(source)
    config = read_config(source, trust_remote_code=True)
    with pytest.raises(PlanError, match=r"MineForCausalLM.* its code comes with the model: read it, then pass"):
        build(config)
    model = build(config, trust_remote_code=True)
    assert type(model).__name__ == "MineForCausalLM"
    assert model.lm_head.weight.device.type == "meta"
