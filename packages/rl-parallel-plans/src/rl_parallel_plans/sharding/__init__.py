"""Carry out a plan on a mesh: tensor and expert parallelism, activation checkpointing, FSDP, the gradient norm."""
