"""Deshpande and Narasimhan (2020), Guiding Attention for Self-Supervised Learning with Transformers (AG)."""

PAPER = "AG"
CITATION = "Deshpande and Narasimhan (2020), Guiding Attention for Self-Supervised Learning with Transformers"
