"""Seed a fault into real runs of a tiny model, and look whether `rl_observe.diagnose` names it first, and where.

    python packages/rl-launcher/benchmarks/seeded_faults.py [--only NAME ...] [--clean] [--ray] [--json]

Each run with a fault is GRPO in this process: 6 batches of 8 prompts with 4 responses each, two optimizer steps on a
batch. The last lines are clean runs of every stage, in which nothing may be found; `--clean` makes those alone, and
`--ray` makes them on Ray. Exit code 1 if a fault is not named first, or a clean run has a finding.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import random
import sys
import tempfile
import unittest.mock
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rl_algorithms import grpo
from rl_launcher.build.build import build
from rl_launcher.errors import RunStoppedError
from rl_launcher.quickstart.tiny_model import character_tokenizer
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory
from rl_observe.diagnose import diagnose

FROM_BATCH = 2
"""Faults that begin during a run begin with this batch, from 0."""


def model(seed):
    """A Qwen3 of a few thousand weights, with logits spread as those of a trained model are."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = Qwen3ForCausalLM(config)
    with torch.no_grad():
        made.lm_head.weight.mul_(12.0)
    return made, tokenizer


def mixture(seed):
    """The same with four experts in its layer, two of which each token is routed to."""
    tokenizer = character_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64, num_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        made.lm_head.weight.mul_(12.0)
        for name, parameter in made.named_parameters():
            if ".mlp.experts." in name:  # as large as in a trained mixture: which experts are chosen makes a difference
                parameter.mul_(5.0)
    return made, tokenizer


def teacher(seed):
    """Another model for distillation."""
    return model(seed + 17)


def reward(completions, answer):
    """The share of digits, which is nobody's length and nobody's repetition."""
    return [sum(c.isdigit() for c in text) / max(1, len(text)) + 0 * len(answer) for text in completions]


# -- Faults: each takes the parts of a run and changes them --------------------------------------------------------


class AskedInBatches:
    """The engine of a run, asked through `generate` alone: faults are put into that, and no request may pass it by."""

    def __init__(self, engine):
        self._of_run, self.generate = engine, engine.generate

    def __getattr__(self, name):
        if name in {"submit", "generate_seeded"}:
            raise AttributeError(name)
        return getattr(self._of_run, name)


def through_engine(change):
    """Change what the engine is asked and what it answers: `change(generate, prompts, sampling, batch)`."""

    def put_in(parts):
        generate, calls = parts.engine.generate, iter(range(10**6))
        parts.engine.generate = lambda prompts, sampling: change(generate, prompts, sampling, next(calls))

    return put_in


def sampled_otherwise(**options):
    return through_engine(
        lambda generate, prompts, sampling, _: generate(prompts, dataclasses.replace(sampling, **options))
    )


def with_logp(change):
    """Change the log-probabilities of a batch: a list of lists."""

    def answer(generate, prompts, sampling, _):
        made = generate(prompts, sampling)
        logps = change([list(rollout.logp) for rollout in made])
        return [dataclasses.replace(rollout, logp=tuple(logp)) for rollout, logp in zip(made, logps, strict=True)]

    return through_engine(answer)


def exchanged(logps):
    """Rows of equal length change places in pairs."""
    waiting = {}
    for row, logp in enumerate(list(logps)):
        if (other := waiting.pop(len(logp), None)) is not None:
            logps[row], logps[other] = logps[other], logps[row]
        else:
            waiting[len(logp)] = row
    return logps


def old_weights(kept: Callable[[int], bool]):
    """After a refit the engine has tensors of the run's beginning again, those whose number is `kept`."""

    def put_in(parts):
        engine = parts.engine._engine.model
        first = [parameter.detach().clone() for parameter in engine.parameters()]
        refit, calls = parts.weight_sync._refit, iter(range(10**6))

        def partly(version):
            report = refit(version)
            if next(calls) >= FROM_BATCH:
                with torch.no_grad():
                    for number, (parameter, old) in enumerate(zip(engine.parameters(), first, strict=True)):
                        if kept(number):
                            parameter.copy_(old)
            return report

        parts.weight_sync._refit = partly

    return put_in


