"""Attention guidance: its Figure 4 by one command, and its experiments in parts that run on their own."""
