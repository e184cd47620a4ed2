"""Trained models in the format of the Hub, for transformers, engines and people."""

from rl_backends.export.pretrained import export_pretrained

__all__ = ["export_pretrained"]
