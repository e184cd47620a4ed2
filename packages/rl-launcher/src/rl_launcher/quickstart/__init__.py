"""A tiny model, and tasks with their rewards, for runs on a CPU: a real recipe replaces each by one key."""
