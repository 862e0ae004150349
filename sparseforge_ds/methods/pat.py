"""PAT with its constraint for N:M (torchao.prototype.pat, `PruneOptimizer` and `NMSparseConstraint`; pytorch/ao#4381).

Every step of the base optimizer moves latent weights, and a proximal map then gives the weights that the network sees.
That of N:M is a projection: the N largest of every group as they are, 0 for the others, with no strength that rises.
Before it there may be dense steps (`warmup_steps`), and after it steps under a frozen mask (`healing_start_step`).
"""

from __future__ import annotations

from sparseforge_ds.methods.sr_ste import SrSte


class Pat(SrSte):
    """PAT: SR-STE after dense steps, by default without its pull on what is pruned."""

    chooses_at_freeze = True