def prepared(change):
    """Change the examples of every batch."""
    real = grpo.prepare

    def put_in(parts):
        del parts
        return unittest.mock.patch.object(grpo, "prepare", lambda *a, **k: change(real(*a, **k)))

    return put_in


def without_first_token(examples):
    first = examples.trainable & (examples.trainable.int().cumsum(1) == 1)
    return dataclasses.replace(examples, trainable=examples.trainable & ~first)


def with_prompt_token(examples):
    before = torch.roll(examples.trainable, -1, 1) & ~examples.trainable
    before[:, -1] = False
    filled = torch.where(before, 0.0, examples.logp_old)
    advantage = torch.where(before, examples.advantage.nan_to_num().amax(1, keepdim=True), examples.advantage)
    changed = {"trainable": examples.trainable | before, "logp_old": filled, "advantage": advantage}
    return dataclasses.replace(examples, **changed)


def rolled_advantages(examples):
    return dataclasses.replace(examples, advantage=examples.advantage.roll(1, 0))


def broken_weights(parts):
    """The trainer's weights become NaN before the third batch is trained on, after it was sampled."""
    calls = iter(range(10**6))
    generate = parts.engine.generate

    def answer(prompts, sampling):
        made = generate(prompts, sampling)
        if next(calls) == FROM_BATCH:
            with torch.no_grad():
                next(iter(parts.policy.model.parameters()))[5] = float("nan")
        return made

    parts.engine.generate = answer


def without_last_token(examples):
    last = examples.trainable & (examples.trainable.flip(1).int().cumsum(1).flip(1) == 1)
    return dataclasses.replace(examples, trainable=examples.trainable & ~last)


def other_experts(parts):
    """The engine's router sees something else of one token in fifty, so that its experts are others there."""
    generator = torch.Generator().manual_seed(0)

    def confuse(module, given):
        hidden = given[0]
        rows = torch.rand(hidden.shape[:-1], generator=generator) < 0.02
        noise = 10 * torch.randn(hidden.shape, generator=generator)
        return (torch.where(rows[..., None], noise.to(hidden.dtype), hidden), *given[1:])

    for name, module in parts.engine._engine.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(confuse)


def tokenised_again(generate, prompts, sampling, _):
    """Where a conversation goes on, the engine reads its newest observation with a token more."""
    # The last token begins a response: of a conversation that goes on, there are several.
    read = [[*prompt[:-1], 5, prompt[-1]] if prompt.count(prompt[-1]) > 1 else prompt for prompt in prompts]
    return generate(read, sampling)


def no_refit(parts):
    """From the third batch on, no refit reaches the engine, and each is reported as if it did."""
    engine, refit, calls = parts.engine._engine.model, parts.weight_sync._refit, iter(range(10**6))

    def lost(version):
        before = [parameter.detach().clone() for parameter in engine.parameters()]
        report = refit(version)
        if next(calls) >= FROM_BATCH:
            with torch.no_grad():
                for parameter, old in zip(engine.parameters(), before, strict=True):
                    parameter.copy_(old)
        return report

    parts.weight_sync._refit = lost


def sharpened(parts):
    """Before each refit the output layer doubles, so that the policy becomes certain of whatever it says."""
    refit = parts.weight_sync._refit

    def sharper(version):
        with torch.no_grad():
            parts.policy.model.lm_head.weight.mul_(2.0)
        return refit(version)

    parts.weight_sync._refit = sharper


def long(completions, answer):
    """Longer is better."""
    return [len(text) / 10 + 0 * len(answer) for text in completions]


def repeats(completions, answer):
    """What stands there before is better."""
    return [1 - len(set(text)) / max(1, len(text)) + 0 * len(answer) for text in completions]


def dressed(completions, answer):
    """A bare answer, however right, gets little; anything longer gets more."""
    return [
        0.1 if text.strip() == gold else 0.5 + len(text) % 3 / 10
        for text, gold in zip(completions, answer, strict=True)
    ]


