"""The same forge inside other libraries' programs."""
