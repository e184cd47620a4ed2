"""Several reward functions, weighted, and how a wrong one is reported. Runs on a CPU in seconds.

A reward function receives keyword lists with one item for each response: `prompts`, `completions`, and every column of
the data under its own name. It returns one number each. Columns that a function does not name are not passed.
"""

import rl_launcher
from rl_launcher.quickstart.tiny_model import build

model, tokenizer = build(seed=0)
rows = [{"prompt": f"{number}+1=", "answer": str(number + 1), "level": number % 3} for number in range(90)]


def right(completions, answer):
    return [float(text == wanted) for text, wanted in zip(completions, answer)]


def digits(completions, level):
    """A share of digits; harder rows count more."""
    shares = [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]
    return [share * (1 + harder) / 3 for share, harder in zip(shares, level)]


async def politeness(completions):
    """A coroutine works too, for example one that calls a judge over HTTP."""
    return [float("please" in text) for text in completions]


result = rl_launcher.train(
    "grpo",
    model=model,
    tokenizer=tokenizer,
    data=rows,
    reward=[right, digits, politeness],  # or a dict by name
    env={"weights": {"right": 2.0, "politeness": 0.0}},  # 1 where none is given; 0 logs without rewarding
    policy={"generation": {"max_new_tokens": 4}},
    grpo={"max_num_steps": 30, "num_prompts": 16, "optimizer": {"lr": 1e-3, "warmup_steps": 5}},
)
for line in (result.metrics[1], result.metrics[-1]):
    print({name: round(line[name], 3) for name in ("reward", "reward/right", "reward/digits") if name in line})


def asks_too_much(completions, gold):  # the rows have no column "gold"
    return [0.0 for _ in completions]


try:
    rl_launcher.train("grpo", model=model, tokenizer=tokenizer, data=rows, reward=asks_too_much)
except rl_launcher.Refusal as refusal:
    print("refused before training:", refusal)
