"""Published methods as slow literal loops in one process, on `ReferenceForge`: one element at a time, in Python floats.

A rule says how W moves and which mask the next forward sees; batches, clipping and gradients are the same for all.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from sparseforge_ds.mask.random_numbers import counter_key, uniform
from tests.reference import Batch, ReferenceForge, harden, kept_of, pooled, standardized, winners


def largest(weight: list[float], groups: list[list[int]], pattern: str) -> list[float]:
    """1 for the largest w² of every group, or for the pairs with the largest sums of w²."""
    squares = [w * w for w in weight]
    scores = pooled(squares, groups) if pattern.endswith("pairs") else squares
    return harden(scores, groups, kept_of(pattern))


class ReferenceMethod(ReferenceForge):
    """A mask from the first step on, by the score that the config names."""

    lr: float
    weight_decay: float
    _listens = False

    def forge_step(self, probes: list[Batch]) -> bool:
        """Nothing is left to do after a step."""
        return False

    def start(self, probes: list[Batch]) -> None:
        """Choose the starting mask."""
        group = self.optimizer.param_groups[0]
        self.lr = group["lr"]
        self.weight_decay = group["weight_decay"]
        self.betas = group["betas"]
        self.eps = group["eps"]
        self.state = {name: {"m": [0.0] * len(mask), "v": [0.0] * len(mask)} for name, mask in self.mask.items()}
        self._refresh(probes)
        for name, groups in self.groups.items():
            score = standardized(self.weight(name), self.score_takes(name), self.config["curvature"]["damping"])
            score = pooled(score, groups) if self.config["pattern"].endswith("pairs") else score
            self.mask[name] = harden(score, groups, self.n)
        self.publish(0)

    def _release(self) -> None:
        """Keep the elements that a frozen mask removed; comparisons leave them out."""

    @property
    def _frozen(self) -> bool:
        """Return False: each rule decides the use of a gradient itself, and no case clips and freezes."""
        return False

    def weight(self, name: str) -> list[float]:
        """W, flat."""
        values: list[float] = self.master[name].detach().flatten().tolist()
        return values

    def effective_mask(self, name: str, step: int) -> Tensor:
        """Return the mask itself."""
        return torch.tensor(self.mask[name])

    def train_step(self, micro_batches: list[Batch]) -> float:
        """Do one step of weights and masks."""
        gradients, loss = self.clipped_gradients(micro_batches)
        for name, parameter in self.master.items():
            parameter.grad = gradients[name]
            if name in self.mask:
                used = self.use(name, gradients[name].flatten().tolist())
                parameter.grad = None if used is None else torch.tensor(used).view_as(parameter)
        self.optimizer.step()
        self.step_count += 1
        for name in self.mask:
            self.after(name)
        self.publish(self.step_count)
        return loss

    def use(self, name: str, gradient: list[float]) -> list[float] | None:
        """Return the gradient for AdamW, or None if the method has moved W by itself."""
        return gradient

    def after(self, name: str) -> None:
        """Act after the step of AdamW."""

    def set_weight(self, name: str, values: list[float]) -> None:
        """Write W."""
        with torch.no_grad():
            self.master[name].copy_(torch.tensor(values).view_as(self.master[name]))

    @property
    def settings(self) -> dict[str, Any]:
        """The `method` block."""
        block: dict[str, Any] = self.config["method"]
        return block

    @property
    def freeze(self) -> int:
        """Last step after which the mask may change."""
        return round((1 - self.settings["frozen"]) * self.config["max_steps"])

    def decay(self) -> float:
        """Return lambda of the step that is being made."""
        start, stop = (round(end * self.config["max_steps"]) for end in self.settings["ramp"])
        share = 1.0 if self.step_count >= stop else max(0.0, (self.step_count - start) / (stop - start))
        return float(self.settings["decay"]) * share

    def choose_again(self, name: str) -> None:
        """Choose the largest weights, when due."""
        if self.step_count % self.settings["every"] == 0 and self.step_count <= self.freeze:
            self.mask[name] = largest(self.weight(name), self.groups[name], self.config["pattern"])


class ReferenceFixed(ReferenceMethod):
    """naive_retrain."""


class ReferenceSparseGPT(ReferenceMethod):
    """naive_retrain from SparseGPT's mask and weights: column by column, each time with the inverse of what is left."""

    def start(self, probes: list[Batch]) -> None:
        """See `ReferenceMethod`."""
        self.config = {**self.config, "importance": "magnitude"}
        super().start(probes)
        blocks: dict[str, list[str]] = {}
        for name in self.mask:
            blocks.setdefault(".".join(name.split(".")[:3]), []).append(name)
        for name in self.mask:
            self.mask[name] = [1.0] * len(self.mask[name])
        self.publish(0)
        for names in blocks.values():
            inputs = self.inputs_of(names, probes)
            for name in names:
                self.prune(name, inputs[name].t() @ inputs[name])
            self.publish(0)

    def inputs_of(self, names: list[str], probes: list[Batch]) -> dict[str, Tensor]:
        """(tokens, in) fp64 of each layer, in the model as it is."""
        records: dict[str, list[Tensor]] = {name: [] for name in names}
        handles = [
            self.model.get_submodule(name.rpartition(".")[0]).register_forward_hook(
                lambda _module, args, _output, name=name: records[name].append(args[0].detach().flatten(0, -2).double())
            )
            for name in names
        ]
        for batch in probes * self.config["curvature"]["first_probes"]:
            self.loss(self.model, batch)
        for handle in handles:
            handle.remove()
        return {name: torch.cat(parts) for name, parts in records.items()}

    def prune(self, name: str, gram: Tensor) -> None:
        """Prune one layer."""
        transposed = self.input_axes[name] == -2
        weight = self.master[name].detach().double()
        weight = (weight.t() if transposed else weight).clone()
        mask = torch.ones_like(weight)
        members = len(self.groups[name][0])
        hessian = gram + 0.01 * gram.diagonal().mean() * torch.eye(len(gram)).double()
        left = [torch.linalg.inv(hessian[i:, i:]) for i in range(len(gram))]
        for row, keep in zip(weight, mask, strict=True):
            for i in range(len(gram)):
                if i % members == 0:
                    scores = [float(row[j] ** 2 / left[j][0, 0]) for j in range(i, i + members)]
                    best = winners(scores, self.n)
                    for j in range(members):
                        keep[i + j] = float(j in best)
                if keep[i] == 0:
                    row[i:] -= row[i] / left[i][0, 0] * left[i][0]
                    row[i] = 0.0
        self.mask[name] = (mask.t() if transposed else mask).flatten().tolist()
        self.set_weight(name, (weight.t() if transposed else weight).flatten().tolist())


