"""Scores of a finished model: perplexity, the KL divergence to its dense model, and zero-shot tasks."""
