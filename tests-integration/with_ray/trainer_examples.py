"""Examples, losses and a recipe for tests of trainers over Ray; the ranks import this module too."""

import dataclasses
import os
import time
from typing import ClassVar

import torch
import torch.distributed as dist

from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

RECIPE = """
run_dir: {folder}/run
cpu_threads: 1
cluster: {{runtime: ray, gpus_per_node: {ranks}, start_timeout_s: 420, call_timeout_s: 420}}
policy: {{model_name: {folder}/model, generation: {{max_new_tokens: 9}}}}
data: {{source: "rl_launcher.quickstart.sort_digits:dataset"}}
env: {{reward: "rl_launcher.quickstart.sort_digits:reward"}}
"""


@dataclasses.dataclass(frozen=True)
class Examples:
    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor
    total: torch.Tensor
    weights: torch.Tensor  # in bfloat16, of which there are no arrays


@dataclasses.dataclass(frozen=True)
class ToldExamples(Examples):
    """Whoever makes some prints how many rows they are."""

    def __post_init__(self):
        print(f"made of {len(self.tokens)} rows", flush=True)


def recipe(folder, *overrides, ranks=2):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(folder=folder, ranks=ranks))
    return load_recipe(path, schema=Recipe, overrides=overrides).value


def examples(rows=16, width=12):
    generator, position = torch.Generator().manual_seed(0), torch.arange(width)
    lengths = torch.randint(4, width, (rows,), generator=generator)
    trainable = (position >= 2) & (position < lengths[:, None])
    return Examples(
        tokens=torch.randint(3, 14, (rows, width), generator=generator),
        lengths=lengths,
        trainable=trainable,
        total=torch.full((rows,), int(trainable.sum())),
        weights=torch.linspace(0.5, 1.5, rows).to(torch.bfloat16),
    )


def loss(logp, rows):
    """Weighted negative log-likelihood; per token of the whole batch."""
    kept = torch.where(rows.trainable, logp, 0.0) * rows.weights[:, None].float()
    total = -kept.sum() / rows.total[0]
    return total, {"loss": total.detach(), "rows": torch.tensor(float(len(rows.tokens)))}


def loss_that_fails_on_rank_1(logp, rows):
    if dist.get_rank() == 1:
        raise KeyError("no such column")
    return loss(logp, rows)


def loss_that_hangs_on_rank_1(logp, rows):
    if dist.get_rank() == 1:
        print("I stand still", flush=True)
        time.sleep(600)
    return loss(logp, rows)


def loss_that_kills_rank_1(logp, rows):
    if dist.get_rank() == 1:
        print("these are my last words", flush=True)
        os.kill(os.getpid(), 9)
    return loss(logp, rows)
