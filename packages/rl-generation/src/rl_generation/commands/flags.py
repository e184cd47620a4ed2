"""The flags of an engine, which every command takes. tyro makes them of the fields, with their docstrings as help."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, TypeAlias

from tyro.conf import FlagCreatePairsOff, Positional, arg

from rl_generation.commands import CommandError, say
from rl_generation.engine import Engine
from rl_generation.loading import ENGINES, FOREIGN, BasicEngineSpec, EngineSpec, load_engine
from rl_generation.vllm.options import BasicVllmOptions

Flag: TypeAlias = FlagCreatePairsOff[bool]
"""A flag that is given or not; without a `--no-…` beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFlags(BasicEngineSpec):
    """The model, the engine or several of them, and their options."""

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """A folder of safetensors, or a hub id."""

    engine: tuple[Literal["transformers", "vllm"], ...] = ()
    """What generates: transformers, in this process, which is the default, or vLLM; `bench` takes several."""

    no_tokenizer: Flag = False
    """Do without: token ids in, token ids out; no texts, no stop strings and no bad words."""

    vllm: BasicVllmOptions = field(default_factory=BasicVllmOptions)
    """Of vLLM alone."""

    vllm_kwarg: Annotated[tuple[str, ...], arg(metavar="KEY=JSON")] = ()
    """Any other engine argument of vLLM, as block_size=32."""

    def specs(self) -> list[EngineSpec]:
        """Return what is asked for of each engine; of several, each takes the options that are its own.

        Raises:
            CommandError: An engine stands twice, or a `--vllm-kwarg` is no `key=value`, no JSON or stands twice.
            EngineOptionError: An option belongs to another engine, or has a flag of its own.
        """
        engines = self.engine or ENGINES[:1]
        if len(set(engines)) < len(engines):
            raise CommandError(f"an engine stands twice in {','.join(engines)}")
        vllm = replace(self.vllm, vllm_kwargs=json_pairs(self.vllm_kwarg, "--vllm-kwarg"))
        changed = {each.name: getattr(vllm, each.name) for each in fields(vllm) if each.name != "vllm_kwargs"}
        changed = {name: value for name, value in changed.items() if value != getattr(BasicVllmOptions(), name)}
        given: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(BasicEngineSpec)}
        given |= {"model": self.model, "with_tokenizer": not self.no_tokenizer}
        given |= {"vllm_kwargs": {**changed, **vllm.vllm_kwargs}}
        specs = []
        for engine in engines:
            foreign = FOREIGN[engine] if len(engines) > 1 else ()
            own = {name: value for name, value in given.items() if name not in foreign}
            specs.append(EngineSpec(**{**own, "engine": engine}))
        return specs

    def spec(self) -> EngineSpec:
        """As `specs`, for a command that takes one engine."""
        spec, *others = self.specs()
        if others:
            raise CommandError(f"this command takes one engine; got --engine {spec.engine} --engine {others[0].engine}")
        return spec


def start_engine(spec: EngineSpec) -> tuple[Engine, Any]:
    """Load an engine and its tokenizer, and say so; bars of others are for terminals only."""
    from transformers.utils import logging

    say(f"{spec.engine}: loading {spec.model}")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return load_engine(spec)


def json_pairs(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """Parse `key=value` each, whose values are JSON.

    Raises:
        CommandError: One is not such a pair, or a key stands twice.
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            rule = f"takes KEY=JSON, such as some_option=true; text needs quotes: {name}='\"{value}\"'"
            raise CommandError(f"{flag} {text}: {value!r} is not JSON ({error.msg}): it {rule}") from None
        if name in pairs:
            raise CommandError(f"{flag} {name} stands twice, with {json.dumps(pairs[name])} and {json.dumps(parsed)}")
        pairs[name] = parsed
    return pairs
