"""What a distillation run may choose, and the formula that this amounts to. Computes nothing."""

from dataclasses import dataclass
from typing import ClassVar

from rl_algorithms.chat import Tokenizer
from rl_algorithms.choices import check_fields
from rl_algorithms.distillation.losses import Interpolation, Tail
from rl_algorithms.distillation.self_distillation import SUCCESSFUL_RESPONSE, check_template

__all__ = ["DistillConfig", "explain", "require_same_tokenizer"]

PROBES = ("0123456789", " 10 + 20 = 30")
"""What two tokenizers of the same number of tokens are compared on: digits are where they differ first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """What a distillation run may choose. The defaults are on-policy distillation by reverse KL."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    max_num_steps: int
    """Optimizer steps to take, a multiple of `steps_per_generation`."""

    num_prompts: int = 32
    """Prompts in each batch of rollouts. Off-policy the batches are given."""

    num_generations_per_prompt: int = 1
    """Rollouts of each prompt. They are not compared with one another: more prompts say more."""

    steps_per_generation: int = 1
    """Optimizer steps on each batch. More learns more from the same states, which the student reaches less and less."""

    max_turns: int = 1
    """Answers in one conversation at most, where an environment goes on after the first."""

    max_length: int | None = None
    """Tokens that a conversation may have before it is answered again. Null is no bound but the engine's context."""

    k: int = 64
    """Words of the teacher in each token's place. More is closer to the whole vocabulary, and more memory: 12 bytes a
    word and token."""

    beta: float = 1.0
    """0 is forward KL: the student spreads over all that the teacher may say. 1 is reverse KL: it keeps to what it does
    well. Between, see `interpolation`."""

    interpolation: Interpolation = "jsd"
    """What a `beta` between 0 and 1 is: `jsd` is GKD's, small close to an end; `mixed` is the weighted sum of both."""

    tail: Tail = "bucket"
    """What becomes of the probability outside of the `k` words: one more word, nothing, or both are scaled to have
    none. Only `bucket` is exact at k = V; see `rl_algorithms.distillation.losses`."""

    teacher_prompt_template: str | None = None
    """Self-distillation: the teacher's prompt, `{prompt}` and columns of the data in braces, such as `{answer}`, or
    `{successful_response}`, another response that succeeded. Null shows the teacher what the student sees."""

    success_reward: float = 1.0
    """The reward that makes a response a `{successful_response}`."""

    def __post_init__(self) -> None:
        counts = ("max_num_steps", "num_prompts", "num_generations_per_prompt", "steps_per_generation", "max_turns")
        check_fields(self, at_least={**dict.fromkeys(counts, 1), "max_length": 2})
        if self.k < 1:
            raise ValueError(f"k={self.k} must be >= 1: the teacher has to name a word")
        if self.max_num_steps % self.steps_per_generation:
            steps, each = self.max_num_steps, self.steps_per_generation
            raise ValueError(f"max_num_steps={steps} must be a multiple of steps_per_generation={each}")
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta={self.beta} must be from 0, forward KL, to 1, reverse KL")
        if self.tail == "ignore" and self.beta > 0.0:
            raise ValueError(
                f"tail='ignore' and beta={self.beta}: without its tail the reverse KL is least where the student "
                f"gives the teacher's words 1/e of their probability, and the rest to others; set tail='bucket', or "
                f"beta=0"
            )
        if self.tail == "renormalize" and self.k == 1:
            raise ValueError("tail='renormalize' makes the one word of k=1 certain for both, and every loss 0")
        if self.teacher_prompt_template is not None:
            names = check_template(self.teacher_prompt_template)
            if SUCCESSFUL_RESPONSE in names and self.num_generations_per_prompt == 1:
                raise ValueError(
                    f"{{{SUCCESSFUL_RESPONSE}}} is another response to the same prompt, and "
                    f"num_generations_per_prompt=1 samples one; set it to 2 or more"
                )

    def explain(self) -> str:
        """The formula that this configuration amounts to, and what is normalised by what. For people."""
        return explain(self)


def explain(config: DistillConfig) -> str:
    """One line for each part of the loss, in the order in which it is computed."""
    template = config.teacher_prompt_template
    shown = {} if template is None else {"teacher": f"reads the prompt as {template!r}, the student as it is"}
    parts = shown | {
        "words": f"S = the {config.k} words that the teacher finds most probable in each token's place",
        "tail": {
            "bucket": "all words outside of S are one more, of P and of Q",
            "ignore": "tokens outside S are left out; D is then not a divergence, and the student would learn none",
            "renormalize": "P and Q are scaled to sum to 1 over S; words outside cost nothing",
        }[config.tail],
        "per token": f"D = {_divergence(config)},  P the teacher's, Q the student's, log P at least -100",
        "loss": "L = sum_i sum_t D / N_tok",
        "counts": "N_tok trainable tokens of the whole optimizer step, over all ranks and microbatches",
    }
    width = max(map(len, parts)) + 2
    return "\n".join(f"{name:<{width}}{line}" for name, line in parts.items())


def require_same_tokenizer(student: Tokenizer, teacher: Tokenizer) -> None:
    """Refuse models that mean different words by the same ids.

    Compared are the tokenizers' numbers of tokens, not the models' vocabularies, which are padded differently in one
    family; and the ids of two probes, where both tokenizers have tokens for them.

    Raises:
        ValueError: the numbers of tokens differ, or the ids of a probe.
    """
    sizes = len(student), len(teacher)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the student's tokenizer has {sizes[0]} tokens and the teacher's {sizes[1]}: log-probabilities are "
            f"compared id by id, so the two must share one; take a teacher of the same family"
        )
    for probe in PROBES:
        ids = _ids(student, probe), _ids(teacher, probe)
        if ids[0] != ids[1]:
            raise ValueError(
                f"the student's tokenizer makes {ids[0]} of {probe!r} and the teacher's {ids[1]}: they have as many "
                f"tokens, and mean others by them; take a teacher of the same family"
            )


def _divergence(config: DistillConfig) -> str:
    forward, reverse = "sum_S P (log P - log Q)", "sum_S Q (log Q - log P)"
    if config.beta in (0.0, 1.0):
        return reverse if config.beta else forward
    beta, rest = f"{config.beta:g}", f"{1 - config.beta:g}"
    if config.interpolation == "mixed":
        return f"{rest} {forward} + {beta} {reverse}"
    mixture = f"M = {beta} P + {rest} Q"
    return f"{beta} sum_S P (log P - log M) + {rest} sum_S Q (log Q - log M),  {mixture}"


def _ids(tokenizer: Tokenizer, probe: str) -> list[int] | None:
    """None where the tokenizer has no token for a part of it: some raise a bare Exception then."""
    try:
        return list(tokenizer(probe, add_special_tokens=False)["input_ids"])
    except Exception:  # noqa: BLE001 - whatever a tokenizer raises of a character that it does not know
        return None
