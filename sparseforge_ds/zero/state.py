"""W, masks and curvature of prunable weights as optimizer state, and one bit a weight once masks are frozen.

While masks move, W, the mask and, for some scores, a curvature lie in the inner optimizer's state beside `exp_avg`, one
element for each element of DeepSpeed's flat master partition: DeepSpeed saves, shards and offloads them. Adam creates
its moments only if a parameter's state is empty, so our tensors wait outside until its first step is over.

Once masks are frozen, only low-rank branches that start later read pruned elements of W. `release` drops these. From
then on the master is the weight that trains, unless it has 16 bits or is quantized. One bit a weight, `kept`, is left.
It is no state of the optimizer, which might take it for one of its own; the optimizer's `state_dict` has it, so that
DeepSpeed saves it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparseforge_ds.checkpoint.zero_partitions import KEPT
from sparseforge_ds.mask.kernels.bits import octets, pack, unpack
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.codes import stored_as, values_of
from sparseforge_ds.mask.kernels.publication import masked_gradient
from sparseforge_ds.zero.shard import Shard, ShardLayout


class ShardState:
    """Our tensors of every master partition that holds prunable weights. Padding is 0."""

    def __init__(
        self,
        layout: ShardLayout,
        shards: dict[str, Shard],
        mask_dtype: torch.dtype,
        extra_keys: tuple[str, ...],
        is_quantized: bool = False,
    ) -> None:
        """Begin with all weights kept; `attach` lets the engine's inner optimizer save and load this.

        Args:
            layout: shard map of the engine.
            shards: shards of the prunable weights, by name.
            mask_dtype: dtype in which masks are stored (`mask.kernels.codes`).
            extra_keys: names of further states beside `dense` and `mask`; they are fp32 and begin as 0.
            is_quantized: True if masters are quantized, so that W stays beside them.
        """
        self.layout = layout
        self.is_quantized = is_quantized
        self.mask_dtype = mask_dtype
        self.keys = ("dense", "mask", *extra_keys)
        """Names of our tensors in the optimizer's state, while masks move."""
        self.frozen = False
        """True once masks move no more; pruned elements of W then stand still until `release`."""
        self.released = False
        """True once masks are frozen and only `kept` is left of our tensors."""
        self.kept: dict[int, Tensor] = {}
        """Packed bits of the top N of the mask in every group, 8 weights a byte, by master partition."""
        # Several weights share one flat partition, and the optimizer keeps state by partition.
        self.shards_in = {index: layout.shards_in[index] for index in sorted({s.flat for s in shards.values()})}
        """Shards in each master partition that holds prunable weights, by its index."""
        self._waiting: dict[int, dict[str, Tensor]] = {}
        """Our tensors by partition and name, until the optimizer's first step."""

    def attach(self) -> None:
        """Attach to the saving and loading of the engine's inner optimizer, for as long as it lives."""
        self.layout.inner.register_state_dict_post_hook(self._add_kept)
        self.layout.inner.register_load_state_dict_pre_hook(self._refuse_load)

    # -- while masks move ---------------------------------------------------------------------------------------------

    def partition(self, index: int) -> dict[str, Tensor]:
        """Return the optimizer state of one master partition, or our tensors alone before its first step.

        Look it up at every use: a checkpoint load replaces the tensors. At first W is the master, and nothing is
        masked.
        """
        state: dict[str, Tensor] = self.layout.inner.state.get(self.layout.flats[index], {})
        if "dense" in state or (self.released and index not in self._waiting):
            return state
        if index not in self._waiting:
            self._waiting[index] = self._initial(index)
        return self._waiting[index]

    def _initial(self, index: int) -> dict[str, Tensor]:
        """Return W as the master is, masks of 1 (0 in the padding), and zeros for all else."""
        flat = self.layout.flats[index].detach()
        state = {"dense": flat.to(torch.float32, copy=True)}
        state["mask"] = torch.zeros(flat.shape, dtype=self.mask_dtype, device=flat.device)
        stored_one = stored_as(torch.ones(()), self.mask_dtype).item()
        for shard in self.shards_in[index]:
            shard.slice_of_flat(state["mask"]).fill_(stored_one)
        return state | {key: torch.zeros_like(state["dense"]) for key in self.keys if key not in state}

    def reset(self) -> None:
        """Forget all masks: W is the present master, and nothing is masked."""
        self._waiting.clear()
        self.kept.clear()
        self.layout.forget_masks()
        self.frozen = self.released = False

    def adopt_into_optimizer_state(self, index: int) -> None:
        """Move waiting tensors of a partition into the optimizer's state, after its first step of it."""
        if waiting := self._waiting.pop(index, None):
            self.layout.inner.state[self.layout.flats[index]].update(waiting)

    @property
    def has_waiting_state(self) -> bool:
        """True while some of our tensors wait for the optimizer's first step; no checkpoint holds them."""
        return bool(self._waiting)

    def _moments(self, index: int) -> dict[str, Tensor]:
        """Return the optimizer's own states that have one value for each element of a partition."""
        flat = self.layout.flats[index]
        state = self.layout.inner.state.get(flat, {})
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor) and key not in self.keys}
        return {key: value for key, value in tensors.items() if value.numel() == flat.numel()}

    def require_numeric_states(self, index: int) -> None:
        """Reject optimizer state that is neither one float per element nor a scalar: it could not be re-sharded.

        Raises:
            ValueError: some state of the partition has another shape, or holds codes of fewer than 16 bits.
        """
        flat = self.layout.flats[index]
        for key, value in self.layout.inner.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.numel() not in (1, flat.numel()):
                raise ValueError(
                    f"optimizer {type(self.layout.inner).__name__} keeps {key} of shape {tuple(value.shape)} for "
                    f"weights of shape {tuple(flat.shape)}, which cannot be cut into shards; use an optimizer "
                    "with one number per weight, like AdamW"
                )
        for key, value in self._moments(index).items():
            if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"optimizer {type(self.layout.inner).__name__} keeps {key} in {value.dtype}, which cannot be "
                    "masked or resumed; use one with states of 16 or 32 bits, like AdamW"
                )

    def state_view(self, shard: Shard, key: str) -> Tensor:
        """Return a (numel of the shard,) view of one of our states, as it is stored."""
        return shard.slice_of_flat(self.partition(shard.flat)[key])

    def separate_dense(self, index: int) -> Tensor | None:
        """Return W if it is kept beside the master: while masks move, or if `keeps_dense`; else None."""
        return self.partition(index).get("dense")

    def keeps_dense(self, index: int) -> bool:
        """Return True if W stays beside the master once masks are frozen: masters have 16 bits, or are quantized."""
        return self.is_quantized or self.layout.flats[index].dtype != torch.float32

    def weights_being_trained(self, index: int) -> Tensor:
        """Return the tensor of a partition that the optimizer trains: W, or the master if there is no separate W."""
        dense = self.separate_dense(index)
        return self.layout.flats[index].data if dense is None else dense

    def dense(self, shard: Shard) -> Tensor:
        """Return a (numel of the shard,) view of W."""
        return shard.slice_of_flat(self.weights_being_trained(shard.flat))

    def mask(self, shard: Shard) -> Tensor:
        """Return the (numel,) fp32 mask of a shard or of a chunk of one. Do not write to it."""
        if self.released:
            return self.read_kept(shard).float()
        return values_of(self.state_view(shard, "mask"))

    def write_mask(self, shard: Shard, mask: Tensor) -> None:
        """Store a (numel,) mask with values in [0, 1] for a shard or a chunk of one."""
        self.state_view(shard, "mask").copy_(stored_as(mask, self.mask_dtype))

    def read_kept(self, shard: Shard) -> Tensor:
        """Return the (numel,) bool `kept` of a shard or a chunk of one."""
        packed, bit_range = self._packed_range(shard)
        return unpack(packed, bit_range.stop)[bit_range]

    def write_kept(self, shard: Shard, kept: Tensor) -> None:
        """Store the (numel,) bool `kept` of a shard or a chunk of one."""
        packed, bit_range = self._packed_range(shard)
        # The bytes at both ends may hold bits of other shards.
        bits = unpack(packed, 8 * len(packed))
        bits[bit_range] = kept
        packed.copy_(pack(bits))

    def own_packed_kept(self, shard: Shard) -> Tensor | None:
        """Return a view of the packed `kept` of a shard or a chunk of one; None if it shares a byte with others."""
        packed, bit_range = self._packed_range(shard)
        return None if bit_range.start or bit_range.stop % 8 else packed

    def _packed_range(self, shard: Shard) -> tuple[Tensor, slice]:
        """Return the bytes of `kept` that hold bits of a shard or a chunk of one, and the range of these bits."""
        first_bit = shard.offset % 8
        packed = self.packed_kept(shard.flat)[octets(slice(shard.offset, shard.offset + shard.numel))]
        return packed, slice(first_bit, first_bit + shard.numel)

    def packed_kept(self, index: int) -> Tensor:
        """Return the packed `kept` of a partition, made with all bits 0 at its first use."""
        if index not in self.kept:
            flat = self.layout.flats[index]
            self.kept[index] = torch.zeros(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        return self.kept[index]

    # -- the freeze ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self) -> None:
        """Drop pruned elements of W, masks and curvature; `kept` and the moments of kept weights are left.

        From here on the optimizer trains the masters. If `keeps_dense`, it trains W beside them, in fp32, with zeros
        where it is pruned. Masks must be projected: 0 or 1.
        """
        for index in self.shards_in:
            flat = self.layout.flats[index]
            state = self.partition(index)
            dense = state["dense"]
            mask = state["mask"].view(-1)
            # The master becomes W with zeros where the mask is 0.
            for chunk, bits in self._chunks(index):
                kept = mask[chunk] != 0
                bits.copy_(pack(kept))
                flat.data.view(-1)[chunk] = dense.view(-1)[chunk].masked_fill_(~kept, 0.0)
            gone = [key for key in self.keys if key != "dense" or not self.keeps_dense(index)]
            for key in gone:
                del state[key]
            self.layout.forget_states(index, gone)
            # Moments of pruned weights would move them at the next step.
            for moment in self._moments(index).values():
                masked_gradient(moment.view(-1), self.packed_kept(index))
        self._waiting = {index: state for index, state in self._waiting.items() if state}
        self.released = True

    def _chunks(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of a partition's elements, each a multiple of 8, with their bytes of `kept`."""
        bits = self.packed_kept(index)
        for chunk in chunks(self.layout.flats[index].data.view(-1)):
            yield chunk, bits[octets(chunk)]

    def kept_chunks(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield chunks of a partition's elements, each with its bool `kept`."""
        for chunk, bits in self._chunks(index):
            yield chunk, unpack(bits, chunk.stop - chunk.start)

    def zero_pruned(self, index: int, values: Tensor, offset: int = 0) -> None:
        """Zero values in place where a frozen mask prunes.

        Args:
            index: master partition.
            values: laid out like the partition, or like a part of it.
            offset: first element of that part in the partition.
        """
        values = values.view(-1)
        # Before the release the mask decides: some methods do not keep `kept` up to date.
        if not self.released:
            mask = self.partition(index)["mask"].view(-1)[offset : offset + len(values)]
            for chunk in chunks(mask):
                values[chunk].masked_fill_(values_of(mask[chunk]) == 0, 0.0)
            return
        bits = self.packed_kept(index)
        # Up to the next byte of `kept` single bits are taken.
        if first_bit := offset % 8:
            head = values[: 8 - first_bit]
            kept = unpack(bits[offset // 8 : offset // 8 + 1], 8)[first_bit : first_bit + len(head)]
            head.masked_fill_(~kept, 0.0)
            values = values[8 - first_bit :]
            offset += 8 - first_bit
        masked_gradient(values, bits[octets(slice(offset, offset + len(values)))])

    # -- saving and loading -------------------------------------------------------------------------------------------

    def state_dtype(self, index: int, key: str) -> torch.dtype:
        """Return the dtype of a per-element state: that of masks, else of the tensor that the optimizer steps."""
        if index in self.shards_in and key == "mask":
            return self.mask_dtype
        if index in self.shards_in or getattr(self.layout.inner, "fp32_optimizer_states", False):
            return torch.float32
        return self.layout.flats[index].dtype

    def _add_kept(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the packed `kept` to a state dict of the optimizer, once it is all that is left of masks."""
        if not self.released:
            return
        states = state_dict["state"]
        # A state dict numbers partitions through all param groups.
        for number, flat in enumerate(flat for group in optimizer.param_groups for flat in group["params"]):
            index = self.layout.index_of[id(flat)]
            if index in self.shards_in:
                # The dict of a partition is the optimizer's own.
                states[number] = {**states.get(number, {}), KEPT: self.packed_kept(index)}

    def load(
        self, states: list[dict[str, Any]], settings: list[dict[str, Any]], is_frozen: bool, has_begun: bool
    ) -> None:
        """Replace the whole state of the inner optimizer, ours included.

        Args:
            states: state of each master partition, with tensors laid out like it; an empty dict for none. Tensors
                of ours are removed from these dicts.
            settings: new values of each param group's hyperparameters.
            is_frozen: True if `kept` is all that is left of masks.
            has_begun: False before the first step, for which W waits outside of the optimizer.
        """
        self.reset()
        self.released = is_frozen
        for index, state in enumerate(states):
            if KEPT in state:
                self.kept[index] = state.pop(KEPT)
            waiting = {} if has_begun else {key: state.pop(key) for key in self.keys if key in state}
            if waiting:
                self._waiting[index] = waiting
        self.layout.load_optimizer(states, settings)

    @staticmethod
    def _refuse_load(optimizer: Optimizer, _state_dict: dict[str, Any]) -> None:
        """Refuse any load but `load`: weights, step and phase would stay as before. Raises ValueError."""
        raise ValueError(
            f"{type(optimizer).__name__}.load_state_dict loads a part of a run with masks, without its weights and its "
            "step; use engine.load_checkpoint or forge.restore"
        )
