"""One optimizer step: this backend against a plain loop of transformers and torch, on the quickstart's model.

Both see the same batch in one process, alternating; the plain loop pads to the longest row and makes full logits.
The last line is JSON with every figure.
"""

import copy
import dataclasses
import json
import statistics
import time
from typing import ClassVar

import torch
import transformers

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

ROUNDS = 15
SHAPES = {"short, even": (64, 20, 20), "short, ragged": (64, 11, 21), "long tail": (64, 8, 96)}


@dataclasses.dataclass(frozen=True)
class Examples:
    """Rows as the backend wants them."""

    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor


def make_model() -> torch.nn.Module:
    """The quickstart's model."""
    config = transformers.Qwen3Config(
        vocab_size=51,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)


def make_examples(rows: int, shortest: int, longest: int) -> Examples:
    """Ragged rows, most of them short; the second half of each is trainable."""
    lengths = (shortest + (longest - shortest) * torch.rand(rows) ** 3).long()
    lengths[0] = longest
    position = torch.arange(longest)
    trainable = (position >= lengths[:, None] // 2) & (position < lengths[:, None])
    return Examples(tokens=torch.randint(5, 51, (rows, longest)), lengths=lengths, trainable=trainable)


def plain_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, examples: Examples) -> None:
    """What one writes by hand."""
    mask = (torch.arange(examples.tokens.shape[1]) < examples.lengths[:, None]).long()
    logits = model(input_ids=examples.tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
    logp = logits.log_softmax(-1).gather(-1, examples.tokens[:, 1:, None])[..., 0]
    (-(logp * examples.trainable[:, 1:]).sum() / examples.trainable.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def backend_step(backend: DTensorBackend, examples: Examples) -> None:
    """The same through the backend."""
    total = examples.trainable.sum()
    backend.forward_backward(examples, lambda logp, rows: (-(logp * rows.trainable).sum() / total, {}))
    backend.optim_step()


def seconds(function: object, *arguments: object) -> float:
    """Of one call."""
    started = time.perf_counter()
    function(*arguments)  # type: ignore[operator]
    return time.perf_counter() - started


def main() -> None:
    """Time both, print a table and the figures."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, object] = {"torch": torch.__version__, "transformers": transformers.__version__}
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    variants = {}
    for size in (64, 16):
        variants[size] = DTensorBackend(copy.deepcopy(plain), DTensorConfig(micro_batch_size=size))
        variants[size].start_training(OptimizerConfig(lr=1e-4), num_steps=10_000)
    print(f"{'rows':>16} {'plain':>10} {'backend, 64 rows':>22} {'backend, 16 rows':>22}")
    for name, shape in SHAPES.items():
        examples = make_examples(*shape)
        times = [
            [seconds(plain_step, plain, optimizer, examples)]
            + [seconds(backend_step, backend, examples) for backend in variants.values()]
            for _ in range(ROUNDS)
        ]
        by_hand, *ours = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        cells = " ".join(f"{t:>12.1f} ms {by_hand / t:>5.2f}x" for t in ours)
        print(f"{name:>16} {by_hand:>7.1f} ms {cells}")
        figures[name] = {
            "plain_ms": by_hand,
            **{f"backend_{size}_ms": t for size, t in zip(variants, ours, strict=True)},
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
