"""What a step of the backend takes, found out before anything is loaded or started.

Runs `DTensorBackend` itself, on tensors without numbers and ranks that exchange nothing, and counts every storage.
"""
