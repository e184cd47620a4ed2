"""The parts of the quickstart that a real run replaces by one key each: a task, its reward, and a tiny model."""