class ReferenceSrSte(ReferenceMethod):
    """g + lambda (1 - m) W."""

    def use(self, name: str, gradient: list[float]) -> list[float] | None:
        """See `ReferenceMethod`."""
        weight = self.weight(name)
        mask = self.mask[name]
        decay = self.decay()
        return [g + decay * (1 - m) * w for g, m, w in zip(gradient, mask, weight, strict=True)]

    def after(self, name: str) -> None:
        """See `ReferenceMethod`."""
        self.choose_again(name)


class ReferenceAst(ReferenceMethod):
    """Adam whose first moment knows nothing of the decay."""

    def use(self, name: str, gradient: list[float]) -> list[float] | None:
        """See `ReferenceMethod`."""
        b1, b2 = self.betas
        t = self.step_count + 1
        decay = self.decay()
        weight = self.weight(name)
        state = self.state[name]
        for e, g in enumerate(gradient):
            w = weight[e] * (1 - self.lr * self.weight_decay)
            state["m"][e] = b1 * state["m"][e] + (1 - b1) * g
            change = state["m"][e] + decay * (1 - self.mask[name][e]) * w
            state["v"][e] = b2 * state["v"][e] + (1 - b2) * change**2
            divisor = math.sqrt(state["v"][e] / (1 - b2**t)) + self.eps
            weight[e] = w - self.lr / (1 - b1**t) * change / divisor
        self.set_weight(name, weight)
        return None

    def after(self, name: str) -> None:
        """See `ReferenceMethod`."""
        self.choose_again(name)


