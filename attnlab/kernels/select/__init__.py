"""abc-select on a GPU."""
