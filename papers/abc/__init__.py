"""The experiments of Peng et al., ABC: Attention with Bounded-memory Control; ``commands`` lists them."""
