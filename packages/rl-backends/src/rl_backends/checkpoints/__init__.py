"""Checkpoints that any mesh can resume from: safetensors and JSON, complete or absent, also written asynchronously."""
