"""How many tokens each routed expert saw: of a refresh, of the whole run, and faded like the curvature's average.

A row is one expert of one layer. Ranks route differently; counts are summed over them once a refresh, so that all
ranks know the same numbers. They stay on the device, and are copied to the host when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.zero.matrices import Matrices


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
        device = matrices.layout.device
        self.is_expert = torch.tensor([row is not None for row in self.of_matrix], device=device)
        """(matrices,) bool."""
        self._row_of_matrix = torch.tensor([row or 0 for row in self.of_matrix], device=device)
        self.unseen: list[str] = []
        """Experts whose mask goes by magnitude, since they have no curvature."""
        self.counted = self._zeros()
        """(rows,) fp64 tokens of the last refresh."""
        self._tokens, self._recent = self._zeros(), self._zeros()
        self._counts = self._zeros()
        self._read: list[list[float]] | None = None

    def _zeros(self) -> Tensor:
        return torch.zeros(len(self.names), dtype=torch.float64, device=self.matrices.layout.device)

    def begin(self) -> None:
        """Forget the counts of a refresh that is not `agree`d on."""
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

    def take(self, counts: dict[str, Tensor]) -> None:
        """Take over the counts of a refresh that are known already, by weight name."""
        for name, rows in self.rows.items():
            self.counted[rows.start : rows.stop] = counts[name]
        self._read = None

    def fade(self, rate_of: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        """Take the tokens of this refresh into those of the run, and into those that fade with the curvature's mean.

        Args:
            rate_of: (tokens, faded tokens) -> rate at which the mean moves to the sample, new faded tokens.

        Returns:
            (rows,) the rates.
        """
        rates, self._recent = rate_of(self.counted, self._recent)
        self._tokens = self._tokens + self.counted
        self._read = None
        return rates

    def spread(self, of_row: Tensor, others: Tensor | float) -> Tensor:
        """(matrices,) fp64: the number of its expert for each matrix, of `others` for one that every token sees."""
        if not isinstance(others, Tensor):
            others = torch.full(self.is_expert.shape, others, dtype=torch.float64, device=self.is_expert.device)
        return torch.where(self.is_expert, of_row[self._row_of_matrix], others) if self.names else others

    def numbers(self) -> Tensor:
        """(3 * rows,) fp64: tokens of the last refresh, of all refreshes, and of past ones, faded."""
        return torch.cat([self.counted, self._tokens, self._recent])

    def read(self, numbers: list[float] | None = None) -> list[list[float]]:
        """`numbers` on the host, which a caller may have read together with others."""
        if not self.names:
            return [[], [], []]
        if numbers is not None or self._read is None:
            flat, rows = self.numbers().tolist() if numbers is None else numbers, len(self.names)
            self._read = [flat[:rows], flat[rows : 2 * rows], flat[2 * rows :]]
        return self._read

    @property
    def shares(self) -> list[float]:
        """Part of its layer's tokens that each expert saw in the last refresh."""
        counted, shares = self.read()[0], [0.0] * len(self.names)
        for rows in self.layers.values():
            seen = counted[rows.start : rows.stop]
            shares[rows.start : rows.stop] = [count / max(1.0, sum(seen)) for count in seen]
        return shares

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
        counted = self.read()[0]
        return [name for name, count in zip(self.names, counted, strict=True) if not count] if any(counted) else []

    def metrics(self) -> dict[str, float]:
        """Of the last refresh: how many experts were idle, and the least and most of each layer, 1 being even."""
        if not any(self.read()[0]):
            return {}
        metrics, of_rows = {"experts/idle": float(len(self.idle))}, self.shares
        for layer, rows in self.layers.items():
            shares = of_rows[rows.start : rows.stop]
            metrics[f"experts/load_min/{layer}"] = min(shares) * len(rows)
            metrics[f"experts/load_max/{layer}"] = max(shares) * len(rows)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON types, valid at any world size."""
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
        """Whether a saved state is of these experts.

        Raises:
            ValueError: it is not, or it is damaged.
        """
        self._parsed(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the numbers of a checkpoint that `check` found good."""
        self._tokens, self._recent, self.unseen = self._parsed(state)
        self.counted, self._read = self._zeros(), None

    def _parsed(self, state: Any) -> tuple[Tensor, Tensor, list[str]]:
        """(rows,) fp64 tokens of all refreshes, and of past ones, faded; and `unseen`."""
        try:
            layers, unseen = state["layers"], list(state["unseen"])
            sound = layers.keys() == self.layers.keys() and set(unseen) <= set(self.names)
            numbers = [[list(layers[layer][key]) for layer in self.layers] for key in ("tokens", "recent")]
        except (KeyError, TypeError, AttributeError):
            sound, numbers, unseen = False, [], []
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
