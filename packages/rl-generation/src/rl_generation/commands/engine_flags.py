"""An EngineSpec from flags. Does not know what a command does with the engine."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rl_generation.commands.console import CommandError, say
from rl_generation.engine import Engine
from rl_generation.loading import ENGINES, FOREIGN, EngineSpec, check_available, load_engine

__all__ = [
    "add_engine_arguments",
    "add_model_arguments",
    "check_available",
    "json_pairs",
    "spec_of",
    "specs_of",
    "start_engine",
]

FIELDS = (
    "model",
    "revision",
    "tokenizer",
    "trust_remote_code",
    "dtype",
    "device",
    "max_batch_size",
    "logp_of",
    "tensor_parallel_size",
    "data_parallel_size",
    "max_model_len",
    "kv_cache_memory_bytes",
    "enforce_eager",
    "own_process",
    "continuous_batching",
    "max_cache_tokens",
)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the engine, and the engine's options."""
    parser.add_argument(
        "--engine", choices=ENGINES, default=ENGINES[0], help="what generates (default %(default)s, in this process)"
    )
    add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, and the options of engines."""
    parser.add_argument("model", metavar="MODEL", help="a folder of safetensors, or a hub id")
    group = parser.add_argument_group("model")
    group.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    group.add_argument("--tokenizer", metavar="PLACE", help="folder or hub id, if not beside the model")
    group.add_argument("--no-tokenizer", action="store_true", help="do without: token ids in, token ids out")
    group.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    group.add_argument("--dtype", default="auto", metavar="NAME", help="of the weights (default: the checkpoint's)")
    group = parser.add_argument_group("engine")
    group.add_argument("--device", metavar="NAME", help="transformers: where (default: a GPU if there is one)")
    group.add_argument("--max-batch-size", type=int, metavar="N", help="answers generated at once")
    group.add_argument(
        "--logp-of", choices=("sampled", "raw"), default="sampled", help="distribution of logp (default %(default)s)"
    )
    group.add_argument("--continuous-batching", choices=("auto", "required", "off"), help="transformers: see its docs")
    group.add_argument("--max-cache-tokens", type=int, metavar="N", help="transformers: tokens that its cache holds")
    group.add_argument("--tensor-parallel-size", type=int, metavar="N", help="vLLM: ranks that a layer is cut over")
    group.add_argument("--data-parallel-size", type=int, metavar="N", help="vLLM: replicas of the engine")
    group.add_argument("--max-model-len", type=int, metavar="N", help="vLLM: tokens of a prompt and its answer")
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=int,
        metavar="N",
        help="vLLM: key/value cache of a rank; on a CPU always give it",
    )
    group.add_argument("--enforce-eager", action="store_true", help="vLLM: start sooner, generate slower")
    group.add_argument("--own-process", action="store_true", help="vLLM: a process of its own, not this one")
    group.add_argument(
        "--vllm-kwarg",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="vLLM: any of its engine arguments, as block_size=32; can be repeated",
    )


def spec_of(arguments: argparse.Namespace) -> EngineSpec:
    """Return what the flags ask for.

    Raises:
        CommandError: A `--vllm-kwarg` is no `key=value`, or its value is no JSON.
        EngineOptionError: An option does not belong to the engine.
    """
    return EngineSpec(engine=arguments.engine, **_given(arguments))


def specs_of(arguments: argparse.Namespace, engines: Sequence[str]) -> list[EngineSpec]:
    """Return what the flags ask for of several engines, each of which takes the options that are its own.

    Raises:
        CommandError: As `spec_of`; or an engine stands twice.
        EngineOptionError: An engine is unknown, or an option belongs to none of them.
    """
    if len(set(engines)) < len(engines):
        raise CommandError(f"an engine stands twice in {','.join(engines)}")
    given = _given(arguments)
    useless = set.intersection(*(set(FOREIGN.get(engine, ())) for engine in engines))
    specs = []
    for engine in engines:
        foreign = set(FOREIGN.get(engine, ())) - useless
        specs.append(EngineSpec(engine=engine, **{name: each for name, each in given.items() if name not in foreign}))
    return specs


def start_engine(spec: EngineSpec) -> tuple[Engine, Any]:
    """Load an engine and its tokenizer, and say so; bars of others are for terminals only."""
    from transformers.utils import logging

    say(f"{spec.engine}: loading {spec.model}")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return load_engine(spec)


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        **{name: getattr(arguments, name) for name in FIELDS},
        "with_tokenizer": not arguments.no_tokenizer,
        "vllm_kwargs": json_pairs(arguments.vllm_kwarg, flag="--vllm-kwarg"),
    }


def json_pairs(texts: Sequence[str], *, flag: str) -> dict[str, Any]:
    """Parse `key=value` each, whose values are JSON.

    Raises:
        CommandError: One is not such a pair, or a key stands twice.
    """
    pairs: dict[str, Any] = {}
    for name, value in (_json_pair(text, flag=flag) for text in texts):
        if name in pairs:
            raise CommandError(f"{flag} {name} stands twice, with {json.dumps(pairs[name])} and {json.dumps(value)}")
        pairs[name] = value
    return pairs


def _json_pair(text: str, *, flag: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise CommandError(f"{flag} takes KEY=JSON, such as some_option=true; got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError as error:
        raise CommandError(
            f"{flag} {name}: {value!r} is not JSON ({error.msg}); text needs quotes: {name}='\"{value}\"'"
        ) from None
