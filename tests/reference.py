"""SparseForge (arXiv 2605.06402) as slow literal loops in one process: what every stage and world size is held against.

Nothing of `sparseforge_ds` is used but the counter-based random numbers, so that both sides draw the same probes.
Groups are lists of flat indices, scores and masks Python floats, the model and AdamW plain torch. "Ranks" are parts of
a batch whose gradients are averaged. The equation numbers are those of the design.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparseforge_ds.mask.random_numbers import counter_hash, counter_key, rademacher

Batch = dict[str, Tensor]


def groups_of(pattern: str, shape: tuple[int, ...], input_axis: int) -> list[list[int]]:
    """Flat indices of the members of every group, in the order of their input (tiles: row by row)."""
    rows, columns = shape
    if pattern.startswith("block"):
        size = int(pattern.removeprefix("block").split(":")[0])
        return [
            [(top + r) * columns + left + c for r in range(size) for c in range(size)]
            for top in range(0, rows, size)
            for left in range(0, columns, size)
        ]
    m = int(pattern.removesuffix(" pairs").split(":")[1])
    if input_axis == -1:
        return [[o * columns + i + j for j in range(m)] for o in range(rows) for i in range(0, columns, m)]
    return [[(i + j) * columns + o for j in range(m)] for o in range(columns) for i in range(0, rows, m)]


def kept_of(pattern: str) -> int:
    """N."""
    if pattern.startswith("block"):
        size, _, density = pattern.removeprefix("block").partition(":")
        return round(int(size) ** 2 * float(density or 0.5))
    return int(pattern.split(":")[0])


def winners(values: list[float], n: int) -> list[int]:
    """Positions of the n largest, ties to the lower position."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:n]


def pooled(values: list[float], groups: list[list[int]]) -> list[float]:
    """Return what members of pairs are compared by: the sum of both, in fp32."""
    sums = list(values)
    for group in groups:
        for first, second in zip(group[::2], group[1::2], strict=True):
            sums[first] = sums[second] = (torch.tensor(values[first]) + torch.tensor(values[second])).item()
    return sums


def harden(mask: list[float], groups: list[list[int]], n: int) -> list[float]:
    """hard(m): 1 for the n largest of a group, 0 for the others."""
    hard = [0.0] * len(mask)
    for group in groups:
        for i in winners([mask[e] for e in group], n):
            hard[group[i]] = 1.0
    return hard


def standardized(weight: list[float], curvature: list[float] | None, damping: float) -> list[float]:
    """Eqs. 3 and 4 for one matrix; rounded to fp32, in which members are compared, so that both sides see one tie."""
    h = [1.0] * len(weight) if curvature is None else [max(value, 0.0) for value in curvature]
    eps = damping * math.fsum(h) / len(h)
    score = [(a + eps) * w * w for a, w in zip(h, weight, strict=True)]
    mean = math.fsum(score) / len(score)
    std = math.sqrt(math.fsum((s - mean) ** 2 for s in score) / len(score))
    return torch.tensor([(s - mean) / (std + 1e-6 * std) for s in score]).tolist()


def updated_mask(
    mask: list[float],
    weight: list[float],
    curvature: list[float] | None,
    groups: list[list[int]],
    n: int,
    dials: dict[str, float],
    threshold: str,
    damping: float,
    pairs: bool = False,
) -> tuple[list[float], list[float]]:
    """Eqs. 3 to 9 for one matrix: the new mask and the target."""
    # eqs. 3 and 4: score, standardized over the matrix
    score = standardized(weight, curvature, damping)
    score = pooled(score, groups) if pairs else score
    new = list(mask)
    target = [0.0] * len(mask)
    for group in groups:
        order = winners([score[e] for e in group], len(group))
        last_in = score[group[order[n - 1]]]
        first_out = score[group[order[n]]]
        # eq. 5: the threshold between survivors and the rest
        tau = last_in if threshold == "nth" else (last_in + first_out) / 2
        for position, i in enumerate(order):
            e = group[i]
            # eq. 6: target
            target[e] = 1.0 if position < n else 0.0
            # eq. 5: soft gate
            z = (score[e] - tau) / dials["temperature"]
            gate = 1 / (1 + math.exp(-z)) if z > -700 else 0.0
            # eq. 7: blend
            gate = (1 - dials["beta"]) * gate + dials["beta"] * target[e]
            # eq. 8: penalty
            gate = gate - dials["penalty_rate"] * dials["mid_penalty"] * (mask[e] - target[e])
            gate = min(max(gate, 0.0), 1.0)
            # eq. 9: mask
            new[e] = (1 - dials["mask_rate"]) * mask[e] + dials["mask_rate"] * gate
    return new, target


