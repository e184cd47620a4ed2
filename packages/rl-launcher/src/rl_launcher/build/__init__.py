"""The parts of a run: policy, engine, refit, environment and data, made from a recipe or from Python objects.

`build.py` makes them in this process, `rl_launcher.ray.build` on Ray, and `parts.py` says what both have. `inputs.py`
reads what needs no model; `models.py`, `engines.py` and `environments.py` make one kind of part each.
"""
