"""Corpora, tokenisers, batches: text from files in, a pure function of (seed, step) out."""
