"""The parity table: every way to cut a model and a batch, against one plain process. `python -m parity` writes it."""
