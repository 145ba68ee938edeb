"""Snell et al. (2021), Approximating How Single Head Attention Learns (KTIW): its tables and figures, one file each."""

PAPER = "KTIW"
CITATION = "Snell, Zhong, Klein and Steinhardt (2021), Approximating How Single Head Attention Learns"
