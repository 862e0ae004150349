"""Fake CUDA tensors on a machine without a GPU: a no-op device, a counter of operations, a rank without an engine."""
