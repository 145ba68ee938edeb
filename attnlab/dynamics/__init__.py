"""How attention is learned (KTIW, Snell et al., 2021): probes, proxies and agreement on plain arrays, for any model."""

from attnlab.dynamics.metrics import Xi, agreement, contextualised, kendall_tau, pad_rows, random_agreement

__all__ = ["Xi", "agreement", "contextualised", "kendall_tau", "pad_rows", "random_agreement"]
