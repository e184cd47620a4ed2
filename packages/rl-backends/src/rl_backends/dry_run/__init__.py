"""What a step of the backend takes, found out before anything is loaded or started.

Runs `DTensorBackend` itself, on fake tensors and ranks that exchange nothing, and counts every storage.
"""