class ReferenceCast(ReferenceMethod):
    """Dense passes, an adaptive L1 decay of masked weights, factors per output that are folded at the end."""

    def effective_mask(self, name: str, step: int) -> Tensor:
        """1 until the mask is frozen."""
        return (
            torch.tensor(self.mask[name]) if step >= self.freeze and self.folded else torch.ones(len(self.mask[name]))
        )

    folded = False

    def after(self, name: str) -> None:
        """See `ReferenceMethod`; `step_count` is one further already."""
        self.step_count -= 1
        decay = self.decay()
        frozen = self.step_count >= self.freeze
        self.step_count += 1
        if not frozen:
            weight = self.weight(name)
            second = self.optimizer.state[self.master[name]]["exp_avg_sq"].flatten().tolist()
            for e, (w, v) in enumerate(zip(weight, second, strict=True)):
                divisor = math.sqrt(v / (1 - self.betas[1] ** self.step_count)) + self.eps
                pull = self.lr * decay * (1 - self.mask[name][e]) / divisor
                weight[e] = math.copysign(max(abs(w) - pull, 0.0), w)
            self.set_weight(name, weight)
        if self.step_count == self.freeze:
            self.mask[name] = largest(self.weight(name), self.groups[name], self.config["pattern"])
        else:
            self.choose_again(name)

    def forge_step(self, probes: list[Batch]) -> bool:
        """Fold the factors when the mask freezes."""
        if self.step_count != self.freeze:
            return False
        for name in self.mask:
            layer = name.rpartition(".")[0]
            if f"{layer}.weight_scale" in self.master:
                scale = self.master[f"{layer}.weight_scale"]
                with torch.no_grad():
                    rows = scale[:, None] if self.input_axes[name] == -1 else scale[None, :]
                    self.master[name].mul_(rows)
                    scale.fill_(1.0)
                self.model.get_submodule(layer).enabled = False
        self.folded = True
        self.publish(self.step_count)
        return True


class ReferenceElsa(ReferenceMethod):
    """Dense passes; a sparse copy z and a dual u pull W to the pattern."""

    def start(self, probes: list[Batch]) -> None:
        """See `ReferenceMethod`; z begins as the projection of W."""
        super().start(probes)
        self.dual = {name: [0.0] * len(mask) for name, mask in self.mask.items()}
        self.copy = {
            name: [m * w for m, w in zip(mask, self.weight(name), strict=True)] for name, mask in self.mask.items()
        }

    def effective_mask(self, name: str, step: int) -> Tensor:
        """1 until the mask is frozen."""
        return torch.tensor(self.mask[name]) if step >= self.freeze else torch.ones(len(self.mask[name]))

    def use(self, name: str, gradient: list[float]) -> list[float] | None:
        """See `ReferenceMethod`."""
        if self.step_count >= self.freeze:
            return gradient
        parts = zip(gradient, self.weight(name), self.copy[name], self.dual[name], strict=True)
        return [g + self.decay() * (w - z + u) for g, w, z, u in parts]

    def after(self, name: str) -> None:
        """See `ReferenceMethod`."""
        weight = self.weight(name)
        second = self.optimizer.state[self.master[name]]["exp_avg_sq"].flatten().tolist()
        if self.step_count == self.freeze:
            scores = [f * w**2 for f, w in zip(second, weight, strict=True)]
            self.mask[name] = harden(scores, self.groups[name], self.n)
        elif self.step_count < self.freeze and self.step_count % self.settings["every"] == 0:
            shifted = [w + u for w, u in zip(weight, self.dual[name], strict=True)]
            scores = [f * b**2 for f, b in zip(second, shifted, strict=True)]
            self.mask[name] = harden(scores, self.groups[name], self.n)
            self.copy[name] = [m * b for m, b in zip(self.mask[name], shifted, strict=True)]
            self.dual[name] = [u + w - z for u, w, z in zip(self.dual[name], weight, self.copy[name], strict=True)]


class ReferencePat(ReferenceMethod):
    """The base optimizer's step, and a projection of what it wrote, after dense steps."""

    def effective_mask(self, name: str, step: int) -> Tensor:
        """1 in the dense steps, of which the first is one."""
        dense = step <= round(self.settings["warmup"] * self.config["max_steps"])
        return torch.ones(len(self.mask[name])) if dense else torch.tensor(self.mask[name])

    def after(self, name: str) -> None:
        """See `ReferenceMethod`."""
        self.choose_again(name)


