"""Files of a checkpoint and of a model's folder, read without trusting them, and checked byte for byte."""
