"""Claims about the table of quirks: it says what it says for the versions it names, and it says nothing stale."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rl_generation.model_flags import MODEL_FLAGS, ModelFlag, flags_for, installed_version

RELEASES = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 5)).map(lambda v: ".".join(map(str, v)))


def flags(model_type, version="0.32.0"):
    return {quirk.flag for quirk in flags_for(model_type, version=version)}


def quirk(name):
    return next(each for each in MODEL_FLAGS if each.name == name)


def test_every_record_has_a_name_of_its_own_a_reason_and_a_source():
    assert len({each.name for each in MODEL_FLAGS}) == len(MODEL_FLAGS)
    for each in MODEL_FLAGS:
        assert each.model_types, each.name
        assert each.reason.endswith("."), each.name
        assert each.source.startswith("https://"), each.name
        SpecifierSet(each.versions)


def test_every_flag_has_a_record():
    assert {each.flag for each in MODEL_FLAGS} == set(ModelFlag)


@given(release=RELEASES)
def test_a_model_that_normalizes_images_needs_its_checkpoint_exactly_from_the_release_that_began_it(release):
    begun = tuple(map(int, release.split("."))) >= (0, 31)
    for model_type in ("glm4v", "mistral3"):
        assert (ModelFlag.VLLM_LOAD_FORMAT_AUTO in flags(model_type, release)) == begun


@given(release=RELEASES)
def test_a_build_for_a_cpu_has_the_quirks_of_its_release(release):
    for model_type in {each for record in MODEL_FLAGS for each in record.model_types}:
        assert flags_for(model_type, version=f"{release}+cpu") == flags_for(model_type, version=release)


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


def test_a_model_type_has_its_flags_and_no_others():
    assert flags("apertus") == {ModelFlag.VLLM_LOAD_FORMAT_AUTO}
    assert flags("gemma3") == {ModelFlag.VLLM_TOKENIZER_REQUIRED}
    assert flags("gemma3_text") == flags("llama") == set()


def test_what_is_no_version_is_refused():
    with pytest.raises(ValueError, match="Invalid version: 'newest'"):
        flags_for("gemma3", version="newest")


def test_where_no_version_is_named_it_is_the_installed_one():
    version = installed_version()
    assert flags_for("apertus") == (flags_for("apertus", version=version) if version else ())


def test_a_record_explains_itself():
    text = quirk("image-normalization").explain()
    for part in ("vllm_load_format_auto", "vllm >=0.31", "normalize images", "mm_input_norm.py"):
        assert part in text
    assert "every vllm" in quirk("apertus-xielu").explain()
