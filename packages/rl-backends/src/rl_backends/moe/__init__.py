"""Mixtures of experts: the routers' auxiliary loss, sequence by sequence, and how evenly experts are used."""

from rl_backends.moe.watch import RouterWatch, router_metrics

__all__ = ["RouterWatch", "router_metrics"]
