"""GRPO with your own model, rows and reward function, in ten lines. Runs on a CPU in seconds.

The model is tiny and has random weights; replace the first line by `model = "Qwen/Qwen3-0.6B"` for a real one, drop
`tokenizer`, and set `max_new_tokens` and the learning rate to what your task needs.
"""

import rl_launcher
from rl_launcher.quickstart.tiny_model import build

model, tokenizer = build(seed=0)
rows = [{"prompt": f"{number}*11=", "answer": str(number * 11)} for number in range(100)]


def score(completions, answer, **columns):  # a reward function as in TRL: 1 for digits only, 2 for the right ones
    return [float(text.isdigit()) + (text == right) for text, right in zip(completions, answer)]


result = rl_launcher.train(
    "grpo",
    model=model,  # or a name, or a folder
    tokenizer=tokenizer,
    data=rows,  # or a datasets.Dataset, a file, a data set on the hub
    reward=score,
    policy={"generation": {"max_new_tokens": 4}},
    grpo={"max_num_steps": 60, "num_prompts": 16, "optimizer": {"lr": 2e-3, "warmup_steps": 5}},
)
print(result)
print("reward by step:", [round(line["reward"], 2) for line in result.metrics if "reward" in line][::10])
print("open the report:", result.report)
