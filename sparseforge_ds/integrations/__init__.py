"""The same forge and the same format inside other libraries' programs."""
