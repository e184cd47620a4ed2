"""Claims about quirks on the installed vLLM: each that the table says it has is needed, and one that it lost is not.

Where a probe says that a quirk lost its need, bound its `versions`.
"""

import math
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import dummy_start
from packaging.version import Version
from transformers import AutoModelForCausalLM

from rl_generation.model_flags import MODEL_FLAGS, flags_for, installed_version

NOISE = 1e-3  # of the dummy loader, uniform within ± this
VLLM = installed_version()
HOLDING = [each for each in MODEL_FLAGS if each.holds_for(VLLM)]


def after_a_dummy_start(family, ending):
    """Values of the buffers of this name in all layers."""
    buffers = dummy_start.report()["engines"][family]["buffers"]
    found = [value for name, values in buffers.items() if name.endswith(f".{ending}") for value in values]
    assert found, f"{family} has no buffer {ending}: the probe is out of date"
    return found


def is_noise(values):
    return all(0 < abs(value) <= NOISE for value in values)


def gemma4_layer_scalar():
    return is_noise(after_a_dummy_start("gemma4_text", "layer_scalar"))


def apertus_xielu():
    return is_noise(after_a_dummy_start("apertus", "beta"))


def radio_layer_scale():
    unfed = dummy_start.report()["radio_unfed"]
    return {name.rsplit(".", 1)[1] for name in unfed} == {"ls1", "ls2"} and is_noise(unfed.values())


def image_normalization():
    values = dummy_start.report()["image_norm"]  # none where vLLM normalizes images elsewhere
    return bool(values) and is_noise(values)


def image_processor_tokenizer():
    # terratorch takes no tokens at all; every other processor of vLLM's that reads images is held by the rule.
    processor = dummy_start.report()["processor"]
    return "requires a tokenizer" in (processor["said"] or "") and processor["exempt"] == ["terratorch"]


PROBES = {
    "gemma4-layer-scalar": gemma4_layer_scalar,
    "apertus-xielu": apertus_xielu,
    "radio-layer-scale": radio_layer_scale,
    "image-normalization": image_normalization,
    "image-processor-tokenizer": image_processor_tokenizer,
}


def test_every_quirk_has_a_probe_and_every_probe_a_quirk():
    assert set(PROBES) == {each.name for each in MODEL_FLAGS}


@pytest.mark.parametrize("record", HOLDING, ids=lambda record: record.name)
def test_the_installed_vllm_still_needs(record):
    assert PROBES[record.name](), f"vLLM {VLLM} no longer needs {record.name}: bound its versions"


@pytest.mark.parametrize("name", sorted(PROBES))
def test_a_quirk_that_was_repaired_is_not_needed(name):
    record = next(each for each in MODEL_FLAGS if each.name == name)
    if not record.holds_for(VLLM):
        assert not PROBES[name]()


def test_a_dummy_start_leaves_the_normalizer_of_gemma_as_it_is():
    assert not flags_for("gemma3_text")
    (normalizer,) = after_a_dummy_start("gemma3_text", "normalizer")
    assert normalizer == pytest.approx(math.sqrt(dummy_start.SHAPE["hidden_size"]))


@pytest.mark.parametrize(("family", "ending"), [("gemma4_text", "layer_scalar"), ("apertus", "act_fn.beta")])
def test_a_refit_of_every_buffer_would_feed_what_a_dummy_start_overwrites(family, ending):
    model = AutoModelForCausalLM.from_config(dummy_start.config(family))
    assert any(name.endswith(ending) for name in model.state_dict())
    assert not any(name.endswith(ending) for name, _ in model.named_parameters())


def test_the_version_is_that_of_vllm_itself():
    import vllm

    assert Version(VLLM).release == Version(vllm.__version__).release
