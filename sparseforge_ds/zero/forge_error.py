"""Error of a run that cannot go on."""

from __future__ import annotations


class ForgeError(RuntimeError):
    """The run cannot go on: a call is missing or broke off, or a mask would be formed without its curvature."""
