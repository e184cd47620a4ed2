"""How long a batch of conversations takes when each goes on by itself, against all in step and against the ideal.

The engine is simulated: it answers any number of requests at once, each after a log-normal while (median
`--median-s`, sigma `--sigma`), as a server of unlimited batching would. Tools take a log-normal while too. The ideal is
the longest episode alone: the sum of its own whiles, and nothing else. The arms run in turn, `--repeats` times, with
equal latencies. Prints one line of JSON: the seconds and the ratios, which are what counts.
"""

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import threading
import time
from types import SimpleNamespace

from rl_algorithms.chat import Chat
from rl_algorithms.contracts import EnvironmentReturn
from rl_algorithms.data import make_row
from rl_algorithms.environments import EpisodeEnvironment
from rl_algorithms.rollouts import collect, episode_seed

STOP = 1


class Characters:
    """A tokenizer of digits."""

    chat_template, eos_token_id = None, STOP

    def __len__(self):
        return 12

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [2 + int(character) for character in text]}

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(str(token - 2) for token in token_ids if token > STOP)


class Latencies:
    """The while of a turn: a function of the episode and the turn, equal in every arm."""

    def __init__(self, arguments, *, repeat):
        self.median_s, self.sigma, self.repeat = arguments.median_s, arguments.sigma, repeat

    def __call__(self, kind, seed):
        draw = random.Random(f"{kind}/{seed}/{self.repeat}").lognormvariate(0.0, self.sigma)
        return self.median_s * draw * (0.25 if kind == "tool" else 1.0)


class Engine:
    """Requests that sleep on one event loop."""

    def __init__(self, latencies):
        self.latencies, self.loop = latencies, asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def generate(self, prompts, sampling):
        raise AssertionError("it takes requests")

    def submit(self, prompt, sampling, *, seed):
        seconds = self.latencies("generate", seed)

        async def answer():
            await asyncio.sleep(seconds)
            digit = hashlib.sha256(str(seed).encode()).digest()[0] % 10
            span = SimpleNamespace(version=0, start=0, end=2)
            return SimpleNamespace(tokens=(2 + digit, STOP), logp=(-1.0, -1.0), truncated=False, versions=(span,))

        return asyncio.run_coroutine_threadsafe(answer(), self.loop)


class Tool:
    """An episode of `turns` turns, each with a tool that takes its while."""

    def __init__(self, latencies, turns):
        self.latencies, self.turns = latencies, turns

    async def reset(self, *, seed, row):
        self.place, self.turn = row["place"], 0
        return "1"

    async def step(self, answer):
        await asyncio.sleep(self.latencies("tool", (self.place, self.turn)))
        self.turn += 1
        over = self.turn == self.turns
        return EnvironmentReturn(
            reward=float(over), terminated=over, observations=() if over else ({"role": "user", "content": "1"},)
        )

    async def close(self):
        pass


class InStep:
    """The same environment, one batch at a time."""

    def __init__(self, inner):
        self.reset, self.step = inner.reset, inner.step


def run(arguments, *, repeat, in_step):
    """Seconds of one collection."""
    latencies = Latencies(arguments, repeat=repeat)
    engine = Engine(latencies)
    chat = Chat(Characters(), prompt_format="plain", stop_token_ids=(STOP,))
    rows = [make_row({"prompt": "1", "place": place}, where=f"row {place}") for place in range(arguments.episodes)]
    prompts = [chat.prompt(row) for row in rows]
    options = {"group_size": 1, "sampling": None, "chat": chat, "max_turns": arguments.turns, "seed": repeat}
    with EpisodeEnvironment(lambda: Tool(latencies, arguments.turns), max_workers=1024) as environment:
        judge = InStep(environment) if in_step else environment
        start = time.perf_counter()
        rollouts = collect(prompts, engine=engine, environment=judge, **options)
        seconds = time.perf_counter() - start
    engine.loop.call_soon_threadsafe(engine.loop.stop)
    return seconds, rollouts


def ideal(arguments, *, repeat):
    """The longest episode alone, in seconds."""
    latencies = Latencies(arguments, repeat=repeat)
    longest = 0.0
    for place in range(arguments.episodes):
        seed = episode_seed(episode_seed(repeat, place), 0)
        turns = range(arguments.turns)
        own = sum(latencies("generate", episode_seed(seed, turn)) + latencies("tool", (place, turn)) for turn in turns)
        longest = max(longest, own)
    return longest


def main():
    """Run the arms in turn and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--median-s", type=float, default=0.1)
    parser.add_argument("--sigma", type=float, default=0.7)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    figures = {"ideal_s": [], "by_itself_s": [], "in_step_s": []}
    for repeat in range(arguments.repeats):
        figures["ideal_s"].append(ideal(arguments, repeat=repeat))
        alone, one = run(arguments, repeat=repeat, in_step=False)
        together, other = run(arguments, repeat=repeat, in_step=True)
        assert one.tokens.equal(other.tokens), "both arms must collect the same rollouts"
        figures["by_itself_s"].append(alone)
        figures["in_step_s"].append(together)
    pairs = zip(figures["by_itself_s"], figures["in_step_s"], figures["ideal_s"], strict=True)
    over_ideal, speed_up = zip(*((alone / best, together / alone) for alone, together, best in pairs), strict=True)
    rounded = {name: [round(value, 3) for value in values] for name, values in figures.items()}
    ratios = {"over_ideal": statistics.median(over_ideal), "speed_up": statistics.median(speed_up)}
    print(json.dumps({**vars(arguments), **rounded, **{name: round(value, 3) for name, value in ratios.items()}}))


if __name__ == "__main__":
    main()
