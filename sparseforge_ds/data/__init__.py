"""Text of a run: from files and hub datasets to tokens, and from tokens to batches."""
