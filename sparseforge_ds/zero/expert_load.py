"""How many tokens each routed expert saw: of a refresh, of the whole run, and faded like the curvature's average.

A row is one expert of one layer. Ranks route differently; counts are summed over them once a refresh, so that all
ranks know the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.zero.moments import Matrices


class ExpertLoad:
    """Token counts of the experts under a mask. Nothing in it, and no communication, for dense models."""

    def __init__(self, matrices: Matrices, held: dict[str, tuple[str, int, int]]) -> None:
        """Number the experts.

        Args:
            matrices: of all prunable weights.
            held: layer, number of the first expert, and experts in it, for every weight with experts, by weight name.
        """
        self.matrices = matrices
        experts: dict[str, set[int]] = {}
        for layer, first, count in held.values():
            experts.setdefault(layer, set()).update(range(first, first + count))
        row_of: dict[tuple[str, int], int] = {}
        self.layers: dict[str, range] = {}
        """Rows of each layer, by the name of the module that holds its experts."""
        self.names: list[str] = []
        for layer, numbers in experts.items():
            start = len(self.names)
            for number in sorted(numbers):
                row_of[layer, number] = len(self.names)
                self.names.append(f"{layer}[{number}]")
            self.layers[layer] = range(start, len(self.names))
        self.rows = {
            name: range(row_of[layer, first], row_of[layer, first] + count)
            for name, (layer, first, count) in held.items()
        }
        """Rows of each weight with experts, by its name."""
        self.of_matrix: list[int | None] = [None] * len(matrices.names)
        """Row of each matrix, None for one that every token sees."""
        self._kind: list[tuple[str, str, int] | None] = [None] * len(matrices.names)
        for name, rows in self.rows.items():
            layer, numbered = held[name][0], matrices.rows[name]
            stacked = len(numbered) // len(rows)
            what = name.removeprefix(f"{layer}.").lstrip("0123456789.")
            for index, matrix in enumerate(numbered):
                self.of_matrix[matrix] = rows[index // stacked]
                self._kind[matrix] = layer, what, index % stacked
        self.recent = [0.0] * len(self.names)
        """Tokens of past refreshes, faded."""
        self.tokens = [0] * len(self.names)
        """Tokens of all refreshes."""
        self.unseen: list[str] = []
        """Experts whose mask goes by magnitude, since they have no curvature."""
        self.refreshed = [0] * len(self.names)
        """Tokens of the last refresh."""
        self.shares = [0.0] * len(self.names)
        """Part of its layer's tokens that each expert saw in the last refresh."""
        self._counts = self._zeros()

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.names), dtype=torch.float64, device=self.matrices.layout.device)

    def begin(self) -> None:
        """Forget the counts of a refresh that is not `agree`d on."""
        self._counts = self._zeros()

    def add(self, rows: range, count_E: Tensor) -> None:
        """Count tokens that this rank sent to consecutive experts; `count_E` has one number each."""
        self._counts[rows.start : rows.stop] += count_E.to(self._counts)

    def agree(self) -> None:
        """Sum the counts of this refresh over the ranks. Collective, one call."""
        if self.names:
            self.matrices.layout.all_reduce(self._counts)
            self._keep([int(count) for count in self._counts.tolist()])

    def take(self, counts: dict[str, list[float]]) -> None:
        """Take over the counts of a refresh that are known already, by weight name."""
        refreshed = [0] * len(self.names)
        for name, rows in self.rows.items():
            refreshed[rows.start : rows.stop] = [int(count) for count in counts[name]]
        self._keep(refreshed)

    def _keep(self, tokens: list[int]) -> None:
        self.refreshed = tokens
        for rows in self.layers.values():
            seen = tokens[rows.start : rows.stop]
            self.shares[rows.start : rows.stop] = [count / max(1, sum(seen)) for count in seen]

    def fade(self, rate_of: Callable[[float, float], tuple[float, float]]) -> list[float]:
        """Take the tokens of this refresh into `recent` and `tokens`.

        Args:
            rate_of: (tokens, recent) -> rate of the average, new recent.

        Returns:
            The rate of each row.
        """
        moved = [rate_of(count, recent) for count, recent in zip(self.refreshed, self.recent, strict=True)]
        self.recent = [recent for _, recent in moved]
        self.tokens = [total + count for total, count in zip(self.tokens, self.refreshed, strict=True)]
        return [rate for rate, _ in moved]

    def without(self, sums: list[float]) -> set[int]:
        """Matrices of experts that have no curvature, and notes whose they are.

        Where no expert of a layer has one, something is wrong with the layer, and its matrices are not among them.

        Args:
            sums: total curvature of every matrix.
        """
        kinds = list(zip(self._kind, sums, strict=True))
        measured = {kind for kind, total in kinds if kind is not None and total != 0}
        found = {matrix for matrix, (kind, total) in enumerate(kinds) if kind in measured and total == 0}
        rows = {self.of_matrix[matrix] for matrix in found}
        self.unseen = [name for row, name in enumerate(self.names) if row in rows]
        return found

    @property
    def idle(self) -> list[str]:
        """Experts without a token in the last refresh since this object was made: they keep the curvature they have."""
        if not any(self.refreshed):
            return []
        return [name for name, count in zip(self.names, self.refreshed, strict=True) if not count]

    def metrics(self) -> dict[str, float]:
        """Of the last refresh: how many experts were idle, and the least and most of each layer, 1 being even."""
        if not any(self.refreshed):
            return {}
        metrics = {"experts/idle": float(len(self.idle))}
        for layer, rows in self.layers.items():
            shares = self.shares[rows.start : rows.stop]
            metrics[f"experts/load_min/{layer}"] = min(shares) * len(rows)
            metrics[f"experts/load_max/{layer}"] = max(shares) * len(rows)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types, valid at any world size."""
        return {
            "layers": {
                layer: {"tokens": self.tokens[rows.start : rows.stop], "recent": self.recent[rows.start : rows.stop]}
                for layer, rows in self.layers.items()
            },
            "unseen": list(self.unseen),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the numbers of a checkpoint that `check` found good."""
        self.tokens = [count for layer in self.layers for count in state["layers"][layer]["tokens"]]
        self.recent = [count for layer in self.layers for count in state["layers"][layer]["recent"]]
        self.unseen = list(state["unseen"])
        self.refreshed = [0] * len(self.names)

    def check(self, state: object) -> None:
        """Whether a saved state is of these experts.

        Raises:
            ValueError: it is not, or it is damaged.
        """
        try:
            saved = {
                layer: [len(numbers[key]) for key in ("tokens", "recent")]
                for layer, numbers in state["layers"].items()  # type: ignore[index]
            }
            plain = all(
                type(count) in (int, float) and count >= 0
                for numbers in state["layers"].values()  # type: ignore[index]
                for key in ("tokens", "recent")
                for count in numbers[key]
            )
            known = set(state["unseen"]) <= set(self.names)  # type: ignore[index]
        except (KeyError, TypeError, AttributeError):
            saved, plain, known = {}, False, False
        if not plain or not known or saved != {layer: [len(rows)] * 2 for layer, rows in self.layers.items()}:
            raise ValueError(
                "the checkpoint's sparseforge state has no or damaged token counts of the experts; resume with the "
                "release that wrote it, or use another checkpoint"
            )
