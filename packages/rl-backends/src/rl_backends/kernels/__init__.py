"""Kernels as a choice: which code computes attention, the loss, norms, rotary embeddings, MLPs and linear layers."""
