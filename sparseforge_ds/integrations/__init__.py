"""The same forge inside other people's training loops."""
