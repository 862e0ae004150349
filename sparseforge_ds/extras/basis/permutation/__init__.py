"""Permutation of a model's channels that keeps its function, in the order that suits a pattern."""