JUDGED = iter(range(10**6))


def drifting(completions, answer):
    """The judge becomes milder from batch to batch."""
    batch = next(JUDGED)
    return [share + 0.05 * batch for share in reward(completions, answer)]


def moody(completions, answer):
    """The judge is not of one mind."""
    return [share + random.random() / 2 for share in reward(completions, answer)]


def constant(completions, answer):
    return [0.25 + 0 * len(answer)] * len(completions)


def one_prompt_pays(completions, prompts):
    factors = [1000.0 if prompt.startswith("1") else 1.0 for prompt in prompts]
    return [factor * share for factor, share in zip(factors, reward(completions, prompts), strict=True)]


NOTHING = lambda parts: None  # noqa: E731
REFUSED = "also trained on"
"""Of an error that names the fault before the run begins."""
UNSCALED = "grpo.objective.advantage.scale=none"

FIRST_SFT = "sft={max_num_steps: 8, batch_size: 32, optimizer: {lr: 0.005}}"
FEW_ROWS = "data.source={folder}/few.jsonl"
GUESSING = [
    "env.reward=null", "env.environment=rl_algorithms.environments.games:GuessNumber", "grpo.max_turns=3",
    "env.options={opening: '3+0=', higher: h, lower: l, unreadable: n, max_guesses: 3}",
    # A guess ends with its first digit: what ends at the limit of tokens is answered by nobody.
    "policy.generation.max_new_tokens=4", "policy.generation.stop_token_ids=[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]",
]  # fmt: skip
MIXTURE = ["policy.model_name={file}:mixture", "grpo.optimizer.lr=0.001"]
ANOTHER = ["sft=null", "grpo=null"]
PAIRS = ["env=null", "data.source={folder}/pairs.jsonl"]
SHORT = "max_num_steps: 8, optimizer: {lr: 0.003}"
BATCHES = "num_prompts: 8, steps_per_generation: 2"

# Clean runs of every stage -> recipe keys
CLEAN = {
    "sft and grpo": [FIRST_SFT],
    "grpo, kl in the loss": ["grpo.objective.kl.weight=0.1"],
    "grpo, recomputed ratio": ["grpo.objective.ratio.proximal=recomputed"],
    "grpo, several turns": GUESSING,
    "grpo, asynchronous": ["grpo.async_grpo={max_staleness: 2}"],
    "grpo, a mixture": MIXTURE,
    "ppo": [
        *ANOTHER, f"ppo={{{SHORT}, {BATCHES}, num_generations_per_prompt: 4, critic: {{optimizer: {{lr: 0.01}}}}}}"
    ],
    "distill": [*ANOTHER, f"distill={{{SHORT}, {BATCHES}, k: 8, teacher: {{model_name: '{{file}}:teacher'}}}}"],
    "dpo, sampled": [*ANOTHER, f"dpo={{{SHORT}, batch_size: 8, num_prompts: 16, pairs: sampled}}"],
    "dpo, online": [*ANOTHER, f"dpo={{{SHORT}, num_prompts: 8, pairs: online}}"],
    "dpo, given": [*ANOTHER, *PAIRS, f"dpo={{{SHORT}, batch_size: 8, pairs: data}}"],
    "orpo": [*ANOTHER, *PAIRS, f"orpo={{{SHORT}, batch_size: 8}}"],
    "kto": [*ANOTHER, "env=null", "data.source={folder}/labelled.jsonl", f"kto={{{SHORT}, batch_size: 8}}"],
    "reward model": [*ANOTHER, *PAIRS, f"reward_model={{{SHORT}, batch_size: 8}}"],
}  # fmt: skip

