"""Training on megatron-core: the only rooms that import `megatron`, and each of them only when it is used."""
