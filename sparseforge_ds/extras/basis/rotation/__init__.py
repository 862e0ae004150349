"""Rotation of a model's hidden vectors that keeps its function, into the basis in which a pattern costs least."""
