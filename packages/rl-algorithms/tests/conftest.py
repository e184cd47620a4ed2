"""A world small enough to know in closed form: a policy that is a table of logits, an engine that samples from it."""

import os

from jaxtyping import install_import_hook

if os.environ.get("CHECK_SHAPES") == "1":  # as in the nightly run: it takes half as long again
    install_import_hook("rl_algorithms", "beartype.beartype")  # before the first import

import dataclasses
import importlib.util

import hypothesis
import pytest
import torch

from rl_algorithms.chat import Chat
from rl_algorithms.data import make_row

hypothesis.settings.register_profile(
    "rl-algorithms",
    deadline=None,  # timings decide nothing
    max_examples=100 if os.environ.get("EVERY_TEST") == "1" else 25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("rl-algorithms")

if "NOX_CURRENT_SESSION" in os.environ and importlib.util.find_spec("trl") is None:
    raise pytest.UsageError("this session installs the test group, and trl, which it compares with, is missing")

STOP = 1
VOCABULARY = 6


class Characters:
    """A tokenizer of digits: token 2 + d is the digit d; 0 is padding, 1 the stop token."""

    chat_template = None
    eos_token_id = STOP

    def __len__(self):
        return 12

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [2 + int(character) for character in text]}

    def apply_chat_template(self, conversation, **options):
        raise AssertionError("there is no template")

    def decode(self, token_ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(str(token - 2) if token > STOP else f"<{token}>" for token in token_ids)


class Table:
    """`logits[t]` for position t, whatever came before: exact, instant, no model. `cut` rows a microbatch."""

    def __init__(self, *, length=8, lr=2.0, cut=10**9, seed=0, vocabulary=VOCABULARY):
        generator = torch.Generator().manual_seed(seed)
        self.logits = (0.1 * torch.randn(length, vocabulary, generator=generator, dtype=torch.float64)).requires_grad_()
        self.lr, self.cut, self.version, self.grad = lr, cut, 0, None

    def distribution(self, examples):
        return self.logits.log_softmax(-1)[: examples.tokens.shape[1]]

    def token_logp(self, examples):
        width = examples.tokens.shape[1]
        logp = self.distribution(examples)[torch.arange(width), examples.tokens]
        return torch.where(examples.trainable, logp, 0.0)

    def output(self, examples, which):
        distribution = self.distribution(examples)
        if which == "logp":
            return self.token_logp(examples)
        if which == "logp_and_entropy":
            entropy = -(distribution.exp() * distribution).sum(-1).expand(examples.tokens.shape)
            return torch.stack([self.token_logp(examples), torch.where(examples.trainable, entropy, 0.0)], dim=-1)
        rows, tokens, _ = examples.token_ids.shape
        asked = distribution.expand(rows, tokens, -1).gather(-1, examples.token_ids)
        return torch.where(examples.trainable[..., None], asked, 0.0)

    @torch.no_grad()
    def logp(self, examples):
        return self.token_logp(examples)

    def forward_backward(self, examples, loss, output="logp"):
        sums = {}
        for start in range(0, len(examples.tokens), self.cut):
            rows = {f.name: getattr(examples, f.name)[start : start + self.cut] for f in dataclasses.fields(examples)}
            microbatch = type(examples)(**rows)
            value, parts = loss(self.output(microbatch, output), microbatch)
            value.backward()
            for name, part in parts.items():
                sums[name] = sums.get(name, 0) + part
        return sums

    def optim_step(self):
        self.grad, self.logits.grad = self.logits.grad, None
        with torch.no_grad():
            self.logits -= self.lr * self.grad
        self.version += 1
        return self.grad.norm().item()


@dataclasses.dataclass(frozen=True)
class Span:
    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Sampled:
    tokens: tuple
    logp: tuple
    truncated: bool
    versions: tuple


class TableEngine:
    """Samples from its own copy of a table's logits; digits and the stop token only."""

    def __init__(self, table, *, seed=0):
        self.table, self.generator, self.version = table, torch.Generator().manual_seed(seed), -1
        self.logits = None
        self(version=0)

    def __call__(self, *, version):
        self.logits, self.version = self.table.logits.detach().clone(), version
        return self

    def generate(self, prompts, max_new_tokens):
        return [self._one(len(prompt), max_new_tokens) for prompt in prompts]

    def _one(self, start, max_new_tokens):
        tokens, logp = [], []
        while len(tokens) < max_new_tokens and STOP not in tokens:
            distribution = self.logits[start + len(tokens)].log_softmax(-1)
            token = int(torch.multinomial(distribution.exp(), 1, generator=self.generator))
            tokens.append(token)
            logp.append(distribution[token].item())
        return Sampled(tuple(tokens), tuple(logp), STOP not in tokens, (Span(self.version, 0, len(tokens)),))


@pytest.fixture(scope="session")
def make_table():
    return Table


@pytest.fixture(scope="session")
def make_engine():
    return TableEngine


@pytest.fixture
def chat():
    return Chat(Characters(), prompt_format="plain", stop_token_ids=(STOP,))


@pytest.fixture
def rows():
    return [make_row({"prompt": str(digit), "answer": "3"}, where=f"row {digit}") for digit in range(4)]
