"""What a user may choose of the DTensor backend and of its optimizer."""

from dataclasses import dataclass
from typing import ClassVar, Literal

__all__ = ["DTensorConfig", "OptimizerConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorConfig:
    """How the model is sharded and how batches are cut. None of it changes a result beyond rounding."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    enabled: bool = True
    """Train with this backend. It is the only one so far, so switching it off is refused."""

    tensor_parallel_size: int = 1
    """Ranks that share each matrix multiplication; it must divide the number of ranks. The rest is data-parallel."""

    custom_parallel_plan: str | None = None
    """`package.module:name` of a plan or of a function that makes one, instead of the built-in plan."""

    micro_batch_size: int = 64
    """Rows in one forward and backward pass on one rank. Smaller takes less memory; the gradient stays the same."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model lives. It is stated, never guessed; `cuda` without a GPU is refused."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """What the forward and backward passes compute in; weights, gradients and optimizer state stay float32."""

    def __post_init__(self) -> None:
        if not self.enabled:
            raise ValueError("enabled=False leaves no training backend: DTensor is the only one; set it to true")
        for name in ("tensor_parallel_size", "micro_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) with linear warm-up and linear decay, and gradient clipping by global norm."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    lr: float
    """Peak learning rate."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square. A lower second one forgets old gradients sooner."""

    eps: float = 1e-8
    """Added to the root of the second moment; matters only where gradients are tiny."""

    weight_decay: float = 0.0
    """Decoupled weight decay per step, as a share of the learning rate."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0 to `lr`."""

    final_lr_ratio: float = 1.0
    """The learning rate of the last step as a share of `lr`, reached by linear decay; 1 keeps it constant."""

    max_grad_norm: float = 1.0
    """Gradients whose global 2-norm is larger are scaled down to it."""

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "max_grad_norm"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name}={getattr(self, name)} must be > 0")
        for name in ("weight_decay", "warmup_steps"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 0")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must both be in [0, 1)")
        if not 0.0 <= self.final_lr_ratio <= 1.0:
            raise ValueError(f"final_lr_ratio={self.final_lr_ratio} must be between 0 and 1")
