"""Readings of attention against the truth: tasks in which the tokens that a prediction came from are known."""
