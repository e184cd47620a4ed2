"""Your own environment of several turns: the policy guesses a number and is told "more" or "less". CPU, seconds.

Each rollout has an episode of its own: `reset` returns what the policy reads first, `step` receives each response and
returns the reward and, unless the episode is over, what the policy reads next. Only what the policy wrote is trained
on.
"""

import rl_launcher
from rl_algorithms.contracts import EnvironmentReturn
from rl_launcher.quickstart.tiny_model import build


class Guess:
    """One game: a secret digit and three guesses."""

    def __init__(self, guesses=3):  # called with env.options
        self.left = guesses

    def reset(self, *, seed, row):  # once for each rollout, with its row of the data
        self.secret = row["secret"]
        return row["prompt"]

    def step(self, response):
        self.left -= 1
        guess = response[:1]
        if not guess.isdigit():
            return EnvironmentReturn(reward=0.0, terminated=True)
        distance = abs(int(guess) - self.secret)
        if not distance or not self.left:
            return EnvironmentReturn(reward=1 - distance / 10, terminated=True)
        hint = "more" if int(guess) < self.secret else "less"
        return EnvironmentReturn(reward=0.0, terminated=False, observations=({"role": "user", "content": hint},))

    def close(self):
        pass


rows = [{"prompt": f"game {number}", "secret": number % 10, "answer": str(number // 7 % 10)} for number in range(200)]
model, tokenizer = build(seed=0)
result = rl_launcher.train(
    "grpo",
    model=model,
    tokenizer=tokenizer,
    data=rows,
    environment=Guess,
    env={"options": {"guesses": 3}, "timeout_s": 5.0},
    policy={"generation": {"max_new_tokens": 2}},
    sft={"max_num_steps": 30, "batch_size": 32, "optimizer": {"lr": 2e-3, "warmup_steps": 5}},  # an answer is a digit
    grpo={"max_num_steps": 24, "max_turns": 3, "num_prompts": 16, "optimizer": {"lr": 1e-3, "warmup_steps": 5}},
)
played = [line for line in result.metrics if "turns" in line]
first, last = played[0], played[-1]
print(f"reward {first['reward']:.2f} -> {last['reward']:.2f}, turns {first['turns']:.2f} -> {last['turns']:.2f}")
