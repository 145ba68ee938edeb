"""What readings and mechanisms compute with: projections, prefixes, points of a simplex. Arrays in, arrays out."""
