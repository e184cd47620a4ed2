"""The parts of the embedded engine, `rl_generation.transformers_engine`."""
