"""The same recipe on both backends: the same first step to rounding, and a policy that learns, in one process or more.

In one process the launcher runs it; over several ranks, a program that composes the packages itself.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")

HERE = Path(__file__).parent
RECIPE = HERE.parent / "recipes" / "quickstart.yaml"
PROGRAM = HERE / "programs" / "grpo_over_ranks.py"
MEGATRON = "policy.megatron_cfg.enabled=true"
REASON = "megatron trains the policy: megatron_cfg.enabled is true, and takes precedence over dtensor_cfg"
LAYOUTS = {
    "two pipeline stages": (2, {"pipeline_model_parallel_size": 2}),
    "tensor by data parallelism": (4, {"tensor_model_parallel_size": 2}),
}
TOLERANCE = 1e-5


def finish(command: list[str]) -> subprocess.CompletedProcess[str]:
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished


def run_recipe(run_dir: Path, *overrides: str) -> tuple[dict, str]:
    short = ["evaluation.max_prompts=300", "evaluation.every=0", f"run_dir={run_dir}"]
    finished = finish([sys.executable, "-m", "rl_launcher", "run", str(RECIPE), *short, *overrides])
    return json.loads(finished.stdout.splitlines()[-1]), finished.stdout + finished.stderr


def run_ranks(ranks: int, *, model: Path, out: Path, megatron: dict | None) -> list[dict]:
    """What each step logged. Everything else is in `out`."""
    out.mkdir()
    task = json.dumps({"folder": str(model), "out": str(out), "dtensor": {}, "megatron": megatron, "steps": 3})
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    finish([sys.executable, *start, str(PROGRAM), task])
    return json.loads((out / "logged.json").read_text())


def logged(run_dir: Path, stage: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == stage and line["step"] > 0]


def require_same_step(one: dict, other: dict) -> None:
    """Reward, because the rollouts are the same; loss and gradient, to rounding."""
    assert one.get("reward") == other.get("reward")
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=TOLERANCE)
    # Advantages of a group add up to 0, and so does the loss of the first step, but for rounding.
    assert one["loss"] == pytest.approx(other["loss"], rel=TOLERANCE, abs=1e-6)
    assert one["grad_norm"] > 0.0


@pytest.fixture(scope="module")
def megatron_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, str, Path]:
    run_dir = tmp_path_factory.mktemp("megatron") / "run"
    return *run_recipe(run_dir, MEGATRON, "grpo.max_num_steps=80", "grpo.optimizer.warmup_steps=4"), run_dir


@pytest.fixture(scope="module")
def dtensor_step(megatron_run: tuple[dict, str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """The first step in one process, by DTensor, from the model that Megatron saved."""
    *_, run_dir = megatron_run
    out = tmp_path_factory.mktemp("ranks") / "dtensor"
    return run_ranks(1, model=run_dir / "model", out=out, megatron=None)[0], out


def test_the_quickstart_learns_on_megatron_and_says_who_trains(megatron_run: tuple[dict, str, Path]) -> None:
    summary, printed, run_dir = megatron_run
    assert REASON in " ".join(printed.split())
    assert summary["held_out_sampled_after"] >= summary["held_out_sampled_before"] + 0.15
    assert summary["held_out_greedy_after"] >= summary["held_out_greedy_before"] + 0.05
    errors = [line["token_mult_prob_error"] for line in logged(run_dir, "grpo") if "token_mult_prob_error" in line]
    assert max(errors) <= 1.0001  # trainer and engine agree before every batch: each refit brought what was trained


@pytest.mark.slow
def test_one_recipe_gives_the_same_first_steps_on_both_backends(
    megatron_run: tuple[dict, str, Path], tmp_path: Path
) -> None:
    """SFT from random weights, then GRPO from the weights that Megatron saved, with one optimizer step a batch."""
    *_, megatron = megatron_run
    run_recipe(tmp_path / "sft", "grpo=null", "sft.max_num_steps=21")
    for ours, theirs in zip(logged(megatron, "sft")[:3], logged(tmp_path / "sft", "sft")[:3], strict=True):
        require_same_step(ours, theirs)
    first = {}
    for backend in ("dtensor", "megatron"):
        run_dir = tmp_path / backend
        choice = [f"policy.megatron_cfg.enabled={str(backend == 'megatron').lower()}"]
        choice += [f"policy.model_name={megatron / 'model'}", "sft=null", "grpo.steps_per_generation=1"]
        run_recipe(run_dir, *choice, "grpo.max_num_steps=1", "grpo.optimizer.warmup_steps=0")
        first[backend] = logged(run_dir, "grpo")[0]
    require_same_step(first["megatron"], first["dtensor"])


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(*LAYOUTS["two pipeline stages"], id="two pipeline stages", marks=pytest.mark.slow),
        pytest.param(*LAYOUTS["tensor by data parallelism"], id="tensor by data parallelism", marks=pytest.mark.slow),
    ],
)
def test_ranks_take_the_same_first_step_as_one_process_and_feed_an_engine_each(
    megatron_run: tuple[dict, str, Path], dtensor_step: tuple[dict, Path], tmp_path: Path, ranks: int, layout: dict
) -> None:
    *_, run_dir = megatron_run
    theirs, dtensor = dtensor_step
    steps = run_ranks(ranks, model=run_dir / "model", out=tmp_path / "out", megatron=layout)
    require_same_step(steps[0], theirs)
    before = load_file(run_dir / "model" / "model.safetensors")
    after = torch.load(tmp_path / "out" / "after_one_step.pt", weights_only=True)
    expected = torch.load(dtensor / "after_one_step.pt", weights_only=True)
    for (
        name,
        old,
    ) in before.items():  # the program's AdamW has a large eps: a step is 1/20 of the gradient
        change = expected[name] - old
        rounding = old.abs().max().item() * torch.finfo(torch.float32).eps
        assert change.abs().max() > 100 * rounding, name
        torch.testing.assert_close(
            after[name] - old, change, rtol=0, atol=TOLERANCE * change.abs().max().item() + rounding
        )
    assert [step["version"] for step in steps] == [1, 2, 3]
    assert all(step["token_mult_prob_error"] <= 1.0001 for step in steps)
    require_lower_bound_and_one_engine(tmp_path / "out", ranks)


def require_lower_bound_and_one_engine(out: Path, ranks: int) -> None:
    """Each engine received its weights once, from shards: no rank has sent a whole model. All hold what was saved."""
    engines = [json.loads((out / f"engine_{rank}.json").read_text()) for rank in range(ranks)]
    assert len({engine["digest"] for engine in engines}) == 1
    assert len(engines[0]["refits"]) == 4
    saved = load_file(out / "saved" / "model.safetensors")
    engine = torch.load(out / "engine.pt", weights_only=True)
    for name, tensor in saved.items():
        assert torch.equal(engine[name], tensor), name
    received = {each["received"] for engine in engines for each in engine["refits"].values()}
    assert len(received) == 1  # the bound, as the program has asserted: all weights, once
    for version in engines[0]["refits"]:
        sent = [engine["refits"][version]["sent"] for engine in engines]
        assert {sum(sent)} == received  # each byte left one trainer, once; engines of one node hand it on
        assert max(sent) < 0.6 * sum(sent)
