"""Structure of a model: prunable weights by family, branches, losses, tokenizers."""
