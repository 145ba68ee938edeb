"""The reproductions of five papers, beside the library and not installed with it: ``python -m papers`` lists them."""
