"""A `vllm.LLM` from its start to its end: nothing of it is left afterwards. Does not know prompts or versions."""

import contextlib
import gc
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch

from rl_generation.errors import EngineDeadError, EngineOptionError, LogpError, ModelError
from rl_generation.submitting import Turns
from rl_generation.vllm.leftovers import Leftovers
from rl_generation.vllm.lora import LoraAdapter
from rl_generation.vllm.outputs import logp_hint
from rl_generation.vllm.preparing import Prepared, refusal
from rl_generation.vllm.processes import EngineProcesses, Watchdog
from rl_generation.vllm.randomness import Randomness
from rl_generation.vllm.runtime import environment, main_guard_hint
from rl_generation.vllm.statistics import Statistics

__all__ = ["OwnedLlm"]

EXTERNAL_LAUNCHER = "external_launcher"
"""The executor that runs in ranks which the caller has started."""

SOCKETS_TIMEOUT_S = 5.0


@final
class OwnedLlm:
    """A running `LLM`, with its processes.

    Args:
        prepared: What it is made with.
        own_process: Whether vLLM's engine core gets a process of its own, or lives in this one.
        turns: In which threads call it.

    Raises:
        EngineOptionError: vLLM refuses the options, or this process has a process group of its own.
        RuntimeError: vLLM could not start; its log says why. EngineDeadError where it has a process of its own.
    """

    def __init__(self, prepared: Prepared, *, own_process: bool, turns: Turns) -> None:
        self._turns = turns
        if not own_process:
            _check_process_group(prepared)
        self._own_process = own_process
        self._logp_hint = logp_hint(prepared.options)
        self._randomness = Randomness()
        self._folder = tempfile.TemporaryDirectory(prefix="rl-")  # of vLLM's sockets, which it would leave behind
        try:
            with self._randomness.while_started():
                self.llm = _start(prepared, own_process=own_process, folder=self._folder.name)
        except BaseException:
            self._folder.cleanup()
            raise
        self.engine: Any = self.llm.llm_engine
        self.statistics = Statistics()
        self.engine.logger_manager = self.statistics
        self.processes = EngineProcesses(_roots(self.engine))
        self._leftovers = Leftovers(self.processes.process_ids)
        self._watchdog = Watchdog(self.engine.engine_core, self.processes) if own_process else None
        self.interrupted = False

    @contextlib.contextmanager
    def calls(self) -> Iterator[None]:
        """Around whatever asks the engine for something: one thread at a time; names its death.

        Raises:
            EngineDeadError: One of its processes is gone.
        """
        from vllm.v1.engine.exceptions import EngineDeadError as CoreDeadError

        try:
            with self._turns:
                yield
        except CoreDeadError as error:
            self.processes.wait_for_death(timeout_s=1.0)
            raise EngineDeadError(self.obituary("the engine core failed; its log says why")) from error
        except RuntimeError as error:
            if self.processes.dead() is None:
                raise
            raise EngineDeadError(self.obituary("")) from error

    def explained(self, error: LogpError | ModelError) -> LogpError | ModelError:
        """The error of a log-probability with what is likely its cause."""
        return LogpError(f"{error}{self._logp_hint}") if isinstance(error, LogpError) else error

    def step(self) -> list[Any]:
        """Generate the next tokens; what ends a step in this process half-way, as an interrupt, ends the engine."""
        try:
            with contextlib.nullcontext() if self._own_process else self._randomness.in_place():
                outputs: list[Any] = self.engine.step()
        except BaseException:
            self.interrupted = not self._own_process
            raise
        return outputs

    def obituary(self, otherwise: str) -> str:
        """Say which process is dead, or `otherwise`, and what to do."""
        return f"{self.processes.dead() or otherwise}; restart() makes a new engine, without the weights of any refit"

    def submit(self, number: str, prompt: Sequence[int], params: Any, *, lora: LoraAdapter | None) -> str:
        """Take an answer in, under the caller's number; return vLLM's own."""
        request = None if lora is None else lora.request()
        tokens = {"type": "token", "prompt_token_ids": list(prompt)}  # what vLLM's renderer makes of token ids
        internal: str = self.engine.add_request(number, tokens, params, lora_request=request)
        return internal

    def label(self) -> str:
        """Return what vLLM calls its weights' version."""
        with self.calls():
            label: str = self.llm.get_weight_version()
        return label

    def set_label(self, label: str) -> None:
        """Call the weights' version so, in what is generated from now on."""
        with self.calls():
            self.llm.update_weight_version(label)

    def reset_caches(self) -> None:
        """Forget what was computed of earlier prompts.

        Raises:
            ModelError: Requests are under way, which use it.
        """
        with self.calls():
            self.engine.reset_encoder_cache()
            done = self.llm.reset_prefix_cache()
        if not done:
            raise ModelError("the prefix cache is in use by requests under way; finish or abort them first")

    def check_health(self, *, timeout_s: float) -> None:
        """Return once the engine core has answered; see `VllmEngine.check_health`."""
        if self.processes.dead() is not None:
            raise EngineDeadError(self.obituary(""))
        if not self._own_process:
            return
        errors: list[EngineDeadError] = []
        asking = threading.Thread(target=self._ask, args=(errors,), daemon=True)
        asking.start()
        asking.join(timeout_s)
        if asking.is_alive():
            raise EngineDeadError(f"the engine core has not answered within timeout_s={timeout_s}")
        for error in errors:
            raise error

    def _ask(self, errors: list[EngineDeadError]) -> None:
        try:
            self.label()
        except EngineDeadError as error:
            errors.append(error)

    def close(self) -> None:
        """End it and all of its processes, and remove what they left in shared memory."""
        if self._watchdog is not None:
            self._watchdog.close()
        engine, self.engine, self.llm = self.engine, None, None
        engine.renderer.shutdown()
        engine.engine_core.shutdown()
        if self._own_process:
            _end_sockets(engine.engine_core)
        del engine
        gc.collect()
        self.processes.end()
        self._leftovers.remove()
        self._folder.cleanup()


