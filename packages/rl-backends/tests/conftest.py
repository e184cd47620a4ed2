"""Tiny models from configurations, ragged examples, and a plain loop to compare with."""

import os

from jaxtyping import install_import_hook

if os.environ.get("CHECK_SHAPES") == "1":  # as in the nightly run: it takes half as long again
    install_import_hook("rl_backends", "beartype.beartype")  # before the first import

import copy
import dataclasses
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Examples:
    rows_per_unit: ClassVar[int] = 1
    tokens: Tensor
    lengths: Tensor
    trainable: Tensor
    weight: Tensor


@dataclasses.dataclass(frozen=True)
class Pairs(Examples):
    rows_per_unit: ClassVar[int] = 2


@dataclasses.dataclass(frozen=True)
class Asking(Examples):
    token_ids: Tensor


def asking(examples, *, words=4, vocabulary=67, seed=1):
    """The same rows, with words to ask about in each token's place; one that no model knows where nothing trains."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, vocabulary, (*examples.tokens.shape, words), generator=generator)
    token_ids[~examples.trainable] = -7
    return Asking(**vars(examples), token_ids=token_ids)


def make_examples(*, rows=6, vocabulary=67, width=13, seed=0, kind=Examples):
    """Ragged rows, each with a prompt of one to three tokens and a weight for the loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, width), generator=generator)
    lengths = torch.randint(5, width + 1, (rows,), generator=generator)
    starts = torch.randint(1, 4, (rows,), generator=generator)
    position = torch.arange(width)
    trainable = (position >= starts[:, None]) & (position < lengths[:, None])
    weight = torch.randn(rows, generator=generator)
    return kind(tokens=tokens, lengths=lengths, trainable=trainable, weight=weight)


def token_loss(logp, examples, *, num_tokens):
    """A loss with a sign and a size per row, divided by the step's count."""
    total = -(torch.where(examples.trainable, logp, 0.0) * examples.weight[:, None]).sum()
    return total / num_tokens, {"loss": total.detach(), "tokens": examples.trainable.sum()}


def words_loss(asked, examples, *, num_tokens):
    """Of [b, w, k] numbers a token, each with another weight: entropies beside log-probabilities, or given words."""
    weights = examples.weight[:, None, None] - 0.5 * torch.arange(1.0, asked.shape[-1] + 1)
    total = torch.where(examples.trainable[..., None], asked * weights, 0.0).sum()
    return total / num_tokens, {"loss": total.detach()}


def pair_loss(logp, examples, *, num_tokens):
    """A loss that needs two neighbouring rows at once."""
    answers = torch.where(examples.trainable, logp, 0.0).sum(dim=1)
    total = -F.logsigmoid(answers[0::2] - answers[1::2]).sum()
    return total / num_tokens, {"loss": total.detach()}


def plain_logp(model, examples, *, temperature=1.0):
    """One row at a time, no padding, full logits: what every faster path must equal."""
    out = torch.zeros(examples.tokens.shape)
    for row, length in enumerate(examples.lengths.tolist()):
        tokens = examples.tokens[row, :length]
        logits = model(input_ids=tokens[None]).logits[0, :-1].float() / temperature
        logp = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        mask = examples.trainable[row, 1:length]
        out = out.index_put((torch.tensor([row]), torch.arange(1, length)[mask]), logp[mask])
    return out


def plain_steps(model, examples, loss, *, steps, lr, max_grad_norm):
    """`steps` optimizer steps of plain Hugging Face and torch; returns the gradients of the first and the weights.

    eps is large, so that Adam does not blow the rounding of gradients near 0 up to whole steps.
    """
    model = copy.deepcopy(model)
    groups = [  # norms and biases do not decay
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-4)
    first = None
    for _ in range(steps):
        loss(plain_logp(model, examples), examples)[0].backward()
        first = first or {name: p.grad.clone() for name, p in model.named_parameters()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return first, {name: p.detach() for name, p in model.named_parameters()}


def make_model(family, *, seed=0, **overrides):
    """Two layers of a family, random weights, nothing trivially right."""
    import transformers

    config = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 8,
        "attn_implementation": "eager" if family == "Gemma2" else "sdpa",  # Gemma 2 caps attention scores
        **overrides,
    }
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def mapped_file_bytes():
    """Resident pages of mapped files, such as libraries, which the kernel takes where memory is short."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) * 1024


ABOUT_TORCH = {
    "test_checkpoint_ranks.py",
    "test_commands.py",
    "test_cut.py",
    "test_dry_run.py",
    "test_failures.py",
    "test_lora_ranks.py",
    "test_metrics_step.py",
    "test_offload.py",
    "test_optimizer_ranks.py",
    "test_optimizers.py",
    "test_readme.py",
    "test_sameness.py",
}
"""Modules that are dear, and claim nothing that a release of transformers could break; as tests of two ranks are, which
older releases leave to those of loading and of parity."""
NEWEST = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["tool"]["matrix"]["cells"][-1]


def pytest_collection_modifyitems(items):
    """Run what is about torch alone in one cell of each torch; `EVERY_TEST=1` runs everything anywhere."""
    newest = version("transformers").startswith(f"{NEWEST['transformers']}.")
    another_torch = not version("torch").startswith(f"{NEWEST['torch']}.")
    if newest or another_torch or os.environ.get("EVERY_TEST") == "1":
        return
    reason = f"about torch alone: the cell of transformers {NEWEST['transformers']} runs it, as EVERY_TEST=1 does"
    for item in items:
        if item.path.name in ABOUT_TORCH or "two_ranks" in item.name:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure():
    """A property that is checked on a busy machine is no slower a property."""
    from hypothesis import HealthCheck, settings

    settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("no-clock")


@pytest.fixture(scope="session")
def start_program():
    """`start_program(file, task)`: a process that runs `main(task)` of it, forked from one that has torch already."""
    sys.path.append(str(Path(__file__).with_name("launching")))
    from forkserver import start

    return start


@pytest.fixture(scope="session")
def world():
    """The helpers above, as one namespace: test modules cannot import one another."""
    import types

    return types.SimpleNamespace(**{name: value for name, value in globals().items() if callable(value)})
