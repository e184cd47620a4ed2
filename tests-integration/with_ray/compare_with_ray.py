"""Run the same recipe in this process and over Ray with several ranks, and return what both log."""

import json

from rl_launcher.quickstart.tiny_model import build
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe

TWO_RANKS = [
    "cluster.runtime=ray",
    "cluster.gpus_per_node=3",
    "cluster.start_timeout_s=420",
    "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 1}}",
]


def run_in_process_and_over_ray(folder, recipe, rows, *, steps, reward_model_steps=0):
    """Return the log's lines in process and over Ray. `recipe` is text with `{folder}`, the folder of `model`."""
    model, tokenizer = build(0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "recipe.yaml").write_text(recipe.format(folder=folder))

    def lines(name, overrides):
        asked = load_recipe(folder / "recipe.yaml", schema=Recipe, overrides=[*overrides, f"run_dir={folder}/{name}"])
        summary = run(asked)
        assert summary["steps"] - reward_model_steps == steps
        if asked.value.generates:
            assert summary["refit"]["version"] == steps
        else:
            assert summary["refit"] is None
            if asked.value.cluster.runtime == "ray":
                processes = json.loads((folder / name / "processes.json").read_text())
                assert "engine" not in {each["role"] for each in processes}
        return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]

    return lines("one", []), lines("two", TWO_RANKS)
