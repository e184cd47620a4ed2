"""What the Megatron backend would do with a model on so many ranks: layout, memory, vocabulary, files.

No ranks, no weights, and no megatron-core are needed. Activations are not predicted.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn

from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir, megatron_checkpoint_dir
from rl_backends.commands.backend_flags import chosen_config
from rl_backends.commands.megatron_layout import (
    Axis,
    Stage,
    axes_of,
    format_bytes,
    readable_layout,
    shapes_of,
    stages_of,
)
from rl_backends.loading import ModelSource, open_model
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.installed import INSTALL
from rl_backends.megatron.transformer_config import padded_vocab_size

__all__ = ["MegatronExplanation", "explain_megatron"]

CHOSEN = (
    "by --backend megatron; in a recipe policy.megatron_cfg.enabled=true chooses it, and takes precedence over "
    "policy.dtensor_cfg.enabled"
)
SHOWN_GROUPS = 4
SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExplanation:
    """What the backend would do; `document` has it in plain values."""

    document: Mapping[str, Any]
    axes: Sequence[Axis]
    stages: Sequence[Stage]

    @property
    def fullest(self) -> Stage:
        """Whose ranks hold most."""
        return max(self.stages, key=lambda stage: stage.num_bytes)

    def text(self) -> str:
        """For people."""
        blocks = (self._head(), self._layout(), self._stages(), self._memory(), self._files(), self._workarounds())
        return "\n\n".join("\n".join(block) for block in map(list, blocks) if block)

    def _head(self) -> Iterator[str]:
        document = self.document
        model, ranks = document["model"], document["world_size"]
        yield (
            f"MegatronBackend of {model['class']} ({model['parameters']:,} parameters) on {ranks} "
            f"{document['config']['device']} rank{'s' if ranks > 1 else ''}"
        )
        yield f"chosen {document['reason']}"
        yield ", ".join(
            f"{name} {release}" if release else f"{name} is not installed, and training needs it: {INSTALL}"
            for name, release in document["versions"].items()
        )

    def _layout(self) -> Iterator[str]:
        yield "layout"
        if not self.axes:
            yield "  one rank: nothing is shared out"
        for axis in self.axes:
            listed = "; ".join(_listed(group) for group in axis.groups[:SHOWN_GROUPS])
            more = f"; and {len(axis.groups) - SHOWN_GROUPS} more" if len(axis.groups) > SHOWN_GROUPS else ""
            yield f"  {axis.name}{axis.size:>5}  {axis.does}: ranks {listed}{more}"

    def _stages(self) -> Iterator[str]:
        yield "stages" if len(self.stages) > 1 else "each rank"
        for stage in self.stages:
            first, last = stage.layers[0], stage.layers[-1]
            parts = [f"layer {first}" if first == last else f"layers {first} to {last}"]
            parts += ["the embedding"] if stage.embedding else []
            parts += ["the last norm and the head"] if stage.head else []
            yield f"  ranks {_listed(stage.ranks)}: {', '.join(parts)}; {stage.numbers:,} numbers each"
        words = self.document["vocabulary"]
        padding = f"padded with zeros to {words['padded']:,}" if words["padding"] else "as is"
        yield f"  vocabulary of {words['words']:,} words, {padding}: {words['rows_of_rank']:,} rows a rank"

    def _memory(self) -> Iterator[str]:
        stage, config = self.fullest, self.document["config"]
        states = "AdamW, two moments" + (" and float32 masters" if config["precision"] == "bfloat16" else "")
        shared = ", shared out to data-parallel ranks" if config["use_distributed_optimizer"] else ""
        yield f"memory of the fullest ranks ({_listed(stage.ranks)}), without activations and communication"
        yield f"  weights    {format_bytes(stage.weight_bytes):>12}  {config['precision']}"
        yield f"  gradients  {format_bytes(stage.gradient_bytes):>12}  float32"
        yield f"  optimizer  {format_bytes(stage.optimizer_bytes):>12}  {states}{shared}"
        yield f"  together   {format_bytes(stage.num_bytes):>12}"

    def _files(self) -> Iterator[str]:
        yield "weights are read from the Hugging Face files, each rank its own parts; nothing is converted"
        where = self.document["checkpoint_dir"]["told"]
        yield f"  `rl-backends convert` would write a Megatron-LM checkpoint to {where}"

    def _workarounds(self) -> Iterator[str]:
        entries = self.document["workarounds"]
        if entries:
            yield f"without CUDA {len(entries)} assumptions of megatron-core are worked around"
        for entry in entries:
            yield f"  {entry['name']} (seen in {entry['seen_in']})"


def explain_megatron(arguments: argparse.Namespace) -> MegatronExplanation:
    """Read the model's configuration, and lay it out.

    Raises:
        ValueError: the configuration, the architecture or the layout is refused; every reason is in the message.
    """
    source = _source(arguments)
    hf_config = _read_config(arguments) if source is None else source.config
    architecture, config = readable_layout(hf_config, lambda: chosen_config(arguments), ranks=arguments.ranks)
    skeleton = _skeleton(arguments) if source is None else source.skeleton()
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    axes = axes_of(config, ranks=arguments.ranks)
    stages = stages_of(architecture, shapes_of(skeleton, config), config, ranks=arguments.ranks)
    padded = padded_vocab_size(architecture, config)
    document = {
        "backend": "megatron",
        "reason": CHOSEN,
        "model": {"class": type(skeleton).__name__, "type": architecture.model_type, "parameters": parameters},
        "world_size": arguments.ranks,
        "config": asdict(config),
        "versions": {name: _release(name) for name in ("megatron-core", "torch", "transformers")},
        "layout": [asdict(axis) for axis in axes],
        "stages": [{**asdict(stage), "bytes": stage.num_bytes} for stage in stages],
        "memory": {"fullest_rank_bytes": max(stage.num_bytes for stage in stages)},
        "vocabulary": {
            "words": architecture.vocab_size,
            "padded": padded,
            "padding": padded - architecture.vocab_size,
            "rows_of_rank": padded // config.tensor_model_parallel_size,
        },
        "checkpoint_dir": {
            "directory": str(megatron_checkpoint_dir().absolute()),
            "told": explain_megatron_checkpoint_dir(),
        },
        "workarounds": _workarounds(config),
    }
    return MegatronExplanation(document=document, axes=axes, stages=stages)


def _source(arguments: argparse.Namespace) -> ModelSource | None:
    """None where MODEL is a configuration alone."""
    from transformers import CONFIG_MAPPING

    path = Path(arguments.model).expanduser()
    if path.is_file() or (not path.exists() and arguments.model in CONFIG_MAPPING):
        return None
    asked = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    return open_model(arguments.model, **asked)


def _read_config(arguments: argparse.Namespace) -> Any:
    from rl_parallel_plans.model_source import read_config

    return read_config(arguments.model, trust_remote_code=arguments.trust_remote_code)


def _skeleton(arguments: argparse.Namespace) -> nn.Module:
    from rl_backends.dry_run.predict import skeleton_of

    return skeleton_of(arguments.model, revision=None, trust_remote_code=arguments.trust_remote_code)


def _release(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _workarounds(config: MegatronConfig) -> list[dict[str, str]]:
    from rl_backends.megatron.cpu_compat import entries

    if config.device != "cpu":
        return []
    return [{"name": entry.name, "reason": entry.reason, "seen_in": entry.seen_in} for entry in entries()]


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and all(later - rank == 1 for rank, later in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = " ".join(map(str, ranks[:SHOWN_RANKS]))
    return f"{shown} ... {ranks[-1]}" if len(ranks) > SHOWN_RANKS else shown
