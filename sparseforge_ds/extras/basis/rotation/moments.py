"""What the score of a weight is made of, in whichever basis: second moments of inputs and of gradients of outputs.

The mean over tokens of g_i^2 x_j^2, g the gradient at an output of the loss of labels that the model draws itself, is
the diagonal of the Fisher information of W_ij. Here it is taken apart into the means of g_i^2 and of x_j^2. A vector
that will be rotated needs the whole matrix of its moments M, since the rotated one has the diagonal of R^T M R.

Legend of shape suffixes: T tokens, S rows sorted by expert, E experts (1 of a weight that is not fused), C channels of
a side of a weight, P copies of a dimension along an axis, B its blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from sparseforge_ds.extras.basis.permutation.channels import Axis
from sparseforge_ds.extras.basis.rotation.stream import RESIDUAL, Stream
from sparseforge_ds.extras.basis.rotation.turn import Rotations
from sparseforge_ds.model.families import PrunableWeight
from sparseforge_ds.zero.expert_hooks import expert_tokens, why_unhookable
from sparseforge_ds.zero.layer_hooks import token_gradients


@dataclass
class Side:
    """The inputs of a weight, or its outputs, summed over tokens."""

    dimension: str | None
    """Of the model, which the side has if it can be rotated."""
    axis: Axis | None
    square_EC: Tensor
    """Sums of squares; (E, 1) their total if the side has the residual stream."""
    stream_CC: Tensor | None = None
    """Moments of the residual stream there, which weights share; the side has their shape, and a size of its own."""
    heads_PBCC: Tensor | None = None
    """Moments of the values of heads."""

    def diagonal(self, rotations: Rotations) -> Tensor:
        """(E, C) sums of squares of the rotated channels."""
        if self.stream_CC is not None:
            rotation_CC = rotations[RESIDUAL][0]
            turned_C = ((self.stream_CC @ rotation_CC) * rotation_CC).sum(0)
            return self.square_EC * turned_C / self.stream_CC.trace().clamp(min=torch.finfo(torch.float32).tiny)
        if self.heads_PBCC is None:
            return self.square_EC
        assert self.dimension is not None and self.axis is not None
        rotation_BCC = rotations[self.dimension]
        turned_PBC = ((self.heads_PBCC @ rotation_BCC) * rotation_BCC).sum(-2)
        result_EC = self.square_EC.clone()
        result_EC[0, self.axis.positions.to(result_EC.device)] = turned_PBC
        return result_EC


@dataclass
class Scored:
    """A weight that is going to be pruned, with what its score is made of."""

    weight: PrunableWeight
    inputs: Side
    outputs: Side


@torch.enable_grad()
def measure(
    model: PreTrainedModel, stream: Stream, weights: Iterable[PrunableWeight], batches: Iterable[Tensor], seed: int
) -> list[Scored]:
    """A forward and a backward pass for each batch of (B, S) token ids. Raises ValueError where experts hide theirs."""
    sums = _Sums(model, stream, list(weights))
    generator = torch.Generator(model.device).manual_seed(seed)
    training, trained = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval().requires_grad_(False)  # only gradients of outputs are looked at
    with ExitStack() as stack:
        norms = {name: model.get_submodule(name) for name in stream.gains}
        stack.enter_context(_outputs_of(norms, sums.hear_norm))
        stack.enter_context(token_gradients(sums.modules, sums.hear))
        if sums.fused:
            stack.enter_context(expert_tokens(sums.fused, sums.hear_experts))
        for batch_BS in tqdm(batches, unit=" passes", disable=None):
            logits_TV = model(input_ids=batch_BS.to(model.device), use_cache=False).logits.flatten(0, 1).float()
            drawn_T = torch.multinomial(logits_TV.detach().softmax(-1), 1, generator=generator)[:, 0]
            F.cross_entropy(logits_TV, drawn_T, reduction="sum").backward()
    model.train(training)
    for parameter in trained:
        parameter.requires_grad_()
    return sums.scored()


class _Sums:
    """Hears the passes of a model, and sums up."""

    def __init__(self, model: PreTrainedModel, stream: Stream, weights: list[PrunableWeight]) -> None:
        self._weights = {weight.name: weight for weight in weights}
        self._gains = stream.gains
        self._norm_of = stream.norm_of
        self.modules: dict[str, nn.Module] = {}
        self.fused: dict[str, nn.Module] = {}
        self._of_norm: dict[str, Tensor] = {}
        self._of_block: dict[str, Tensor] = {}
        self._sides: dict[str, tuple[Side, Side]] = {}
        self._tokens: dict[str, Tensor] = {}
        self._passed = 0
        for weight in weights:
            module = model.get_submodule(weight.module)
            if len(weight.shape) == 2:
                self.modules[weight.name] = module
            elif (why := why_unhookable(module)) is None:
                self.fused[weight.module] = module
            else:
                raise ValueError(f"rotate: what {weight.name} computes cannot be seen: it {why}; exclude or permute it")
            axes = {axis.axis: (name, axis) for name, axis in stream.axes(weight.name)}
            sides = [self._side(weight, side, axes.get(side), model.device) for side in sides_of(weight)]
            self._sides[weight.name] = (sides[0], sides[1])
            experts = weight.shape[0] if len(weight.shape) == 3 else 1
            self._tokens[weight.name] = torch.zeros(experts, device=model.device)

    def _side(self, weight: PrunableWeight, side: int, found: tuple[str, Axis] | None, device: torch.device) -> Side:
        dimension, axis = found if found is not None else (None, None)
        experts, C = (weight.shape[0] if len(weight.shape) == 3 else 1), weight.shape[side]
        if dimension == RESIDUAL:
            # Gradients have the same directions in all weights that a block adds to the residual stream.
            kept, key = (
                (self._of_norm, self._norm_of[weight.name])
                if weight.name in self._norm_of
                else (self._of_block, block_of(weight.name))
            )
            stream_CC = kept.setdefault(key, torch.zeros(C, C, device=device))
            return Side(dimension, axis, torch.zeros(experts, 1, device=device), stream_CC)
        square_EC = torch.zeros(experts, C, device=device)
        if axis is None:
            return Side(dimension, axis, square_EC)
        P, B, heads = axis.positions.shape
        return Side(dimension, axis, square_EC, heads_PBCC=torch.zeros(P, B, heads, heads, device=device))

    def hear_norm(self, name: str, output_TC: Tensor) -> None:
        """What layers are given, without the gain, which will be theirs."""
        if name in self._of_norm:
            gain_C = self._gains[name]
            plain_TC = torch.where(gain_C == 0, 0.0, output_TC.float() / gain_C)
            self._of_norm[name].addmm_(plain_TC.T, plain_TC)
            self._passed += len(output_TC)

    def hear(self, name: str, grad_TO: Tensor, input_TI: Tensor) -> None:
        """Of a layer."""
        inputs, outputs = self._sides[name]
        self._tokens[name] += len(input_TI)
        for side, value_TC in ((inputs, input_TI.float()), (outputs, grad_TO.float())):
            self._add(side, value_TC)
            if side.stream_CC is None:
                side.square_EC[0] += value_TC.square().sum(0)
            else:
                side.square_EC += value_TC.square().sum()
            if side.heads_PBCC is not None:
                assert side.axis is not None
                held_TPBC = value_TC[:, side.axis.positions.to(value_TC.device)]
                side.heads_PBCC += torch.einsum("tpbi,tpbj->pbij", held_TPBC, held_TPBC)

    def hear_experts(
        self, layer: str, parameter: str, grad_SO: Tensor | None, input_SI: Tensor, stop_E: Tensor, _tokens: int
    ) -> None:
        """Of fused experts."""
        name = f"{layer}.{parameter}"
        if name not in self._sides:
            return
        assert grad_SO is not None
        row_S = torch.arange(len(input_SI), device=stop_E.device, dtype=stop_E.dtype)
        expert_S = torch.searchsorted(stop_E, row_S, right=True)
        self._tokens[name] += torch.bincount(expert_S, minlength=len(stop_E))
        for side, value_SC in zip(self._sides[name], (input_SI.float(), grad_SO.float()), strict=True):
            self._add(side, value_SC)
            square_SC = value_SC.square()
            if side.stream_CC is not None:
                square_SC = square_SC.sum(1, keepdim=True)
            side.square_EC.index_add_(0, expert_S, square_SC)

    def _add(self, side: Side, value_TC: Tensor) -> None:
        if side.stream_CC is not None and not any(side.stream_CC is kept for kept in self._of_norm.values()):
            side.stream_CC.addmm_(value_TC.T, value_TC)

    def scored(self) -> list[Scored]:
        """All weights; inputs as means over the tokens that a weight saw, gradients as sums over all."""
        for name, (inputs, _) in self._sides.items():
            seen_E1 = self._tokens[name].clamp(min=1)[:, None]
            if inputs.stream_CC is None:
                inputs.square_EC /= seen_E1
            else:
                inputs.square_EC.fill_(inputs.stream_CC.trace() * len(self._of_norm) / self._passed)
            if inputs.heads_PBCC is not None:
                inputs.heads_PBCC /= seen_E1[0]
        return [Scored(weight, *self._sides[name]) for name, weight in self._weights.items()]


def sides_of(weight: PrunableWeight) -> tuple[int, int]:
    """The axes of inputs and of outputs."""
    return weight.input_axis, -3 - weight.input_axis


def block_of(weight: str) -> str:
    """What adds the outputs of a weight to the residual stream: the module below the layer's number, `h.3.attn`."""
    parts = weight.split(".")
    number = next(index for index, part in enumerate(parts) if part.isdecimal())
    return ".".join(parts[: number + 2])


@contextmanager
def _outputs_of(norms: Mapping[str, nn.Module], heard: Callable[[str, Tensor], None]) -> Iterator[None]:
    """While active, every forward of a norm calls heard(name, output (T, C))."""
    handles = [
        norm.register_forward_hook(
            lambda _module, _args, output, name=name: heard(name, output.detach().reshape(-1, output.shape[-1]))
        )
        for name, norm in norms.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
