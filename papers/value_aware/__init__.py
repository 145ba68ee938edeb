"""Gupta and Berant (2021), Value-aware Approximate Attention (OVA)."""
