"""What a step costs and how well the machine is used: tokens, FLOPs, seconds, memory. Pure accounts; no collective."""
