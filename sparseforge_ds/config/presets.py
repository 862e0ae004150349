"""Named starting points of the `sparseforge` block; keys given beside `preset` override them."""

from __future__ import annotations

from typing import Any

# Choices and numbers of the paper's published recipe (arXiv 2605.06402, section 4), as far as there are keys for them.
# docs/concepts/equations.md has the remaining differences.
_PAPER: dict[str, Any] = {
    "importance": "hutchinson",
    "method": {
        "name": "sparseforge",
        "threshold": "nth",
        "update_every": 10,
        "temperature_decay": 0.98,
        "blend": (0.1, 0.85),
        "mid_penalty_ramp": (0.0, 0.025),
        "hardening": (0.1, 0.85),
        "straight_through": True,
    },
    "curvature": {"decay": 0.98, "per_token": False, "factored": False},
    "low_rank": {"k": 16, "shift": False, "start": 0.1},
    "distillation": {"temperature": 2.0, "task_weight": 1.0, "weight": 1.0},
}

# Sparse-Llama-3.1-8B-2of4 (its model card): a mask of SparseGPT, fixed, and training with the distance of hidden states
# (SquareHead, arXiv 2310.06927) beside the loss. The card gives no weights of the parts.
_SPARSE_LLAMA: dict[str, Any] = {
    "method": {"name": "naive_retrain"},
    "importance": "sparsegpt",
    "distillation": {"hidden": {"weight": 1.0}},
}

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper_like": _PAPER,
    "paper_like_no_low_rank": {**_PAPER, "low_rank": None},
    "sparse_llama": _SPARSE_LLAMA,
}
"""Named starting points of a block; the default is what measured best (studies/notes.md)."""
