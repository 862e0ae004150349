"""Offline tools from a checkpoint to a model, and the proof of each export."""
