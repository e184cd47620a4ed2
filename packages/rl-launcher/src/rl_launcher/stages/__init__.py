"""One file per stage of a run: each hands the parts to a loop of `rl_algorithms` and records what the loop yields."""
