"""The rooms of the embedded engine; `rl_generation.transformers_engine` is its door."""
