"""Packed 2:4 weights as a file stores them: kept values or their codes, positions and scales."""
