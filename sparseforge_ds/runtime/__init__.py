"""A 2:4 model at work: the product with a packed weight, on CPUs and GPUs."""
