"""Gupta and Berant (2021), Value-aware Approximate Attention (OVA)."""

PAPER = "OVA"
CITATION = "Gupta and Berant (2021), Value-aware Approximate Attention"