def _end_sockets(client: Any) -> None:
    """Do what vLLM leaves to the garbage collector, which warns of it: its thread of outputs, then zmq's."""
    client.output_queue_thread.join(SOCKETS_TIMEOUT_S)
    if not client.output_queue_thread.is_alive():
        client.ctx.destroy(linger=0)


def _check_process_group(prepared: Prepared) -> None:
    """In process, vLLM takes the default process group, and destroys it at the end."""
    distributed = torch.distributed
    launcher = prepared.arguments.get("distributed_executor_backend") == EXTERNAL_LAUNCHER
    initialized = distributed.is_available() and distributed.is_initialized()
    if launcher or not initialized:
        return
    raise EngineOptionError(
        f"torch.distributed has a process group in this process (backend {distributed.get_backend()!r}, world size "
        f"{distributed.get_world_size()}), of a trainer or of another engine in process; vLLM would take it over, and "
        f"destroy it at its end: make the engine with own_process=True, or close the other one first"
    )


def _start(prepared: Prepared, *, own_process: bool, folder: str) -> Any:
    from vllm import LLM, envs

    envs.disable_envs_cache()  # an earlier engine in this process has frozen what it read
    with environment({"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(own_process)), "VLLM_RPC_BASE_PATH": folder}):
        try:
            return LLM(**prepared.arguments)
        except BaseException as error:
            if not own_process and prepared.arguments.get("distributed_executor_backend") != EXTERNAL_LAUNCHER:
                _leave_process_group()
            if isinstance(error, ValueError):
                raise refusal(error) from error
            if own_process and isinstance(error, RuntimeError):
                raise EngineDeadError(
                    f"vLLM's engine did not start, and its log says why: {error}{main_guard_hint()}"
                ) from error
            raise


def _leave_process_group() -> None:
    """Destroy the process group that vLLM made before it failed: it stands in the way of the next engine."""
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()


def _roots(engine: Any) -> list[Any]:
    """The processes that vLLM started from this one."""
    resources = getattr(engine.engine_core, "resources", None)
    if resources is not None:
        return list(resources.engine_manager.processes)
    workers = getattr(getattr(engine, "model_executor", None), "workers", None) or ()
    return [worker.proc for worker in workers]
