"""Token counts of routed experts: of a refresh, of the whole run, and decayed like the curvature's running mean.

A row is one expert of one layer. Ranks route differently; counts are summed over them once a refresh, so that all
ranks know the same numbers. They stay on the device until `read` copies them to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.zero.matrices import Matrices


class ExpertLoad:
    """Token counts of the experts under a mask; for dense models empty, and without communication."""

    def __init__(self, matrices: Matrices, experts_of: dict[str, tuple[str, int, int]]) -> None:
        """Number the experts.

        Args:
            matrices: of all prunable weights.
            experts_of: layer, number of the first expert, and count of experts of every weight that has some, by name.
        """
        self.matrices = matrices
        # A row is an expert of a layer, whose weights may be several.
        experts: dict[str, set[int]] = {}
        for layer, first, count in experts_of.values():
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
            for name, (layer, first, count) in experts_of.items()
        }
        """Rows of each weight with experts, by its name."""
        self.of_matrix: list[int | None] = [None] * len(matrices.names)
        """Row of each matrix, None for one that every token sees."""
        # Matrices of one kind are compared: the same projection of all experts of a layer.
        self._kind: list[tuple[str, str, int] | None] = [None] * len(matrices.names)
        for name, rows in self.rows.items():
            layer = experts_of[name][0]
            matrices_of_weight = matrices.rows[name]
            stacked = len(matrices_of_weight) // len(rows)
            role = name.removeprefix(f"{layer}.").lstrip("0123456789.")
            for index, matrix in enumerate(matrices_of_weight):
                self.of_matrix[matrix] = rows[index // stacked]
                self._kind[matrix] = (layer, role, index % stacked)
        # The same on the device, and the counts.
        device = matrices.layout.device
        self.is_expert = torch.tensor([row is not None for row in self.of_matrix], device=device)
        """(matrices,) bool."""
        self._row_of_matrix = torch.tensor([row or 0 for row in self.of_matrix], device=device)
        self.unseen: list[str] = []
        """Experts whose mask goes by magnitude, since they have no curvature."""
        self.counted = self._zeros()
        """(rows,) fp64 tokens of the last refresh."""
        self._tokens = self._zeros()
        self._recent = self._zeros()
        self._counts = self._zeros()
        self._read: list[list[float]] | None = None

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.names), dtype=torch.float64, device=self.matrices.layout.device)

    def begin(self) -> None:
        """Reset this rank's counts for a new refresh."""
        self._counts = self._zeros()

    def add(self, rows: range, count_E: Tensor | int) -> None:
        """Count tokens that this rank sent to consecutive experts, of each of them or of all."""
        self._counts[rows.start : rows.stop] += count_E

    def agree(self) -> None:
        """Sum the counts of this refresh over the ranks. Collective, one call."""
        if self.names:
            self.counted = self._counts.clone()
            self.matrices.layout.all_reduce(self.counted)
            self._read = None

    def fade(self, rate_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Add the tokens of this refresh to the counts of the run and to the decayed counts.

        Args:
            rate_of: (tokens, decayed count) -> rate at which the mean moves to the sample, new decayed count.

        Returns:
            (rows,) the rates.
        """
        rates, self._recent = rate_of(self.counted, self._recent)
        self._tokens = self._tokens + self.counted
        self._read = None
        return rates

    def spread(self, of_row: Tensor, default: Tensor | float) -> Tensor:
        """Return (matrices,) fp64: its expert's number for each matrix, `default` for one that every token sees."""
        if not isinstance(default, Tensor):
            default = torch.full(self.is_expert.shape, default, dtype=torch.float64, device=self.is_expert.device)
        return torch.where(self.is_expert, of_row[self._row_of_matrix], default) if self.names else default

    def numbers(self) -> Tensor:
        """Return (3 * rows,) fp64: tokens of the last refresh, of all refreshes, and of past ones, faded."""
        return torch.cat([self.counted, self._tokens, self._recent])

    def read(self, numbers: list[float] | None = None) -> list[list[float]]:
        """Return `numbers` on the host; a caller that has them there already gives them."""
        if not self.names:
            return [[], [], []]
        if numbers is not None or self._read is None:
            flat = self.numbers().tolist() if numbers is None else numbers
            rows = len(self.names)
            self._read = [flat[:rows], flat[rows : 2 * rows], flat[2 * rows :]]
        return self._read

    @property
    def shares(self) -> list[float]:
        """Share of its layer's tokens that each expert saw in the last refresh."""
        counted = self.read()[0]
        shares: list[float] = []
        for rows in self.layers.values():
            tokens = counted[rows.start : rows.stop]
            shares += [count / max(1.0, sum(tokens)) for count in tokens]
        return shares

    def without(self, sums: list[float]) -> set[int]:
        """Find the matrices of experts that have no curvature, and note whose they are.

        If no expert of a layer has one, the fault is the layer's, and its matrices are not returned.

        Args:
            sums: total curvature of every matrix.
        """
        kinds = list(zip(self._kind, sums, strict=True))
        measured = {kind for kind, total in kinds if kind is not None and total != 0}
        without = {matrix for matrix, (kind, total) in enumerate(kinds) if kind in measured and total == 0}
        rows = {self.of_matrix[matrix] for matrix in without}
        self.unseen = [name for row, name in enumerate(self.names) if row in rows]
        return without

    @property
    def idle(self) -> list[str]:
        """Experts without a token in the last refresh since this object was made: they keep the curvature they have."""
        counted = self.read()[0]
        return [name for name, count in zip(self.names, counted, strict=True) if not count] if any(counted) else []

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last refresh: idle experts, and least and most tokens of a layer relative to even."""
        if not any(self.read()[0]):
            return {}
        metrics = {"experts/idle": float(len(self.idle))}
        shares_of_rows = self.shares
        for layer, rows in self.layers.items():
            shares = shares_of_rows[rows.start : rows.stop]
            metrics[f"experts/load_min/{layer}"] = min(shares) * len(rows)
            metrics[f"experts/load_max/{layer}"] = max(shares) * len(rows)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON types, valid at any world size."""
        _, tokens, recent = self.read()
        return {
            "layers": {
                layer: {
                    "tokens": [int(count) for count in tokens[rows.start : rows.stop]],
                    "recent": recent[rows.start : rows.stop],
                }
                for layer, rows in self.layers.items()
            },
            "unseen": list(self.unseen),
        }

    def check(self, state: object) -> None:
        """Raise ValueError where a saved state is not of these experts, or damaged."""
        self._parsed(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the numbers of a checkpoint that `check` has passed."""
        self._tokens, self._recent, self.unseen = self._parsed(state)
        self.counted = self._zeros()
        self._read = None

    def _parsed(self, state: Any) -> tuple[Tensor, Tensor, list[str]]:
        """Return (rows,) fp64 tokens of all refreshes, and of past ones, faded; and `unseen`."""
        try:
            layers = state["layers"]
            unseen = list(state["unseen"])
            sound = layers.keys() == self.layers.keys() and set(unseen) <= set(self.names)
            numbers = [[list(layers[layer][key]) for layer in self.layers] for key in ("tokens", "recent")]
        except (KeyError, TypeError, AttributeError):
            sound = False
            numbers = []
            unseen = []
        sizes = [len(rows) for rows in self.layers.values()]
        flat = [[number for of_layer in kind for number in of_layer] for kind in numbers]
        sound &= all([len(of_layer) for of_layer in kind] == sizes for kind in numbers)
        if not sound or not all(type(number) in (int, float) and number >= 0 for kind in flat for number in kind):
            raise ValueError(
                "the checkpoint's sparseforge state has no or damaged token counts of the experts; resume with the "
                "release that wrote it, or use another checkpoint"
            )
        tokens, recent = torch.tensor(flat, dtype=torch.float64, device=self.matrices.layout.device)
        return tokens, recent, unseen
