"""Every program in `examples/` runs to its end as it stands, in an empty folder, and what it trains gets better."""

import ast
import contextlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))
SLOW = (  # nightly
    "dpo_on_pairs.py",
    "own_environment.py",
    "own_reward.py",
    "pipeline_stages.py",
    "plans_in_fsdp2_loop.py",
    "sft_on_chats.py",
)
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each program prints; each is run once."""
    printed = {}

    def run(name):
        if name not in printed:
            folder = tmp_path_factory.mktemp(Path(name).stem)
            done = subprocess.run(
                [sys.executable, str(EXAMPLES / name)],
                check=False,
                cwd=folder,
                env=ENVIRONMENT,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            printed[name] = done.stdout
        return printed[name]

    return run


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PROGRAMS]
)
def test_the_program_runs_to_its_end(name, outputs):
    assert outputs(name).strip()


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_is_at_most_100_lines_and_is_listed_in_the_readme(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 100
    assert f"[{name}]({name})" in (EXAMPLES / "README.md").read_text()


def test_ten_lines_of_grpo_learn_the_form_of_an_answer(outputs):
    rewards = re.search(r"reward by step: (\[.*\])", outputs("grpo_ten_lines.py"))
    first, *_, last = ast.literal_eval(rewards[1])
    assert first < 0.2
    assert last > 0.8


@pytest.mark.slow
def test_a_reward_that_asks_for_a_column_which_the_rows_lack_is_refused_by_name(outputs):
    assert re.search(r"refused before training: .*asks_too_much.*gold", outputs("own_reward.py"))


@pytest.mark.slow
def test_sft_lowers_the_loss_of_conversations_that_it_did_not_see(outputs):
    before, after = re.search(r"held-out loss ([\d.]+) -> ([\d.]+)", outputs("sft_on_chats.py")).groups()
    assert float(after) < float(before) / 2


@pytest.mark.slow
def test_dpo_tells_pairs_apart_that_it_did_not_see(outputs):
    assert float(re.search(r"told apart: ([\d.]+)", outputs("dpo_on_pairs.py"))[1]) > 0.9


def test_the_toy_engine_computes_what_the_policy_computes(outputs):
    assert "the engine computes what the policy computes" in outputs("refit_toy_engine.py")


def test_the_loss_in_a_plain_loop_learns(outputs):
    rewards = [float(found) for found in re.findall(r"reward ([\d.]+)", outputs("grpo_loss_plain_loop.py"))]
    assert rewards[0] < 0.3
    assert rewards[-1] > 0.9


def test_the_notebook_runs_cell_by_cell_and_holds_no_outputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        shown = [run_cell("".join(cell["source"]), names) for cell in cells]
    assert "<" in shown[0]._repr_html_()
    assert shown[1][-1][1] > shown[1][0][1]
    assert isinstance(shown[2], str)
    assert "did you mean grpo.num_generations_per_prompt" in printed.getvalue()


def run_cell(source, names):
    """Execute a cell as Jupyter does, and return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
