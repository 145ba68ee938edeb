"""What the mechanisms with a bounded memory (ABC) share."""
