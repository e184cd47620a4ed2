"""A LoRA adapter that requests may name. Does not import vLLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from rl_generation.errors import EngineOptionError
from rl_generation.vllm.options import VllmOptions

__all__ = ["LoraAdapter", "check_lora", "check_removed"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """An adapter on disk.

    Raises:
        EngineOptionError: The folder holds no adapter, or the number is not positive.
    """

    name: str
    """For logs and metrics."""

    number: int
    """Which adapter it is to vLLM, from 1 on: the same number means the same weights, so new weights need a new one."""

    path: str
    """Folder with `adapter_config.json` and the weights, as peft saves them."""

    def __post_init__(self) -> None:
        if self.number < 1:
            raise EngineOptionError(f"an adapter's number is at least 1; got number={self.number} for {self.name!r}")
        if not (Path(self.path) / "adapter_config.json").is_file():
            raise EngineOptionError(f"path={self.path!r} of adapter {self.name!r} holds no adapter_config.json")

    def request(self) -> Any:
        """Return it as a `vllm.lora.request.LoRARequest`."""
        from vllm.lora.request import LoRARequest

        name = f"{self.name}@{self.number}"  # vLLM caches prefixes by name
        return LoRARequest(name, self.number, self.path)


def check_lora(lora: object, options: VllmOptions) -> None:
    """Raise EngineOptionError where `lora` is no LoraAdapter, or an engine with these options takes none."""
    if not isinstance(lora, LoraAdapter):
        raise EngineOptionError(f"an adapter is a LoraAdapter(name=…, number=…, path=…); got {lora!r}")
    if not options.enable_lora:
        raise EngineOptionError(f"adapter {lora.name!r} needs an engine made with enable_lora=True")


def check_removed(lora: LoraAdapter, *, removed: bool) -> None:
    """Raise EngineOptionError where vLLM had no such adapter to remove."""
    if not removed:
        raise EngineOptionError(
            f"adapter {lora.name!r}, number {lora.number}, is not loaded: it never was, or vLLM has dropped it for "
            f"another one (max_loras)"
        )
