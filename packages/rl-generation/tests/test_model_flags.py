"""Claims about the table of quirks: it says what it says for the versions it names, and it says nothing stale."""

import inspect
from importlib.metadata import version

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rl_generation.model_flags import (
    MODEL_FLAGS,
    ModelFlag,
    flags_for,
    installed_versions,
    load_format_for,
)

try:
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
except ModuleNotFoundError:  # torch 2.9
    from torch.distributed.tensor.experimental import _attention as ring

RELEASES = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 5)).map(lambda v: ".".join(map(str, v)))
EVERYTHING = {"vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}


def quirk(name):
    return next(each for each in MODEL_FLAGS if each.name == name)


def test_every_record_has_a_name_of_its_own_a_reason_and_a_source():
    assert len({each.name for each in MODEL_FLAGS}) == len(MODEL_FLAGS)
    for each in MODEL_FLAGS:
        assert each.model_types, each.name
        assert each.reason.endswith("."), each.name
        assert each.source.startswith("https://"), each.name
        SpecifierSet(each.versions)
        Version(each.checked)


def test_every_flag_has_a_record():
    assert {each.flag for each in MODEL_FLAGS} == set(ModelFlag)


@given(release=RELEASES)
def test_gemma_needs_its_checkpoint_exactly_below_the_release_that_repaired_it(release):
    repaired = tuple(map(int, release.split("."))) >= (0, 9, 2)
    for model_type in ("gemma", "gemma2", "gemma3", "gemma3_text"):
        chosen = load_format_for(model_type, refit_follows=True, versions={"vllm": release})
        assert chosen == ("dummy" if repaired else "auto")


@given(release=RELEASES)
def test_a_build_for_a_cpu_has_the_quirks_of_its_release(release):
    for model_type in {each for record in MODEL_FLAGS for each in record.model_types}:
        built = flags_for(model_type, versions={"vllm": f"{release}+cpu"})
        assert built == flags_for(model_type, versions={"vllm": release})


@given(release=RELEASES)
def test_a_development_build_has_the_quirks_of_a_release_before_it(release):
    holds = quirk("gemma4-layer-scalar").holds_for(f"{release}.dev7+g0123abc")
    assert holds == quirk("gemma4-layer-scalar").holds_for(release)


@given(older=RELEASES, newer=RELEASES)
def test_a_quirk_that_was_repaired_stays_repaired(older, newer):
    older, newer = sorted((older, newer), key=Version)
    for each in MODEL_FLAGS:
        if each.holds_for(newer):
            assert each.holds_for(older) or ">" in each.versions


def test_a_start_that_no_refit_follows_reads_the_checkpoint():
    assert load_format_for("llama", refit_follows=False, versions=EVERYTHING) == "auto"
    assert load_format_for("llama", refit_follows=True, versions=EVERYTHING) == "dummy"


def test_a_flag_answers_for_a_model_type():
    assert ModelFlag.VLLM_LOAD_FORMAT_AUTO.matches("apertus", versions=EVERYTHING)
    assert not ModelFlag.VLLM_TOKENIZER_REQUIRED.matches("apertus", versions=EVERYTHING)
    assert ModelFlag.VLLM_TOKENIZER_REQUIRED.matches("gemma3", versions=EVERYTHING)
    assert not ModelFlag.VLLM_TOKENIZER_REQUIRED.matches("gemma3_text", versions=EVERYTHING)
    assert ModelFlag.CONTEXT_PARALLEL_UNSUPPORTED.matches("gemma3_text", versions=EVERYTHING)
    assert not any(flag.matches("llama", versions=EVERYTHING) for flag in ModelFlag)


def test_quirks_of_a_package_that_is_not_there_do_not_hold():
    assert flags_for("apertus", versions={"torch": "2.13.0"}) == ()
    assert {each.package for each in flags_for("gemma3", versions=EVERYTHING)} == {"vllm", "torch"}


def test_a_package_that_has_no_quirks_is_refused():
    with pytest.raises(ValueError, match=r"versions names \['vlm'\]"):
        flags_for("gemma3", versions={"vlm": "0.32.0"})


def test_what_is_no_version_is_refused():
    with pytest.raises(ValueError, match="Invalid version: 'newest'"):
        flags_for("gemma3", versions={"vllm": "newest"})


def test_installed_versions_are_those_of_the_metadata():
    found = installed_versions()
    assert found["torch"] == version("torch")
    assert found["transformers"] == version("transformers")
    assert flags_for("gemma3") == flags_for("gemma3", versions=found)


def test_a_record_explains_itself():
    text = quirk("gemma-normalizer").explain()
    for part in ("vllm_load_format_auto", "vllm <0.9.2", "reported", "normalizer", "pull/19788"):
        assert part in text
    assert "every vllm" in quirk("apertus-xielu").explain()


# What torch still needs. A quirk that lost its need fails here: bound its `versions`, and move its probe to the past.


def masked_layers(config, length):
    """For each layer, whether its attention was given a mask, in a row without padding."""
    with pytest.MonkeyPatch.context() as patch:
        given_masks, attention = [], torch.nn.functional.scaled_dot_product_attention

        def watched(query, key, value, attn_mask=None, **others):
            given_masks.append(attn_mask is not None)
            return attention(query, key, value, attn_mask=attn_mask, **others)

        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        rows = torch.ones(1, length, dtype=torch.int64)
        model(input_ids=rows, attention_mask=torch.ones_like(rows))
    return given_masks


def needs_gemma3_attention_mask():
    shape = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    windows = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3TextConfig(**shape, **heads, **windows)
    assert masked_layers(config, 7) == [False, False]  # within the window: as any other model
    one = torch.zeros(1, 1, 1, 1)
    with pytest.raises(NotImplementedError, match="attn_bias"):
        ring._scaled_dot_product_ring_efficient_attention(None, one, one, one, attn_bias=one)
    return masked_layers(config, 8) == [True, False]


PROBES = {"gemma3-attention-mask": needs_gemma3_attention_mask}
OF_TORCH = [each for each in MODEL_FLAGS if each.package != "vllm" and each.holds_for(version(each.package))]


def test_every_measured_quirk_of_torch_has_a_probe_and_no_other():
    assert set(PROBES) == {each.name for each in OF_TORCH if each.evidence == "measured"}


@pytest.mark.parametrize("record", [each for each in OF_TORCH if each.evidence == "measured"], ids=lambda r: r.name)
def test_torch_still_needs(record):
    assert PROBES[record.name](), f"torch {version('torch')} no longer needs {record.name}: bound its versions"


@pytest.mark.parametrize("record", [each for each in OF_TORCH if each.evidence == "reported"], ids=lambda r: r.name)
def test_somebody_looked_at_what_is_only_reported_of_torch(record):
    installed = Version(version(record.package)).release[:2]
    assert installed <= Version(record.checked).release[:2], f"read {record.source} again, then raise `checked`"


def test_no_ring_attention_takes_a_mask():
    for name in ("_scaled_dot_product_ring_efficient_attention", "_scaled_dot_product_ring_cudnn_attention"):
        assert "attn_bias is not supported" in inspect.getsource(getattr(ring, name))
    flash = inspect.signature(ring._scaled_dot_product_ring_flash_attention)
    assert not {"attn_bias", "attn_mask"} & set(flash.parameters)
