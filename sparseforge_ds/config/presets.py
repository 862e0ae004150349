"""Named starting points of the `sparseforge` block; keys given beside `preset` override them."""

from __future__ import annotations

from typing import Any

# The paper's literal choices, as far as its text and its published recipe state them (arXiv 2605.06402, section 4).
_PAPER: dict[str, Any] = {
    "importance": "hutchinson",
    "threshold": "nth",
    "schedule": {
        "update_every": 10,
        "temperature_decay": 0.98,
        "blend": (0.1, 0.85),
        "mid_penalty_ramp": (0.0, 0.025),
        "hardening": (0.1, 0.85),
        "straight_through": True,
    },
    "curvature": {"decay": 0.98, "per_token": False, "factored": False},
    "low_rank": {"k": 16, "shift": False, "start": 0.1},
    "distillation": {"temperature": 2.0, "task_weight": 1.0},
}

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": _PAPER,
    "paper_no_low_rank": {**_PAPER, "low_rank": None},
    "fixed_magnitude": {"importance": "magnitude", "schedule": {"hardening": (0.0, 0.0)}},
    "fixed_wanda": {
        "importance": "wanda",
        "schedule": {"hardening": (0.0, 0.0)},
        "curvature": {"first_probes": 16},
    },
}
"""Named starting points; the default is what measured best (docs/results/notes.md)."""

# AST: published recipe for LLaMA-2-7B (arXiv 2407.20584, section 5 and its code), as fractions of the run.
_AST_LOSS: dict[str, Any] = {"task_weight": 1 / 3, "weight": 2 / 3, "temperature": 2.0}

METHODS: dict[str, dict[str, Any]] = {
    "sparseforge": {},
    # One-shot scores: magnitude; Wanda (arXiv 2306.11695); SparseGPT (arXiv 2301.00774).
    "oneshot": {"importance": "magnitude", "max_steps": 0, "distillation": None, "curvature": {"first_probes": 16}},
    "naive_retrain": {"importance": "magnitude", "curvature": {"first_probes": 16}},
    # SR-STE (arXiv 2102.04010, eq. 9 and section 4): lambda_W = 2e-4 from the first step to the last.
    "sr_ste": {
        "importance": "magnitude",
        "curvature": {"first_probes": 16},
        "distillation": None,
        "refresh": {"every": 1, "decay": 2e-4},
    },
    "ast": {
        "importance": "magnitude",
        "curvature": {"first_probes": 16},
        "distillation": _AST_LOSS,
        "refresh": {"every": 10, "decay": 6e-5, "ramp": (0.0, 0.25)},
    },
    # CAST (arXiv 2509.25996): T1 = 10 and its parts are published, the size of the decay is not.
    "cast": {
        "importance": "magnitude",
        "curvature": {"first_probes": 16},
        "distillation": _AST_LOSS,
        "refresh": {"every": 10, "decay": 1e-4, "ramp": (0.0, 0.5), "frozen": 0.1, "scaling": True},
    },
    # MaskLLM (arXiv 2409.17481, section 4.1).
    "maskllm": {
        "importance": "magnitude",
        "curvature": {"first_probes": 16},
        "distillation": None,
        "sampling": {},
    },
}
"""What each method starts from, as published where it was; a preset and given keys override it."""
