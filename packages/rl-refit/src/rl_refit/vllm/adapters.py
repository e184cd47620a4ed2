"""An adapter in vLLM's LoRA slots as the sink of weights."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from torch import Tensor

from rl_refit.adapters import AdapterSink
from rl_refit.errors import RefitError
from rl_refit.vllm.sink import ask_replicas, call_async, loop_of

__all__ = ["VllmAdapterSink"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@final
class VllmAdapterSink(AdapterSink):
    """One LoRA adapter of a vLLM engine; `current` is the `LoRARequest` that requests are to name.

    A refit sends A and B alone. Before the commit they are written as a folder of peft's format into a private
    temporary directory, and vLLM loads that under a new id in every worker, beside the adapter that serves; requests
    under way keep theirs. vLLM keeps prefixes of each id apart, so that no cache is reset and nothing is paused. What
    vLLM holds of an adapter is not read back: `report.unreadable` names it.

    Args:
        engine: A `vllm.LLM` or an `AsyncLLM`, made with `enable_lora=True`, `max_loras` of 2 or more where requests run
            during refits, and a `max_lora_rank` that fits.
        like: A folder that peft has saved the adapter to: its configuration, and names, shapes and dtypes of its
            tensors.
        name: What the adapter is called in vLLM's logs.
        loop: The event loop that runs an `AsyncLLM`; found where the sink is made in it, or the engine has generated.
        timeout_s: Seconds that one call of the engine may take.

    Raises:
        RefitError: `like` holds no adapter, or the engine was made without `enable_lora`.
        ValueError: No event loop was found.
    """

    def __init__(
        self,
        engine: Any,
        *,
        like: str | Path,
        name: str = "policy",
        loop: asyncio.AbstractEventLoop | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._config, tensors = _read_folder(Path(like))
        inner = getattr(engine, "llm_engine", engine)
        if inner.vllm_config.lora_config is None:
            raise RefitError("the engine takes no adapters: make it with enable_lora=True", phase="prepare")
        self._engine, self._name, self._timeout_s = inner, name, timeout_s
        self._loop = None if inner is not engine else loop or loop_of(engine)
        self._folder = tempfile.TemporaryDirectory(prefix="rl-refit-adapters-")  # of mode 700
        super().__init__(tensors, load=self._add, unload=self._remove)

    def close(self) -> None:
        """Remove the adapter from the engine, and its files."""
        super().close()
        self._folder.cleanup()

    def _add(self, number: int, tensors: Mapping[str, Tensor]) -> Any:
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        folder = Path(self._folder.name) / str(number)
        folder.mkdir()
        (folder / CONFIG).write_text(json.dumps(self._config))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
        request = LoRARequest(f"{self._name}@{number}", number, str(folder))
        if not all(self._call("add_lora", request)):
            raise RefitError(f"vLLM did not load adapter {request.lora_name}", phase="commit")
        return request

    def _remove(self, number: int, request: Any) -> None:
        self._call("remove_lora", request.lora_int_id)  # False where vLLM has dropped it for another one
        shutil.rmtree(Path(self._folder.name) / str(number), ignore_errors=True)

    def _call(self, method: str, argument: object) -> list[Any]:
        """What each data-parallel replica answers."""
        if self._loop is None:
            return [getattr(self._engine, method)(argument)]
        return call_async(self._loop, ask_replicas(self._engine, method, argument), timeout_s=self._timeout_s)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of an adapter."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
        return config, load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise RefitError(
            f"{folder} holds no adapter ({type(error).__name__}: {error}); save the trainer's adapter there once with "
            f"peft's format, {CONFIG} and {WEIGHTS}",
            phase="prepare",
        ) from error