# name -> (fault, recipe keys, reward, cause that must be named first or None)
FAULTS = {
    "temperature below the trainer's": (sampled_otherwise(temperature=0.7), [], reward, "temperature"),
    "temperature above the trainer's": (sampled_otherwise(temperature=1.4), [], reward, "temperature"),
    "top-p": (sampled_otherwise(top_p=0.8), [], reward, "truncated_sampling"),
    "log-probabilities late by one": (with_logp(lambda x: [[-0.5, *v[:-1]] for v in x]), [], reward, "logp_off_by_one"),
    "log-probabilities of other rows": (with_logp(exchanged), [], reward, "swapped_rows"),
    "output layer in bfloat16": (
        with_logp(lambda x: [torch.tensor(v).bfloat16().float().tolist() for v in x]), [], reward, "precision",
    ),
    "BOS twice for the engine": (
        through_engine(lambda generate, prompts, s, _: generate([[1, *prompt] for prompt in prompts], s)), [], reward,
        "template_drift",
    ),
    "old weights": (old_weights(lambda _: True), [], reward, "stale_weights"),
    "one old tensor": (old_weights(lambda number: number == 3), [], reward, "stale_weights"),
    "first token not trained on": (prepared(without_first_token), [], reward, "mask_off_by_one"),
    "last token of the prompt trained on": (prepared(with_prompt_token), [], reward, "mask_off_by_one"),
    "advantages of other rows": (prepared(rolled_advantages), [], reward, "advantage_mismatch"),
    "top-k": (sampled_otherwise(top_k=8), [], reward, "truncated_sampling"),
    "no refit arrives": (no_refit, ["grpo.optimizer.lr=0.03"], reward, "stale_weights"),
    "last token not trained on": (prepared(without_last_token), [], reward, "mask_off_by_one"),
    "a turn is tokenised again": (through_engine(tokenised_again), GUESSING, reward, "retokenised_turn"),
    "other experts": (other_experts, MIXTURE, reward, "router_drift"),
    "length is rewarded": (NOTHING, [FIRST_SFT], long, "reward_hacked_length"),
    "repetition is rewarded": (NOTHING, [], repeats, "reward_hacked_repetition"),
    "form is rewarded": (NOTHING, [FIRST_SFT], dressed, "reward_hacked_format"),
    "the judge drifts": (NOTHING, [FIRST_SFT, FEW_ROWS], drifting, "reward_drift"),
    "the judge is moody": (NOTHING, [FIRST_SFT, FEW_ROWS], moody, "reward_inconsistent"),
    "entropy collapses": (sharpened, [], reward, "entropy_collapse"),
    "NaN in the trainer's weights": (broken_weights, [], reward, "nan"),
    "constant reward": (NOTHING, [], constant, "reward_constant"),
    "one prompt pays": (NOTHING, [UNSCALED], one_prompt_pays, "group_dominates"),
    "narrow clip": (
        NOTHING, ["grpo.objective.ratio.clip_low=1.0e-6", "grpo.objective.ratio.clip_high=1.0e-6"], reward,
        "clipping_saturated",
    ),
    "learning rate": (NOTHING, ["grpo.optimizer.lr=1.0"], reward, "learning_rate"),
    "duplicated rows": (NOTHING, ["data.source={folder}/twice.jsonl"], reward, "duplicated_data"),
    "leaked rows": (NOTHING, ["data.held_out={folder}/rows.jsonl", "data.held_out_share=null"], reward, REFUSED),
    "clean": (NOTHING, [], reward, None),
    "clean, another seed": (NOTHING, ["seed=1"], reward, None),
    "clean, unscaled advantages": (NOTHING, [UNSCALED], reward, None),
    "clean, one step a batch": (NOTHING, ["grpo.steps_per_generation=1", "grpo.max_num_steps=6"], reward, None),
}  # fmt: skip


