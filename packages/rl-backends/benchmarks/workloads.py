"""The models, the batches and the plain loop that the benchmarks of this folder compare with. Runs nothing."""

import dataclasses
from typing import ClassVar

import torch
import transformers


@dataclasses.dataclass(frozen=True)
class Examples:
    """Rows as the backend wants them."""

    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    tied: bool = True

    def make(self) -> torch.nn.Module:
        """Random weights."""
        config = transformers.Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=3 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads // 2,
            head_dim=self.hidden // self.heads,
            max_position_embeddings=4096,
            tie_word_embeddings=self.tied,
        )
        return transformers.Qwen3ForCausalLM(config)


MODELS = {
    "quickstart, 0.4 M": Model(vocabulary=51, hidden=128, layers=2, heads=4),
    "hidden 256, 4 layers, V 16k": Model(vocabulary=16_384, hidden=256, layers=4, heads=8),
    "hidden 1024, 16 layers, V 128k": Model(vocabulary=131_072, hidden=1024, layers=16, heads=16),
}
SHAPES = {"even": (20, 20), "ragged": (11, 21), "long tail": (8, 96)}


def make_examples(vocabulary: int, *, rows: int, shortest: int, longest: int) -> Examples:
    """Rows of `shortest` to `longest` tokens, most of them short; the second half of each is trainable."""
    lengths = (shortest + (longest - shortest) * torch.rand(rows) ** 3).long()
    lengths[0] = longest
    position = torch.arange(longest)
    trainable = (position >= lengths[:, None] // 2) & (position < lengths[:, None])
    tokens = torch.randint(5, vocabulary, (rows, longest)).where(position < lengths[:, None], 0)
    return Examples(tokens=tokens, lengths=lengths, trainable=trainable)


def plain_forward_backward(model: torch.nn.Module, examples: Examples, *, dtype: torch.dtype = torch.float32) -> None:
    """What one writes by hand: pad to the longest row, mask, full logits."""
    device = next(model.parameters()).device
    tokens, lengths, trainable = (t.to(device) for t in (examples.tokens, examples.lengths, examples.trainable))
    mask = (torch.arange(tokens.shape[1], device=device) < lengths[:, None]).long()
    with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
    logp = logits.float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    (-(logp * trainable[:, 1:]).sum() / trainable.sum()).backward()


def plain_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, examples: Examples, *, dtype: torch.dtype = torch.float32
) -> None:
    """A whole optimizer step of the plain loop."""
    plain_forward_backward(model, examples, dtype=dtype)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def mean_loss(examples: Examples) -> object:
    """The same loss, divided by the count of the whole step, as a backend takes it."""
    total = int(examples.trainable.sum())
    return lambda logp, rows: (-(logp * rows.trainable).sum() / total, {})
