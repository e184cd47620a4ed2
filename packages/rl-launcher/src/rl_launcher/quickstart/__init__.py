"""The parts of the quickstart that a real run replaces: a task, its reward, and a tiny model. Each is one recipe key."""
