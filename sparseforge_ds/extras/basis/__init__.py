"""A dense model in another basis, in which a pattern costs less; its function stays."""
