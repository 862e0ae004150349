"""What is kept beside prunable weights: W, masks and curvature as optimizer state, until the freeze releases them.

While masks move, W, the mask and, for some scores, a curvature lie in the inner optimizer's state beside `exp_avg`, one
 element per element of DeepSpeed's flat master partition: DeepSpeed saves, shards and offloads them. Adam creates
its moments when a parameter's state is empty, so ours wait outside until its first step is over.

Once frozen, W beyond the mask is dead, and one bit a weight is all that is kept, in memory: the master is the weight
that trains. A checkpoint then holds nothing of ours. A pruned weight is +0.0 in it and a kept one never is: one that
happens to be 0 is written as -0.0 (`mark_kept_zeros`), so that the mask can be read off the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparseforge_ds.mask.effective_mask import is_kept
from sparseforge_ds.mask.kernels.bits import pack, unpack
from sparseforge_ds.mask.kernels.chunks import chunks
from sparseforge_ds.mask.kernels.codes import stored_as, values_of
from sparseforge_ds.mask.kernels.publication import masked_gradient
from sparseforge_ds.zero.shard import Shard, ShardLayout


class ShardState:
    """Our tensors of every master partition that holds prunable weights. Padding is 0."""

    def __init__(
        self, layout: ShardLayout, shards: dict[str, Shard], mask_dtype: torch.dtype, more: tuple[str, ...]
    ) -> None:
        """Follow the state of the engine's inner optimizer.

        Args:
            layout: of the engine.
            shards: of the prunable weights, by name.
            mask_dtype: how masks are stored (`mask.kernels.codes`).
            more: states to keep beside `dense` and `mask`, fp32, 0 at first.
        """
        self.layout = layout
        self.mask_dtype = mask_dtype
        self.keys = ("dense", "mask", *more)
        """Names of our tensors in the optimizer's state, while masks move."""
        self.frozen = False
        """Whether masks move no more; W beyond them stands still until it is released, for a branch to start from."""
        self.released = False
        """Whether masks are frozen and only `kept` is left."""
        self.kept: dict[int, Tensor] = {}
        """The top N of the mask in every group, 8 weights a byte, by master partition; what can be recomputed."""
        self._by_flat: dict[int, list[Shard]] = {}
        for shard in shards.values():
            self._by_flat.setdefault(shard.flat, []).append(shard)
        self._waiting: dict[int, dict[str, Tensor]] = {}
        self._loading: dict[int, dict[str, Tensor]] = {}
        layout.inner.register_load_state_dict_pre_hook(self._before_load)
        layout.inner.register_load_state_dict_post_hook(self._after_load)

    # -- while masks move ---------------------------------------------------------------------------------------------

    @property
    def flats(self) -> list[int]:
        """Indices of the master partitions that hold prunable weights."""
        return sorted(self._by_flat)

    def partition(self, index: int) -> dict[str, Tensor]:
        """The tensors of one master partition. Look them up at every use: a checkpoint load replaces them.

        Before the first step they begin as what the master is then, with nothing masked.
        """
        held: dict[str, Tensor] = self.layout.inner.state.get(self.layout.flats[index], {})
        if "dense" in held or (self.released and index not in self._waiting):
            return held
        if index not in self._waiting:
            self._waiting[index] = self._initial(index)
        return self._waiting[index]

    def _initial(self, index: int) -> dict[str, Tensor]:
        flat = self.layout.flats[index].detach()
        state = {"dense": flat.to(torch.float32, copy=True)}
        state["mask"] = torch.zeros(flat.shape, dtype=self.mask_dtype, device=flat.device)
        one = stored_as(torch.ones(()), self.mask_dtype).item()
        for shard in self._by_flat[index]:
            shard.slice_of_flat(state["mask"]).fill_(one)
        return state | {key: torch.zeros_like(state["dense"]) for key in self.keys if key not in state}

    def reset(self) -> None:
        """Begin anew from the present masters: nothing is masked."""
        self._waiting.clear()
        self.kept.clear()
        self.frozen = self.released = False

    def adopt_into_optimizer_state(self, index: int) -> None:
        """Make what waits part of the optimizer's state, after its first step of a partition."""
        if waiting := self._waiting.pop(index, None):
            self.layout.inner.state[self.layout.flats[index]].update(waiting)

    @property
    def has_waiting_state(self) -> bool:
        """True if W or a state beside it waits for the optimizer's first step, and is in no checkpoint."""
        return bool(self._waiting)

    def _of_optimizer(self, index: int) -> dict[str, Tensor]:
        """The optimizer's own states with one number, or one code, for every element of a partition."""
        flat = self.layout.flats[index]
        held = self.layout.inner.state.get(flat, {})
        found = {key: value for key, value in held.items() if isinstance(value, Tensor) and key not in self.keys}
        return {key: value for key, value in found.items() if value.numel() == flat.numel()}

    def require_numeric_states(self, index: int) -> None:
        """After the optimizer's first step of a partition: raise where it keeps anything but a number per element, of
        which 0 is the number 0, or one for all, since a checkpoint cannot be cut into elements there."""
        flat = self.layout.flats[index]
        for key, value in self.layout.inner.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.numel() not in (1, flat.numel()):
                raise ValueError(
                    f"optimizer {type(self.layout.inner).__name__} keeps {key} of shape {tuple(value.shape)} for "
                    f"weights of shape {tuple(flat.shape)}, which no checkpoint of ours can hold; use one with a "
                    "number per weight, like AdamW"
                )
        for key, value in self._of_optimizer(index).items():
            if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(
                    f"optimizer {type(self.layout.inner).__name__} keeps {key} in {value.dtype}, which cannot be "
                    "masked or resumed; use one with states of 16 or 32 bits, like AdamW"
                )

    def state_view(self, shard: Shard, key: str) -> Tensor:
        """This rank's elements of one weight in a state, as it is stored, as a view."""
        return shard.slice_of_flat(self.partition(shard.flat)[key])

    def separate_dense(self, index: int) -> Tensor | None:
        """W where it is kept beside the master: while masks move, and beside masters of 16 bits always."""
        return self.partition(index).get("dense")

    def weights_being_trained(self, index: int) -> Tensor:
        """What the optimizer trains of a partition: W, which after the freeze is the master itself."""
        dense = self.separate_dense(index)
        return self.layout.flats[index].data if dense is None else dense

    def dense(self, shard: Shard) -> Tensor:
        """This rank's elements of W, as a view."""
        return shard.slice_of_flat(self.weights_being_trained(shard.flat))

    def mask(self, shard: Shard) -> Tensor:
        """(numel of the shard,) fp32 mask of the shard or of a chunk of one, to be read only."""
        if self.released:
            return self.read_kept(shard).float()
        return values_of(self.state_view(shard, "mask"))

    def write_mask(self, shard: Shard, mask: Tensor) -> None:
        """Store (numel of the shard,) values in [0, 1]."""
        self.state_view(shard, "mask").copy_(stored_as(mask, self.mask_dtype))

    def read_kept(self, shard: Shard) -> Tensor:
        """(numel of the shard,) bool of `kept`."""
        touched, inside = self._bytes(shard)
        return unpack(touched, inside.stop)[inside]

    def write_kept(self, shard: Shard, kept: Tensor) -> None:
        """Store (numel of the shard,) bool in `kept`."""
        touched, inside = self._bytes(shard)
        whole = unpack(touched, 8 * len(touched))  # the bytes at both ends may be shared with other shards
        whole[inside] = kept
        touched.copy_(pack(whole))

    def own_packed_kept(self, shard: Shard) -> Tensor | None:
        """View of the packed `kept` of a shard or a chunk of one, None where it shares a byte with others."""
        touched, inside = self._bytes(shard)
        return None if inside.start or inside.stop % 8 else touched

    def _bytes(self, shard: Shard) -> tuple[Tensor, slice]:
        """The bytes of `kept` that a shard or a chunk of one has bits in, and which bits of theirs."""
        head, stop = shard.offset % 8, shard.offset + shard.numel
        return self.packed_kept(shard.flat)[shard.offset // 8 : -(-stop // 8)], slice(head, head + shard.numel)

    def packed_kept(self, index: int) -> Tensor:
        """Packed `kept` of a partition, which begins with nothing."""
        if index not in self.kept:
            flat = self.layout.flats[index]
            self.kept[index] = torch.zeros(-(-flat.numel() // 8), dtype=torch.uint8, device=flat.device)
        return self.kept[index]

    # -- the freeze ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def release(self) -> None:
        """Drop W beyond the mask, masks and curvature; what is left is `kept`, and moments of kept weights.

        Masters become what trains from here on. Beside masters of 16 bits W stays, in fp32, with zeros where it is
        pruned. Masks must be projected: 0 or 1.
        """
        for index in self.flats:
            flat, held = self.layout.flats[index], self.partition(index)
            dense, mask = held["dense"], held["mask"].view(-1)
            for chunk, bits in self._chunks(index):
                kept = mask[chunk] != 0
                bits.copy_(pack(kept))
                flat.data.view(-1)[chunk] = dense.view(-1)[chunk].masked_fill_(~kept, 0.0)
            for key in self.keys:
                if key != "dense" or flat.dtype == dense.dtype:
                    del held[key]
            for value in self._of_optimizer(index).values():
                masked_gradient(value.view(-1), self.packed_kept(index))
        self._waiting = {index: held for index, held in self._waiting.items() if held}
        self.released = True
        self.mark_kept_zeros()

    def _chunks(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of a partition's elements, of a multiple of 8, and the bytes of `kept` of each."""
        bits = self.packed_kept(index)
        for chunk in chunks(self.layout.flats[index].data.view(-1)):
            yield chunk, bits[chunk.start // 8 : -(-chunk.stop // 8)]

    def kept_chunks(self, index: int) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of a partition's elements, and the bool `kept` of each."""
        for chunk, bits in self._chunks(index):
            yield chunk, unpack(bits, chunk.stop - chunk.start)

    def zero_pruned(self, index: int, values: Tensor, offset: int = 0) -> None:
        """Zero what is laid out like a partition, or like its elements from `offset` on, where a frozen mask prunes."""
        values = values.view(-1)
        if not self.released:  # `kept` is what a mask would keep, and some methods do not need to know
            mask = self.partition(index)["mask"].view(-1)[offset : offset + len(values)]
            for chunk in chunks(mask):
                values[chunk].masked_fill_(values_of(mask[chunk]) == 0, 0.0)
            return
        bits = self.packed_kept(index)
        if within := offset % 8:  # up to the next whole byte of `kept`
            head = values[: 8 - within]
            head.masked_fill_(~unpack(bits[offset // 8 : offset // 8 + 1], 8)[within : within + len(head)], 0.0)
            values = values[8 - within :]
            offset += 8 - within
        masked_gradient(values, bits[offset // 8 : -(-(offset + len(values)) // 8)])

    @torch.no_grad()
    def mark_kept_zeros(self) -> Tensor:
        """Write kept weights that are 0 as -0.0, so that checkpoints and gradients can tell them from pruned ones.

        Returns:
            () int64 on the device of collectives: weights that were written.
        """
        written = torch.zeros((), dtype=torch.int64, device=self.layout.device)
        for index in self.flats:
            master = self.layout.flats[index].data
            dense = self.separate_dense(index)
            for weights in (master,) if dense is None else (master, dense):
                flat = weights.view(-1)
                for chunk, kept in self.kept_chunks(index):
                    zero = kept & (flat[chunk] == 0) & ~flat[chunk].signbit()
                    flat[chunk] = torch.where(zero, -0.0, flat[chunk])
                    written += zero.sum().to(written.device)
        return written

    def read_kept_from_weights(self) -> None:
        """After the states of a frozen run were loaded: `kept` is where weights are not +0.0."""
        self.released = True
        self._waiting.clear()
        self.kept.clear()
        for index in self.flats:
            weights = self.weights_being_trained(index).view(-1)
            for chunk, bits in self._chunks(index):
                bits.copy_(pack(is_kept(weights[chunk])))

    # -- loading ------------------------------------------------------------------------------------------------------

    def state_dtype(self, index: int, key: str) -> torch.dtype:
        """The dtype of a flat's per-element optimizer state: that of what the optimizer steps on, or of masks."""
        if index in self._by_flat and key == "mask":
            return self.mask_dtype
        if index in self._by_flat or getattr(self.layout.inner, "fp32_optimizer_states", False):
            return torch.float32
        return self.layout.flats[index].dtype

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Take the tensors aside: torch would cast ours, and moments of fp32 weights, to the master's dtype."""
        self._loading = {
            key: {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for key, state in state_dict["state"].items()
            if isinstance(state, dict)
        }

    def _after_load(self, optimizer: Optimizer) -> None:
        parameters = (flat for group in optimizer.param_groups for flat in group["params"])
        for key, flat in enumerate(parameters):
            index = self.layout.index_of[id(flat)]
            loaded = self._loading.get(key, {})
            ours = set(loaded) & set(self.keys) if index in self._by_flat else set()
            if "mask" in ours:  # without one, masks are frozen, or it is no state of ours: the owner knows
                if missing := set(self.keys) - ours:
                    raise ValueError(
                        f"the checkpoint holds no {', '.join(sorted(missing))} for master partition {index}: it was "
                        "not written by a sparseforge run with this importance; start a fresh run with --model instead"
                    )
                if loaded["mask"].dtype != self.mask_dtype:
                    raise ValueError(
                        f"the checkpoint's masks are {loaded['mask'].dtype}, this method's {self.mask_dtype}: "
                        "use forge.restore, or resume with the method of the saved run"
                    )
            for name in ours:
                if loaded[name].numel() != flat.numel():
                    raise ValueError(
                        f"the checkpoint's {name} of master partition {index} has {loaded[name].numel()} elements, "
                        f"this engine {flat.numel()}: use forge.restore, which fits any world size and ZeRO stage"
                    )
                optimizer.state[flat][name] = loaded[name].to(device=flat.device)
            if index in self._by_flat:
                self._waiting.pop(index, None)
            if index in self._by_flat or self.state_dtype(index, "") != flat.dtype:
                for name in set(loaded) - ours:
                    if optimizer.state[flat][name].dtype != loaded[name].dtype:
                        optimizer.state[flat][name] = loaded[name].to(device=flat.device)
        self._loading = {}
