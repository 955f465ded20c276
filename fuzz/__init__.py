"""What is not proved: calls drawn at random, run for real, compared with the spec, and shrunk."""
