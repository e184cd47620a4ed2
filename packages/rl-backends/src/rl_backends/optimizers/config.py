"""What a user may choose of the optimizer, its learning rate and the gradient step."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rl_backends.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonConfig(Config):
    """What Muon does to the matrices of layers; arXiv:2502.16982, and Keller Jordan's note that it builds on."""

    momentum: float = 0.95
    """Decay of the running mean of the gradient. Higher averages over more steps."""

    nesterov: bool = True
    """Look one step ahead along the running mean."""

    adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """How the learning rate follows a matrix [A, B]: times sqrt(max(1, A / B)), or times 0.2 sqrt(max(A, B)), whose
    updates are about as large as AdamW's, so that one `lr` suits both parts."""

    adamw_lr_ratio: float = 1.0
    """The learning rate of what AdamW trains beside Muon (embeddings, head, vectors) as a share of `lr`."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What matrices are made orthogonal in. bfloat16 is faster; in float32, ranks and a single process agree to
    rounding."""

    def _problems(self) -> Iterator[str]:
        yield from self._outside({"> 0": "adamw_lr_ratio"})
        if not 0.0 <= self.momentum < 1.0:
            yield f"momentum={self.momentum} must be in [0, 1)"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(Config):
    """The optimizer, its learning rate over the steps, and what happens to gradients that are too large or not finite.

    Weight decay leaves out norms, biases and everything else of one dim, which it would pull towards 0 for no reason.
    """

    lr: float
    """Peak learning rate."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """AdamW (arXiv:1711.05101); the same with moments in 8 bits, by torchao; or Muon for the matrices of layers, with
    AdamW for the rest."""

    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Which of torch's implementations of AdamW runs: one kernel for many parameters, one for many parameters and one
    operation, or one for each. They agree to rounding."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the running means of the gradient and of its square. A lower second one forgets old gradients sooner."""

    eps: float = 1e-8
    """Added to the root of the second moment; matters only where gradients are tiny."""

    weight_decay: float = 0.0
    """Decoupled weight decay per step, as a share of the learning rate."""

    decay_vectors: bool = False
    """Let norms, biases and other parameters of one dim decay like the matrices."""

    no_decay: tuple[str, ...] = ()
    """More parameters that do not decay: patterns of names in which `*` stands for anything, as `*embed_tokens*`. One
    that matches no trainable parameter is refused."""

    schedule: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    """How the learning rate goes from `lr` to its end after the warm-up: not at all, in a straight line, along half a
    cosine (arXiv:1608.03983), or stable and then down in a straight line (arXiv:2404.06395)."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `lr`."""

    warmup_start_ratio: float = 0.0
    """The learning rate of the first warm-up step as a share of `lr`, as torch's `LinearLR` has it; 0 begins with the
    first part of the rise, `1 / warmup_steps`, since a step at a rate of 0 learns nothing."""

    decay_steps: int | None = None
    """Steps at the end over which a `wsd` schedule goes down; about a tenth of all is common. None elsewhere."""

    final_lr_ratio: float = 1.0
    """The learning rate of the last step as a share of `lr`; 1 keeps a linear schedule constant."""

    max_grad_norm: float | None = 1.0
    """Gradients whose global 2-norm is larger are scaled down to it; None never scales."""

    on_nonfinite_gradient: Literal["raise", "skip"] = "raise"
    """Stop with an error when a gradient is NaN or infinite, or leave the step out, count it and go on."""

    muon: MuonConfig = field(default_factory=MuonConfig)
    """For the name `muon` only."""

    def _problems(self) -> Iterator[str]:
        yield from self._outside({"> 0": "lr eps max_grad_norm", ">= 0": "weight_decay warmup_steps"})
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            yield f"betas={self.betas} must be two numbers in [0, 1)"
        for name in ("final_lr_ratio", "warmup_start_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                yield f"{name}={getattr(self, name)} must be between 0 and 1"
        # A schedule that does not do what it says.
        if self.warmup_start_ratio and not self.warmup_steps:
            yield f"warmup_start_ratio={self.warmup_start_ratio} is of a warm-up, and warmup_steps=0; leave it out"
        if self.schedule == "constant" and self.final_lr_ratio != 1.0:
            yield (
                f"final_lr_ratio={self.final_lr_ratio} has no meaning for schedule='constant': take 'linear', 'cosine' "
                "or 'wsd', or leave final_lr_ratio at 1"
            )
        if self.schedule in {"cosine", "wsd"} and self.final_lr_ratio == 1.0:
            yield (
                f"schedule={self.schedule!r} with final_lr_ratio=1.0 would never go down: set the share of lr that the "
                "last step has, such as final_lr_ratio=0.1, or take schedule='constant'"
            )
        if self.schedule == "wsd" and (self.decay_steps is None or self.decay_steps < 1):
            yield f"decay_steps={self.decay_steps} must be >= 1 for schedule='wsd'"
        if self.schedule != "wsd" and self.decay_steps is not None:
            yield (
                f"decay_steps={self.decay_steps} belongs to schedule='wsd'; schedule={self.schedule!r} has all steps "
                "after the warm-up"
            )
        # Choices of another optimizer.
        if self.name != "muon" and self.muon != MuonConfig():
            yield f"{self.muon} is given, and the optimizer is name={self.name!r}: set name='muon'"
        if self.name == "adamw_8bit" and self.implementation != "fused":
            yield (
                f"implementation={self.implementation!r} chooses between torch's AdamWs, and name='adamw_8bit' is "
                "torchao's: leave it out"
            )
