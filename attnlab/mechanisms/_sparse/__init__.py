"""What the sparse mechanisms share."""
