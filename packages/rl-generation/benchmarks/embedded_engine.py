"""How much faster the embedded engine generates than `model.generate`, side by side in one process, on one thread.

Two shapes, both of one tiny Qwen3 with random weights: short answers, as of a quickstart (32 prompts, 8 rollouts of
each, at most 9 tokens), and a long tail (the same prompts, at most 96 tokens, geometric lengths of mean 13).

    python benchmarks/embedded_engine.py [--rounds 7]
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
import transformers

from rl_generation import Sampling, TransformersEngine, verify_logp

PROMPTS, ROLLOUTS = 32, 8
# With uniform random weights each of 51 tokens is about as likely: four stop tokens end an answer after 13 on average.
SHAPES = {"short": (9, [2]), "long tail": (96, [2, 20, 21, 22])}


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


def build_prompts() -> list[list[int]]:
    """32 prompts of 7 to 12 tokens, each 8 times in a row."""
    digits = random.Random(0)
    prompts = [[1, 3, *(digits.randrange(5, 15) for _ in range(digits.randint(4, 9))), 4] for _ in range(PROMPTS)]
    return [prompt for prompt in prompts for _ in range(ROLLOUTS)]


def generate_of_transformers(model, prompts: list[list[int]], max_new_tokens: int, stops: list[int]) -> int:
    """Sample with `model.generate`; return the number of tokens up to and with each first stop token."""
    width = max(map(len, prompts))
    tokens = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    output = model.generate(
        tokens,
        attention_mask=(tokens != 0).long(),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        pad_token_id=0,
        eos_token_id=stops,
    )
    is_stop = torch.isin(output[:, width:], torch.tensor(stops)).int()
    return int((is_stop.cumsum(1) - is_stop == 0).sum())


def seconds(call: Callable[[], int]) -> tuple[float, int]:
    start = time.perf_counter()
    tokens = call()
    return time.perf_counter() - start, tokens


def measure(model, prompts: list[list[int]], max_new_tokens: int, stops: list[int], rounds: int) -> dict[str, float]:
    """Alternate both; return the median of each, in ms and tokens a second, and the median of the ratios."""
    engine = TransformersEngine(model, stop_token_ids=stops, pad_token_id=0)
    sampling = Sampling(max_new_tokens=max_new_tokens)

    def ours() -> int:
        return sum(len(rollout.tokens) for rollout in engine.generate(prompts, sampling))

    def theirs() -> int:
        return generate_of_transformers(model, prompts, max_new_tokens, stops)

    ours(), theirs()
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(rounds)]
    rollouts = engine.generate(prompts, sampling)
    return {
        "engine_ms": 1e3 * statistics.median(mine for (mine, _), _ in pairs),
        "generate_ms": 1e3 * statistics.median(other for _, (other, _) in pairs),
        "engine_tokens_per_s": statistics.median(tokens / mine for (mine, tokens), _ in pairs),
        "generate_tokens_per_s": statistics.median(tokens / other for _, (other, tokens) in pairs),
        # Of throughputs: the two draw different answers, whose lengths differ a little.
        "ratio": statistics.median((mine[1] / mine[0]) / (other[1] / other[0]) for mine, other in pairs),
        "max_abs_logp_difference": verify_logp(engine, prompts, rollouts, sampling=sampling).max_abs_difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model, prompts = build_model(), build_prompts()
    figures = {name: measure(model, prompts, *shape, rounds) for name, shape in SHAPES.items()}
    print(f"{'shape':<10} {'engine':>18} {'generate':>18} {'ratio':>6} {'|logp difference|':>18}")
    for name, row in figures.items():
        print(
            f"{name:<10} {row['engine_ms']:6.0f} ms {row['engine_tokens_per_s']:6.0f}/s "
            f"{row['generate_ms']:6.0f} ms {row['generate_tokens_per_s']:6.0f}/s {row['ratio']:6.2f} "
            f"{row['max_abs_logp_difference']:18.1e}"
        )
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"threads": 1, "rounds": rounds, **versions, **figures}))


if __name__ == "__main__":
    main()
