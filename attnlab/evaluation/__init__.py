"""How good a model is with another attention, what it costs, and what its heads look at: numbers, no pages."""
