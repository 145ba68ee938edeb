"""Peng et al. (2022), ABC: Attention with Bounded-memory Control."""

PAPER = "ABC"
CITATION = "Peng et al. (2022), ABC: Attention with Bounded-memory Control"
