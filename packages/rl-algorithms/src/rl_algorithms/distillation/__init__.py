"""What distillation is made of: its choices, its rows, and the divergence of two distributions."""
