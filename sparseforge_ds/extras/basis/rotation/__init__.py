"""Rotations of a model's hidden vectors that leave its function as it is, and those in which a pattern costs least."""
