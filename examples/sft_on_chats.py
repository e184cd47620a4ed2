"""SFT on conversations in the `messages` format. Runs on a CPU in seconds; needs no reward.

The loss is over what the assistant says: every answer, or `train_on="last_turn"`, or a message at a time with
`"train": False`. A tenth of the conversations is held out and measures the loss.
"""

import rl_launcher
from rl_launcher.quickstart.tiny_model import build


def chat(number):
    return {
        "messages": [
            {"role": "user", "content": f"count from {number}"},
            {"role": "assistant", "content": f"{number} {number + 1}"},
            {"role": "user", "content": "go on"},
            {"role": "assistant", "content": f"{number + 2} {number + 3}"},
        ]
    }


model, tokenizer = build(seed=0)
result = rl_launcher.train(
    "sft",
    model=model,
    tokenizer=tokenizer,
    data=[chat(number) for number in range(200)],
    policy={"generation": {"max_new_tokens": 8}},
    sft={"max_num_steps": 60, "batch_size": 16, "optimizer": {"lr": 2e-3, "warmup_steps": 5}},
)
print(f"held-out loss {result.summary['held_out_loss_before']:.3f} -> {result.summary['held_out_loss_after']:.3f}")

prompt = [{"role": "user", "content": "count from 41"}]
tokens = result.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = result.model.generate(**tokens, max_new_tokens=8, do_sample=False)
print(result.tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True))