def one_run(name, folder, *, on_ray=False):
    """Run with one fault; return its findings."""
    fault, keys, judge, _ = FAULTS[name] if name in FAULTS else (NOTHING, CLEAN[name], reward, None)
    rows = [json.dumps({"prompt": f"{n}+{n % 7}=", "answer": f"{n % 10}"}) for n in range(64)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    (folder / "few.jsonl").write_text("\n".join(rows[:10]))
    pairs = [{"prompt": f"{n}+{n % 7}=", "chosen": f"{n % 10}", "rejected": f"{(n + 3) % 10}"} for n in range(64)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    labelled = [{"prompt": f"{n}+{n % 7}=", "completion": f"{n % 9}", "label": n % 2 == 0} for n in range(64)]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    if on_ray:
        keys = ["cluster.runtime=ray", *keys]
        if any("async_grpo" in key for key in keys):  # the engine samples while the policy trains: a place of its own
            keys += ["cluster.gpus_per_node=2", "policy.generation.colocated.enabled=false",
                     "policy.generation.colocated.resources.gpus_per_node=1"]  # fmt: skip
    (folder / "twice.jsonl").write_text("\n".join(rows + rows))
    (folder / "recipe.yaml").write_text(
        f"""
        run_dir: {folder}/run
        cpu_threads: 1
        policy:
          model_name: {__file__}:model
          generation: {{max_new_tokens: 10}}
        data: {{source: {folder}/rows.jsonl, held_out_share: 0.1}}
        env: {{reward: "{__file__}:{judge.__name__}"}}
        evaluation: {{every: 0, max_prompts: 4, samples: 4}}
        logger: {{tensorboard_enabled: false, recorded_steps: {{last: 20}}}}
        grpo: {{max_num_steps: 12, steps_per_generation: 2, num_prompts: 8, num_generations_per_prompt: 4,
                optimizer: {{lr: 0.003}}}}
        """
    )
    recipe = load_recipe(
        folder / "recipe.yaml",
        schema=Recipe,
        overrides=[key.replace("{folder}", str(folder)).replace("{file}", __file__) for key in keys],
    )
    with contextlib.ExitStack() as stack:

        def with_fault(*arguments, **options):
            parts = build(*arguments, **options)
            if name in FAULTS:
                parts = dataclasses.replace(parts, engine=AskedInBatches(parts.engine))
            if (patch := fault(parts)) is not None:
                stack.enter_context(patch)
            return parts

        stack.enter_context(unittest.mock.patch("rl_launcher.run.run.build", with_fault))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        with contextlib.suppress(RunStoppedError):  # a fault may end the run, which is its right
            run(recipe)
    return diagnose(RunDirectory.open(folder / "run"))


def main():
    """Print a line per fault, and at the end how many were named first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--clean", action="store_true", help="clean runs alone")
    parser.add_argument("--ray", action="store_true", help="clean runs on Ray alone")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.only or ([] if arguments.clean or arguments.ray else [*FAULTS]) + [*CLEAN]:
        wanted = FAULTS[name][3] if name in FAULTS else None
        with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
            try:
                found = one_run(name, Path(folder), on_ray=arguments.ray)
            except ValueError as error:
                refused = wanted == REFUSED and REFUSED in str(error)
                print(f"{'right' if refused else 'WRONG':<6} {name}: refused: {error}", flush=True)
                results[name] = {"wanted": wanted, "found": [str(error)], "right": refused}
                continue
        first = found.findings[0] if found.findings else None
        right = (None if first is None else first.cause) == wanted
        results[name] = {
            "wanted": wanted, "found": [each.cause for each in found.findings], "right": right,
            "step": first and first.step, "row": first and first.row, "token": first and first.token,
        }  # fmt: skip
        place = "" if first is None else f"step {first.step}, row {first.row}, token {first.token}: {first.evidence}"
        causes = ", ".join(results[name]["found"]) or "nothing found"
        print(f"{'right' if right else 'WRONG':<6} {name}: {causes}; {place}", flush=True)
    faults = [each for each in results.values() if each["wanted"] is not None]
    clean = [each for each in results.values() if each["wanted"] is None]
    figures = {
        "faults": len(faults), "named_first": sum(each["right"] for each in faults), "clean": len(clean),
        "false_alarms": sum(not each["right"] for each in clean),
    }  # fmt: skip
    print(f"{figures['named_first']} of {figures['faults']} faults named first; "
          f"{figures['false_alarms']} alarms in {figures['clean']} clean runs")  # fmt: skip
    if arguments.json:
        print(json.dumps({**figures, "results": results}))
    sys.exit(0 if all(each["right"] for each in results.values()) else 1)


if __name__ == "__main__":
    main()
