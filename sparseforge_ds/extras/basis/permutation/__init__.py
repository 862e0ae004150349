"""Which channels of a model can change places without changing what it computes, and the order that suits a pattern."""
