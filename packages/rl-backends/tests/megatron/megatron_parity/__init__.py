"""The parity table of the Megatron backend: layouts of ranks by models, against one plain process.

`python -m megatron_parity`, in the folder above, writes it.
"""
