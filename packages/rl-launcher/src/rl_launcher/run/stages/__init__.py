"""One file per stage of a run: each passes the parts to a loop of `rl_algorithms` and records what it yields."""