def scored_curvature(curvature: list[float], shape: tuple[int, int], block: dict[str, Any]) -> list[float]:
    """Return the curvature of one matrix as scores take it: its elements, or the product of its row and column sums."""
    part = block["curvature"]
    factored = part["factored"]
    if factored is None:
        factored = block["importance"] != "magnitude" and (block["importance"] == "wanda" or part["per_token"])
    if not factored:
        return curvature
    rows, columns = shape
    row = [max(math.fsum(curvature[r * columns + c] for c in range(columns)), 0.0) for r in range(rows)]
    column = [max(math.fsum(curvature[r * columns + c] for r in range(rows)), 0.0) for c in range(columns)]
    return [row[r] * column[c] / (math.fsum(row) or 1.0) for r in range(rows) for c in range(columns)]


def dials_at(step: int, block: dict[str, Any], max_steps: int) -> dict[str, float]:
    """Return every annealed number after `step` optimizer steps, for the `method` block of sparseforge."""

    def progress(ramp: list[float]) -> float:
        start, stop = round(ramp[0] * max_steps), round(ramp[1] * max_steps)
        if step >= stop:
            return 1.0
        return max(0.0, (step - start) / (stop - start))

    # By default some 15 updates until the freeze, and T at its floor there.
    freeze = round(block["hardening"][1] * max_steps)
    gamma = block["temperature_decay"]
    every = block["update_every"]
    if every is None:
        every = min(5, max(1, freeze // 15))
    if gamma is None:
        gamma = (block["temperature_min"] / block["temperature"]) ** (1 / max(1, freeze // every))
    u = progress(block["blend"])
    return {
        "temperature": max(block["temperature_min"], block["temperature"] * gamma ** (step // every)),
        "beta": 3 * u**2 - 2 * u**3,
        "mid_penalty": block["mid_penalty"] * progress(block["mid_penalty_ramp"]),
        "penalty_rate": block["penalty_rate"],
        "mask_rate": block["mask_rate"],
        "x": 0.0 if block["hard"] else 1 - progress(block["hardening"]),
        "every": every,
        "freeze": freeze,
    }


class ReferenceForge:
    """Straight-through training of a masked model with plain AdamW; same schedule as `SparseForge`."""

    def __init__(
        self,
        model: nn.Module,
        input_axes: dict[str, int],
        config: dict[str, Any],
        *,
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float = 0.0,
        step_at_init: bool = False,
        loss: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: model(**batch).loss,
    ) -> None:
        """Take over `model` (its dtype is that of the passes; masters are fp32).

        Args:
            model: plain torch model, trained in place.
            input_axes: prunable weights by name -> axis that the matmul contracts.
            config: `SparseForgeConfig.to_dict()`.
            lr: of AdamW.
            eps: of AdamW.
            weight_decay: of all matrices; vectors have none.
            clip: global gradient norm, 0 for none.
            step_at_init: do what DeepSpeed's 16-bit stage-0 constructors do: one step with zero gradients.
            loss: scalar loss of a batch.
        """
        self.model = model
        self.config = config
        self.clip = clip
        self.loss = loss
        self.input_axes = input_axes
        # Masters in fp32, in two param groups.
        self.master = {name: nn.Parameter(p.detach().float().clone()) for name, p in model.named_parameters()}
        matrices = [p for p in self.master.values() if p.dim() > 1]
        vectors = [p for p in self.master.values() if p.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=lr,
            eps=eps,
        )
        # Masks begin at 1.
        pattern = config["pattern"]
        self.n = kept_of(pattern)
        self.groups = {name: groups_of(pattern, tuple(self.master[name].shape), a) for name, a in input_axes.items()}
        self.mask = {name: [1.0] * self.master[name].numel() for name in input_axes}
        self.curvature = {name: torch.zeros(self.master[name].numel(), dtype=torch.float64) for name in input_axes}
        self.target: dict[str, list[float]] = {}
        self.refreshes = 0
        self.step_count = 0
        self.formed = False  # whether masks have moved: before that, a group of ones has no top n
        if step_at_init:
            for parameter in self.master.values():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()

    def start(self, probes: list[Batch]) -> None:
        """Fix the mask before training: the target becomes the mask."""
        if self._dials(0)["freeze"] == 0:
            self._refresh(probes)
            self._update(fix=True)
            self._release()
            self.publish(0)

    def train_step(self, micro_batches: list[Batch]) -> float:
        """Do one optimizer step on the mean gradient of equally large parts (ranks and accumulation alike)."""
        if self._hears(self.step_count + 1):
            self._take(self._per_token(micro_batches))
        gradients, loss = self.clipped_gradients(micro_batches)
        for name, parameter in self.master.items():
            parameter.grad = gradients[name]
        before = {name: master.detach().clone() for name, master in self.master.items()}
        self.optimizer.step()
        if self.formed and self.step_count < self._dials(0)["freeze"]:
            self._follow(before)
        self.step_count += 1
        self.publish(self.step_count)
        return loss

    @torch.no_grad()
    def _follow(self, before: dict[str, Tensor]) -> None:
        """Move each weight by m_eff times the optimizer's step."""
        for name in self.mask:
            if not self.config["method"]["straight_through"]:
                start = before[name]
                effective = self.effective_mask(name, self.step_count).view_as(start)
                self.master[name].copy_(torch.lerp(start, self.master[name], effective))

    def forge_step(self, probes: list[Batch]) -> bool:
        """Update or project the mask after an optimizer step, when due."""
        step = self.step_count
        dials = self._dials(self.step_count)
        if self._is_update(step):
            self._refresh(probes)
            self._update()
        elif step == dials["freeze"]:
            for name in self.mask:
                self.mask[name] = harden(self.mask[name], self.groups[name], self.n)
            self._release()
        else:
            return False
        self.publish(step)
        return True

    @torch.no_grad()
    def _release(self) -> None:
        """Nothing is left of what a frozen mask removed: neither weights nor moments."""
        for name, mask in self.mask.items():
            state = self.optimizer.state[self.master[name]]
            for value in (self.master[name], state.get("exp_avg"), state.get("exp_avg_sq")):
                if value is not None:
                    value.mul_(torch.tensor(mask).view_as(value)).add_(0.0)

    def _is_update(self, step: int) -> bool:
        dials = self._dials(step)
        return 0 < step < dials["freeze"] and step % dials["every"] == 0

    def _hears(self, step: int) -> bool:
        """Return True for the last training steps before a mask update, whose passes give the curvature."""
        every = self._dials(step)["every"]
        part = self.config["curvature"]
        update = step
        while update % every:
            update += 1
        steps = part["first_probes"] if update == every else part["probes"]
        return self._listens and self._is_update(update) and step > update - steps

    @property
    def _listens(self) -> bool:
        """Return True if the curvature is that of training steps, at their own weights."""
        part = self.config["curvature"]
        soft = self._dials(0)["freeze"] > 0
        summed = part["per_token"] if part["factored"] is None else part["factored"] and part["per_token"]
        return self.config["importance"] == "fisher" and soft and summed and part["source"] == "training"

    def effective_mask(self, name: str, step: int) -> Tensor:
        """m_eff, eq. 10."""
        x = self._dials(step)["x"]
        mask = torch.tensor(self.mask[name], dtype=torch.float64)
        if x == 1.0 or not self.formed:
            return mask.float()
        return (x * mask + (1 - x) * torch.tensor(harden(self.mask[name], self.groups[name], self.n))).float()

    @torch.no_grad()
    def publish(self, step: int) -> None:
        """Give the model m_eff W (eq. 1) for masked weights, and W for others."""
        for name, parameter in self.model.named_parameters():
            weight = self.master[name].detach()
            if name in self.mask:
                weight = weight * self.effective_mask(name, step).view_as(weight) + 0.0
            parameter.copy_(weight)

    @property
    def _frozen(self) -> bool:
        """Return True if the next step is one under frozen masks."""
        return self.step_count >= self._dials(0)["freeze"]

    def clipped_gradients(self, batches: list[Batch]) -> tuple[dict[str, Tensor], float]:
        """`gradients` of what is left of the weights, scaled to the norm that is allowed."""
        gradients, loss = self.gradients(batches)
        for name, mask in self.mask.items():
            if self._frozen:
                gradients[name] = gradients[name] * torch.tensor(mask).view_as(gradients[name])
        if self.clip:
            norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
            gradients = {name: g * min(1.0, self.clip / (norm + 1e-6)) for name, g in gradients.items()}
        return gradients, loss

    def gradients(self, batches: list[Batch]) -> tuple[dict[str, Tensor], float]:
        """fp32 mean over equally large batches of dL/d(published weight), and the mean loss."""
        total = {name: torch.zeros_like(parameter) for name, parameter in self.master.items()}
        losses = []
        for batch in batches:
            self.model.zero_grad(set_to_none=True)
            loss = self.loss(self.model, batch)
            loss.backward()
            losses.append(float(loss.detach()))
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    total[name] += parameter.grad.float() / len(batches)
        self.model.zero_grad(set_to_none=True)
        return total, sum(losses) / len(losses)

    def _dials(self, step: int) -> dict[str, float]:
        return dials_at(step, self.config["method"], self.config["max_steps"])

    def _update(self, fix: bool = False) -> None:
        for name, groups in self.groups.items():
            new, self.target[name] = updated_mask(
                self.mask[name],
                self.master[name].detach().flatten().tolist(),
                self.score_takes(name),
                groups,
                self.n,
                self._dials(self.step_count),
                self.config["method"]["threshold"],
                self.config["curvature"]["damping"],
                self.config["pattern"].endswith("pairs"),
            )
            self.mask[name] = self.target[name] if fix else [round(m * 65535) / 65535 for m in new]
        self.formed = True

    def score_takes(self, name: str) -> list[float] | None:
        """Return the curvature of a matrix as its score takes it; None for a plain magnitude."""
        if self.config["importance"] == "magnitude":
            return None
        shape = tuple(self.master[name].shape)
        return scored_curvature(self.curvature[name].tolist(), (shape[0], shape[1]), self.config)

    # -- curvature, eq. 2 ---------------------------------------------------------------------------------------------

    def _refresh(self, batches: list[Batch]) -> None:
        kind = self.config["importance"]
        part = self.config["curvature"]
        if kind == "magnitude" or self._listens:
            return
        self._take(self.curvature_sample(kind, batches, part["probes"] if self.refreshes else part["first_probes"]))

    def _take(self, result: dict[str, Tensor]) -> None:
        decay = self.config["curvature"]["decay"]
        for name, sample in result.items():
            self.curvature[name] = decay * self.curvature[name] + (1 - decay) * sample.double()
        self.refreshes += 1

    def curvature_sample(self, kind: str, batches: list[Batch], probes: int) -> dict[str, Tensor]:
        """(numel,) fp64 by weight name, the mean of `probes` samples; `batches` are parts of a probe, one a rank."""
        if kind == "wanda":
            return self._mean_square_inputs(batches)
        total = {name: torch.zeros_like(value) for name, value in self.curvature.items()}
        for probe in range(probes):
            if kind == "hutchinson" and self.config["curvature"]["per_token"]:
                sample = self._output_difference(batches, probe)
            elif kind == "hutchinson":
                sample = self._gradient_difference(batches, probe)
            else:
                sample = self._per_token(batches)
            for name in total:
                total[name] += sample[name].double() / probes
        return total

    def _gradient_difference(self, batches: list[Batch], probe: int) -> dict[str, Tensor]:
        """Return v (g(w + r v) - g(w - r v)) / 2r."""
        parameters = dict(self.model.named_parameters())
        published = {name: parameters[name].detach().clone() for name in self.mask}
        relative = self.config["curvature"]["radius"] or {torch.float32: 1e-3, torch.bfloat16: 1e-1}[self.dtype]
        sign = {}
        radius = {}
        for name, weight in published.items():
            key = counter_key(self.config["seed"], self.step_count, probe, name)
            sign[name] = rademacher(key, 0, weight.numel(), weight.device).view_as(weight)
            exact = self._published_fp32(name)
            radius[name] = relative * float(exact.double().square().mean().sqrt())
        sides = []
        for side in (1.0, -1.0):
            with torch.no_grad():
                for name in published:
                    parameters[name].copy_(self._published_fp32(name) + side * radius[name] * sign[name])
            sides.append(self.gradients(batches)[0])
        with torch.no_grad():
            for name in published:
                parameters[name].copy_(published[name])
        return {
            name: (sign[name] * (sides[0][name] - sides[1][name]) / (2 * radius[name])).flatten() for name in published
        }

    def _output_difference(self, batches: list[Batch], probe: int) -> dict[str, Tensor]:
        """Return v (g(y + r v) - g(y - r v)) / 2r of every output of every token, and sums of it times x^2 over tokens.

        Row sums take x of the one side, column sums x of the other, so that a token leaves a few numbers behind.
        """
        relative = self.config["curvature"]["radius"] or 0.1
        row = {name: torch.zeros(self._matrix(name)[0], dtype=torch.float64) for name in self.mask}
        column = {name: torch.zeros(self._matrix(name)[1], dtype=torch.float64) for name in self.mask}
        first = 0
        for batch in batches:
            tokens = batch["input_ids"].numel()
            # v: a sign for each output of each token, by counters.
            sign: dict[str, Tensor] = {}
            radius: dict[str, Tensor] = {}
            for name in self.mask:
                key = counter_key(self.config["seed"], self.step_count, probe, f"{name} outputs")
                sign[name] = _signs_of_outputs(key, first, tokens, self._matrix(name)[0])
            # Gradients on both sides of y, and the inputs that came with them.
            plus = self._displaced(batch, sign, radius, relative)
            minus = self._displaced(batch, {name: -v for name, v in sign.items()}, radius, relative)
            for name in self.mask:
                x_plus, g_plus = plus[name]
                x_minus, g_minus = minus[name]
                slope = (g_plus - g_minus) * sign[name]
                slope = slope / (2 * radius[name].double()[:, None]) / len(batches)
                for t in range(tokens):
                    row[name] += slope[t] * x_plus[t].square().sum()
                    column[name] += slope[t].sum() * x_minus[t].square()
            first += tokens
        # The sample: a matrix with these row and column sums.
        sample = {}
        for name in self.mask:
            outputs, inputs = self._matrix(name)
            full = torch.zeros(outputs, inputs, dtype=torch.float64)
            for o in range(outputs):
                for i in range(inputs):
                    full[o, i] = row[name][o] / inputs + column[name][i] / outputs
            full -= row[name].sum() / (outputs * inputs)
            sample[name] = (full if self.input_axes[name] == -1 else full.t()).flatten()
        return sample

    def _displaced(
        self, batch: Batch, sign: dict[str, Tensor], radius: dict[str, Tensor], relative: float
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return x (T, in) and dL/dy (T, out) of every layer with all outputs displaced; fill an empty `radius`."""
        inputs: dict[str, Tensor] = {}
        outputs: dict[str, Tensor] = {}

        def displace(name: str, x: Tensor, y: Tensor) -> Tensor:
            # The first call sets the radius, a share of each token's own outputs.
            rows = y.detach().flatten(0, -2)
            if name not in radius:
                radius[name] = (relative * rows.float().square().mean(1).sqrt()).to(y.dtype)
            inputs[name] = x.detach().flatten(0, -2).double()
            outputs[name] = y + (radius[name][:, None] * sign[name].to(y.dtype)).view_as(y)
            outputs[name].retain_grad()
            return outputs[name]

        # Displace all layers in one pass, so that each sees the others' displacement.
        handles = [
            self.model.get_submodule(name.rpartition(".")[0]).register_forward_hook(
                lambda _module, args, output, name=name: displace(name, args[0], output)
            )
            for name in sign
        ]
        self.loss(self.model, batch).backward()
        for handle in handles:
            handle.remove()
        self.model.zero_grad(set_to_none=True)
        return {name: (inputs[name], outputs[name].grad.double().flatten(0, -2)) for name in sign}

    def _matrix(self, name: str) -> tuple[int, int]:
        """Outputs and inputs of a layer."""
        rows, columns = self.master[name].shape
        return (rows, columns) if self.input_axes[name] == -1 else (columns, rows)

    def _published_fp32(self, name: str) -> Tensor:
        weight = self.master[name].detach()
        return weight * self.effective_mask(name, self.step_count).view_as(weight)

    def _per_token(self, batches: list[Batch]) -> dict[str, Tensor]:
        """Return T * sum_t g_t^2, with a copy of the weight for every token, so that autograd gives its gradient."""
        total = {name: torch.zeros_like(value) for name, value in self.curvature.items()}
        for batch in batches:
            with self._weight_per_token() as copies:
                loss = self.loss(self.model, batch)
            result = torch.autograd.grad(loss, list(copies.values()))
            for name, gradient in zip(copies, result, strict=True):
                for first in gradient:
                    squared = first.double().square().flatten()
                    total[name] += gradient.shape[0] * squared / len(batches)
        return total

    @contextmanager
    def _weight_per_token(self) -> Iterator[dict[str, Tensor]]:
        copies: dict[str, Tensor] = {}
        modules = {name: self.model.get_submodule(name.rpartition(".")[0]) for name in self.mask}

        def forward_of(name: str, module: nn.Module) -> Callable[[Tensor], Tensor]:
            def forward(x: Tensor) -> Tensor:
                rows = x.reshape(-1, x.shape[-1])
                copies[name] = module.weight.detach().expand(rows.shape[0], -1, -1).clone().requires_grad_()
                output = torch.einsum("ti,toi->to" if self.input_axes[name] == -1 else "ti,tio->to", rows, copies[name])
                if module.bias is not None:
                    output = output + module.bias
                return output.view(*x.shape[:-1], -1)

            return forward

        for name, module in modules.items():
            module.forward = forward_of(name, module)  # type: ignore[method-assign]
        try:
            yield copies
        finally:
            for module in modules.values():
                del module.forward

    @torch.no_grad()
    def _mean_square_inputs(self, batches: list[Batch]) -> dict[str, Tensor]:
        records: dict[str, list[Tensor]] = {name: [] for name in self.mask}
        handles = [
            self.model.get_submodule(name.rpartition(".")[0]).register_forward_hook(
                lambda _module, args, _output, name=name: records[name].append(args[0].flatten(0, -2).double())
            )
            for name in self.mask
        ]
        for batch in batches:
            self.loss(self.model, batch)
        for handle in handles:
            handle.remove()
        result = {}
        for name, inputs in records.items():
            column = torch.cat(inputs).square().mean(0)
            shape = self.master[name].shape
            full = column.expand(shape) if self.input_axes[name] == -1 else column[:, None].expand(shape)
            result[name] = full.flatten()
        return result

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the passes."""
        return next(self.model.parameters()).dtype


def _signs_of_outputs(key: int, first: int, tokens: int, outputs: int) -> Tensor:
    """(tokens, outputs) of +-1: every token has as many words of 64 signs as its outputs need."""
    words = math.ceil(outputs / 64)
    sign = torch.empty(tokens, outputs, dtype=torch.float64)
    for t in range(tokens):
        row = counter_hash(key, torch.arange((first + t) * words, (first + t + 1) * words)).tolist()
        for o in range(outputs):
            sign[t, o] = 1.0 if row[o // 64] >> (o % 64) & 1 else -1.0
    return sign


def branch_start(removed_OI: Tensor, k: int) -> Tensor:
    """(out, in) what a mask removes -> (out, ceil(in / k)) B that stands in for it: its mean over a run of k inputs."""
    return torch.stack([run.mean(1) for run in removed_OI.split(k, dim=1)], dim=1)
