"""The DTensor backend: a Hugging Face model, sharded by FSDP2 and tensor parallelism, trained by losses over logp.

Knows rows, microbatches and ranks; does not know what a loss means. Every rank is handed the whole batch and works on
its own rows; gradients and sums are added up, never averaged, so that a loss which divides by the step's global count
gives the same gradient however the batch was cut.

Axes: B rows, T tokens.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from rl_backends.dtensor.config import DTensorConfig, OptimizerConfig
from rl_backends.dtensor.mesh import make_mesh
from rl_backends.dtensor.microbatches import Microbatch, TokenBatch, cut
from rl_backends.dtensor.optimizer import make_optimizer
from rl_backends.dtensor.saving import save_pretrained
from rl_backends.dtensor.token_logp import METHOD, add_token_logp
from rl_backends.dtensor.training_state import load_training_state, save_training_state
from rl_parallel_plans import clip_grad_by_total_norm_, get_grad_norm, parallelize, plan_for

__all__ = ["DTensorBackend", "NonFiniteGradientError"]

BatchT = TypeVar("BatchT", bound=TokenBatch)
Sums = dict[str, Tensor]


class NonFiniteGradientError(RuntimeError):
    """The gradient norm is NaN or infinite; the weights were not touched and the gradient is cleared."""


class DTensorBackend:
    """A policy that trains `model`, sharded over the ranks of this run.

    Args:
        model: a Hugging Face causal LM with its weights, the same on every rank. The backend takes it over.
        config: sharding, device, precision, microbatches.

    Raises:
        PlanError: the model cannot be sharded as asked; nothing was changed.
        ModelError: its head is not one whose log-probabilities can be computed here.
        ValueError: no GPU where one was asked for, or ranks that `tensor_parallel_size` does not divide.
    """

    def __init__(self, model: nn.Module, config: DTensorConfig) -> None:
        self._config = config
        self._mesh = make_mesh(device=config.device, tensor_parallel_size=config.tensor_parallel_size)
        self.plan = plan_for(model, tp=config.tensor_parallel_size, custom=config.custom_parallel_plan)
        add_token_logp(model)
        param_dtype = torch.bfloat16 if config.precision == "bfloat16" else None
        self.model = parallelize(
            model.to(config.device), self._mesh, self.plan, param_dtype=param_dtype, reduce_dtype=torch.float32
        )
        self.model.eval()  # gradients do not need training mode, and dropout would make two functions of one model
        register_fsdp_forward_method(self.model, METHOD)
        self._temperature = 1.0
        self._optimizer: torch.optim.Optimizer | None = None
        self.version = 0
        """Optimizer steps that the weights have seen."""

    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None:
        """Begin a stage with a fresh optimizer and a schedule of `num_steps`; weights and version go on.

        `temperature` divides the logits before every log-probability: set it to the engine's, or ratios are wrong.
        """
        self._optimizer, self._schedule = make_optimizer(self.model.parameters(), optimizer, num_steps=num_steps)
        self._max_grad_norm = optimizer.max_grad_norm
        self._temperature = temperature

    @property
    def learning_rate(self) -> float:
        """Of the next step.

        Raises:
            RuntimeError: `start_training` was not called.
        """
        self._require_optimizer()
        return float(self._schedule.get_last_lr()[0])

    @torch.no_grad()
    def logp(self, examples: TokenBatch) -> Float[Tensor, "B T"]:
        """Log-probability of each trainable token given those before it; 0 elsewhere. All rows, on every rank."""
        out = torch.zeros(examples.tokens.shape, device=self._config.device)
        for microbatch in self._cut(examples):
            logp = self._forward(microbatch.of(examples, device=self._config.device))
            if microbatch.counted:
                out[microbatch.rows, : microbatch.width] = logp
        return self._add_over_ranks(out).to(examples.tokens.device)

    def forward_backward(self, examples: BatchT, loss: Callable[[Tensor, BatchT], tuple[Tensor, Sums]]) -> Sums:
        """Accumulate the gradient of `loss` over all of `examples`; return its metric sums over all of them.

        A failure half-way clears the gradient, so that a retry does not start from a part of it.
        """
        sums: Sums = {}
        try:
            for microbatch in self._cut(examples):
                rows = microbatch.of(examples, device=self._config.device)
                value, parts = loss(self._forward(rows), rows)
                torch.autograd.backward(value * microbatch.counted)  # the collectives of backward need every rank
                for name, part in parts.items():
                    sums[name] = sums.get(name, 0.0) + part.detach() * microbatch.counted
        except BaseException:
            self.model.zero_grad()
            raise
        return {name: self._add_over_ranks(total.float()) for name, total in sorted(sums.items())}

    def optim_step(self) -> float:
        """Clip, update, clear the gradient; return its norm before clipping.

        Raises:
            NonFiniteGradientError: the norm is not finite. No update was made.
            RuntimeError: `start_training` was not called, or there is no gradient.
        """
        optimizer = self._require_optimizer()
        if all(parameter.grad is None for parameter in self.model.parameters()):
            raise RuntimeError("there is no gradient to step along; call forward_backward(examples, loss) first")
        norm = get_grad_norm(self.model.parameters())
        if not torch.isfinite(norm):
            optimizer.zero_grad()
            raise NonFiniteGradientError(
                f"the gradient norm of step {self.version + 1} is {norm.item()}: the loss has a NaN or an overflow. "
                f"The weights are as they were after step {self.version}; look at the rewards and the learning rate"
            )
        clip_grad_by_total_norm_(self.model.parameters(), self._max_grad_norm, norm)
        optimizer.step()
        self._schedule.step()
        optimizer.zero_grad()
        self.version += 1
        return norm.item()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder, whole or not at all; every rank must call it."""
        save_pretrained(self.model, Path(folder))

    def save_training_state(self, folder: str | Path) -> None:
        """Write optimizer, schedule and version, not the weights, into an existing folder; every rank must call it.

        Raises:
            RuntimeError: `start_training` was never called.
        """
        optimizer = self._require_optimizer()
        save_training_state(self.model, optimizer, self._schedule, version=self.version, folder=Path(folder))

    def load_training_state(self, folder: str | Path) -> None:
        """After `start_training` as before: go on with the optimizer, schedule and version that were saved.

        Raises:
            RuntimeError: `start_training` was not called.
        """
        optimizer = self._require_optimizer()
        self.version = load_training_state(self.model, optimizer, self._schedule, folder=Path(folder))

    def explain(self) -> str:
        """The mesh, and which rule shards which parameter and why."""
        data_parallel, tensor_parallel = self._mesh.shape
        return (
            f"DTensor backend on {self._config.device}: {data_parallel} data-parallel x {tensor_parallel} "
            f"tensor-parallel ranks, computing in {self._config.precision}, weights and optimizer in float32\n"
            f"{self.plan.explain()}"
        )

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return self._optimizer

    def _cut(self, examples: TokenBatch) -> list[Microbatch]:
        data_parallel = self._mesh["dp"]
        return list(
            cut(
                examples,
                micro_batch_size=self._config.micro_batch_size,
                rank=data_parallel.get_local_rank(),
                num_ranks=data_parallel.size(),
            )
        )

    def _forward(self, examples: TokenBatch) -> Tensor:
        logp: Tensor = getattr(self.model, METHOD)(examples.tokens, examples.trainable, temperature=self._temperature)
        return logp

    def _add_over_ranks(self, tensor: Tensor) -> Tensor:
        if self._mesh["dp"].size() > 1:
            dist.all_reduce(tensor, group=self._mesh["dp"].get_group())
        return tensor
