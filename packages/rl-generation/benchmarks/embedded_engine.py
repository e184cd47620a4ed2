"""How much faster the embedded engine generates than `model.generate`, side by side in one process, on one thread.

Three shapes, all of one tiny Qwen3 with random weights: short answers, as of a quickstart (32 prompts, 8 rollouts of
each, at most 9 tokens); a long tail (the same prompts, at most 96 tokens, geometric lengths of mean 13); and the same
tail with twice as many prompts, 512 rollouts, of which 256 are decoded together. Both sides take turns; figures are of
CPU seconds, which what else runs on the machine disturbs least.

    python benchmarks/embedded_engine.py [--rounds 3]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers

from rl_generation import Sampling, TransformersEngine


class Shape(NamedTuple):
    prompts: int
    max_new_tokens: int
    stops: list[int]


ROLLOUTS = 8
# With uniform random weights each of 51 tokens is about as likely: four stop tokens end an answer after 13 on average.
SHAPES = {
    "short": Shape(32, 9, [2]),
    "long tail": Shape(32, 96, [2, 20, 21, 22]),
    "512 long tail": Shape(64, 96, [2, 20, 21, 22]),
}


def build_model() -> transformers.Qwen3ForCausalLM:
    torch.manual_seed(0)
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
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def build_prompts(count: int) -> list[list[int]]:
    """Prompts of 7 to 12 tokens."""
    digits = random.Random(0)
    return [[1, 3, *(digits.randrange(5, 15) for _ in range(digits.randint(4, 9))), 4] for _ in range(count)]


def generate_of_transformers(model, prompts: list[list[int]], shape: Shape) -> int:
    """Sample with `model.generate`; return the number of tokens up to and with each first stop token."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts for _ in range(ROLLOUTS)])
    output = model.generate(
        tokens,
        attention_mask=(tokens != 0).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=shape.max_new_tokens,
        pad_token_id=0,
        eos_token_id=shape.stops,
    )
    is_stop = torch.isin(output[:, width:], torch.tensor(shape.stops)).int()
    return int((is_stop.cumsum(1) - is_stop == 0).sum())


def tokens_per_s(call: Callable[[], int]) -> float:
    start = time.process_time()
    tokens = call()
    return tokens / (time.process_time() - start)


def measure(model, shape: Shape, rounds: int) -> dict[str, float]:
    """Alternate both; return the median throughput of each, and the median and the range of their ratios."""
    engine = TransformersEngine(model, stop_token_ids=shape.stops, pad_token_id=0, continuous_batching="required")
    prompts, sampling = build_prompts(shape.prompts), Sampling(max_new_tokens=shape.max_new_tokens, n=ROLLOUTS)

    def ours() -> int:
        return sum(len(rollout.tokens) for rollout in engine.generate(prompts, sampling))

    def theirs() -> int:
        return generate_of_transformers(model, prompts, shape)

    ours(), theirs()
    pairs = [(tokens_per_s(ours), tokens_per_s(theirs)) for _ in range(rounds)]
    # Of throughputs: the two draw different answers, whose lengths differ a little.
    ratios = [mine / other for mine, other in pairs]
    return {
        "engine_tokens_per_s": statistics.median(mine for mine, _ in pairs),
        "generate_tokens_per_s": statistics.median(other for _, other in pairs),
        "ratio": statistics.median(ratios),
        "lowest_ratio": min(ratios),
        "highest_ratio": max(ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = build_model()
    figures = {name: measure(model, shape, rounds) for name, shape in SHAPES.items()}
    print(f"{'shape':<14} {'engine':>10} {'generate':>10} {'ratio':>6} {'range':>12}   (tokens a CPU second)")
    for name, row in figures.items():
        spread = f"{row['lowest_ratio']:.1f}-{row['highest_ratio']:.1f}"
        print(
            f"{name:<14} {row['engine_tokens_per_s']:10.0f} {row['generate_tokens_per_s']:10.0f} {row['ratio']:6.2f} "
            f"{spread:>12}"
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"threads": 1, "rounds": rounds, **versions, **figures}))


if __name__ == "__main__":
    main()
