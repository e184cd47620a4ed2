"""Claims about the table of quirks: it says what it says for the versions it names, and it says nothing stale."""

from importlib.metadata import version

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rl_generation.model_flags import (
    MODEL_FLAGS,
    ModelFlag,
    flags_for,
    installed_versions,
)

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
        assert ModelFlag.VLLM_LOAD_FORMAT_AUTO.matches(model_type, versions={"vllm": release}) != repaired


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


def test_a_flag_answers_for_a_model_type():
    assert ModelFlag.VLLM_LOAD_FORMAT_AUTO.matches("apertus", versions=EVERYTHING)
    assert not ModelFlag.VLLM_TOKENIZER_REQUIRED.matches("apertus", versions=EVERYTHING)
    assert ModelFlag.VLLM_TOKENIZER_REQUIRED.matches("gemma3", versions=EVERYTHING)
    assert not ModelFlag.VLLM_TOKENIZER_REQUIRED.matches("gemma3_text", versions=EVERYTHING)
    assert not any(flag.matches("llama", versions=EVERYTHING) for flag in ModelFlag)


def test_quirks_of_a_package_that_is_not_there_do_not_hold():
    assert flags_for("apertus", versions={"torch": "2.13.0"}) == ()
    assert {each.package for each in flags_for("gemma3", versions=EVERYTHING)} == {"vllm"}


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
