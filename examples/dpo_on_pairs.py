"""DPO on pairs of a chosen and a rejected response. Runs on a CPU in seconds; needs no reward.

The reference is the model as it was before the first step. A tenth of the prompts is held out with all their pairs.
"""

import rl_launcher
from rl_launcher.quickstart.tiny_model import build

pairs = [
    {"prompt": f"is {number} even", "chosen": verdict, "rejected": "maybe"}
    for number in range(200)
    for verdict in ["yes" if number % 2 == 0 else "no"]
]

model, tokenizer = build(seed=0)
result = rl_launcher.train(
    "dpo",
    model=model,
    tokenizer=tokenizer,
    data=pairs,
    policy={"generation": {"max_new_tokens": 4}},
    dpo={"max_num_steps": 40, "batch_size": 16, "beta": 0.1, "optimizer": {"lr": 5e-4, "warmup_steps": 5}},
)
print(f"held-out pairs told apart: {result.summary['held_out_pair_accuracy_after']:.2f}")
