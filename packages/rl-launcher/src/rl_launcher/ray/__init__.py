"""A run over Ray: where ranks and engines are, their processes, and what happens when one of them ends.

Nothing here is imported by a run in this process. Ray is imported when a run on it starts.
"""
