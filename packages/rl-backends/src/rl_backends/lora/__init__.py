"""Low-rank adapters (LoRA) by the peft library: put in, trained, merged for engines, saved, switched off.

Needs the extra `rl-backends[lora]`; importing it imports no peft.
"""