class ReferenceMaskLLM(ReferenceMethod):
    """Frozen weights; a categorical over the patterns of every group, sampled by Gumbel-softmax."""

    def start(self, probes: list[Batch]) -> None:
        """See `ReferenceMethod`; logits lean to the starting mask."""
        super().start(probes)
        self.logits: dict[str, list[list[float]]] = {}
        self.moments: dict[str, list[list[list[float]]]] = {}
        part = self.config["method"]
        for name, groups in self.groups.items():
            members = len(groups[0])
            self.patterns = list(itertools.combinations(range(members), self.n))
            count = len(self.patterns)
            key = counter_key(self.config["seed"], 0, 0, f"logits/{name}")
            drawn = (uniform(key, 0, 2 * len(groups) * count, torch.device("cpu")).double() + 2.0**-25).tolist()
            self.logits[name] = []
            for g, group in enumerate(groups):
                row = []
                for k, pattern in enumerate(self.patterns):
                    u = drawn[2 * (g * count + k)]
                    angle = drawn[2 * (g * count + k) + 1]
                    noise = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * angle)
                    shared = sum(self.mask[name][group[i]] for i in pattern) - self.n**2 / members
                    row.append(part["spread"] * (noise + part["prior"] * shared))
                self.logits[name].append(row)
            self.moments[name] = [[[0.0, 0.0] for _ in self.patterns] for _ in groups]
            self.sample(name)
        self.publish(0)

    @property
    def freeze(self) -> int:
        """Return the step at which the likeliest patterns become the mask."""
        return round((1 - self.config["method"]["frozen"]) * self.config["max_steps"])

    def dials(self) -> tuple[float, float]:
        """Return kappa and tau."""
        share = min(1.0, self.step_count / self.freeze)
        part = self.config["method"]
        scale, last_scale = part["scale"]
        temperature, last_temperature = part["temperature"]
        return scale + (last_scale - scale) * share, temperature + (last_temperature - temperature) * share

    def choices(self, name: str) -> list[list[float]]:
        """Gumbel-softmax of every group, for the forward after `step_count` steps."""
        scale, temperature = self.dials()
        count = len(self.patterns)
        key = counter_key(self.config["seed"], self.step_count, 0, f"gumbel/{name}")
        drawn = (uniform(key, 0, len(self.logits[name]) * count, torch.device("cpu")).double() + 2.0**-25).tolist()
        results = []
        for g, row in enumerate(self.logits[name]):
            z = [
                (scale * logit - math.log(-math.log(drawn[g * count + k]))) / temperature for k, logit in enumerate(row)
            ]
            exps = [math.exp(value - max(z)) for value in z]
            results.append([value / sum(exps) for value in exps])
        return results

    def sample(self, name: str) -> None:
        """Sample the mask of the next forward."""
        frozen = self.step_count >= self.freeze
        choices = self.logits[name] if frozen else self.choices(name)
        for group, row in zip(self.groups[name], choices, strict=True):
            for e in group:
                self.mask[name][e] = 0.0
            if frozen:
                row = [1.0 if k == max(range(len(row)), key=lambda k: (row[k], -k)) else 0.0 for k in range(len(row))]
            for pattern, share in zip(self.patterns, row, strict=True):
                for i in pattern:
                    self.mask[name][group[i]] += share

    def train_step(self, micro_batches: list[Batch]) -> float:
        """Only logits move."""
        gradients, loss = self.gradients(micro_batches)
        part = self.config["method"]
        scale, temperature = self.dials()
        reward = part["reward"] * (1 - self.step_count / self.freeze)
        for name in self.mask if self.step_count < self.freeze else ():
            gradient = gradients[name].flatten().tolist()
            weight = self.weight(name)
            for g, (group, y) in enumerate(zip(self.groups[name], self.choices(name), strict=True)):
                of_mask = [weight[e] * gradient[e] - 2 * reward * weight[e] ** 2 * self.mask[name][e] for e in group]
                of_y = [sum(of_mask[i] for i in pattern) for pattern in self.patterns]
                mean = sum(a * b for a, b in zip(y, of_y, strict=True))
                for k, moments in enumerate(self.moments[name][g]):
                    self.adam(name, g, k, moments, scale / temperature * y[k] * (of_y[k] - mean))
        self.step_count += 1
        for name in self.mask:
            self.sample(name)
        self.publish(self.step_count)
        return loss

    def adam(self, name: str, g: int, k: int, moments: list[float], gradient: float) -> None:
        """Do one step of Adam on one logit."""
        b1, b2 = self.betas
        t = self.step_count + 1
        moments[0] = b1 * moments[0] + (1 - b1) * gradient
        moments[1] = b2 * moments[1] + (1 - b2) * gradient**2
        divisor = math.sqrt(moments[1] / (1 - b2**t)) + self.eps
        self.logits[name][g][k] -= self.lr / (1 - b1**t) * moments[0] / divisor

    def forge_step(self, probes: list[Batch]) -> bool:
        """Nothing is left to do."""
        return False
