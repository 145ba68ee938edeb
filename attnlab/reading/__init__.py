"""Readings of a recorded attention: what reaches the output, and how far an approximation of it is off."""
