"""Masks and 2:4 weights in few bits.

Two forms:

- `MaskCode`: only the mask. A group of N:M is one of C(M, N) patterns; the pattern's index in the combinatorial number
  system (C(c1, 1) + C(c2, 2) + ..., c1 < c2 < ... being the kept members) is a digit, and the digits of a few
  groups make a word of whole bits. 2:4 has 6 patterns and 6^5 < 2^13: 13 bits for 5 groups, 0.65 bits a weight, where
  log2(6) / 4 = 0.646 is the least possible. A mask with too many patterns for a word (block16) is one bit a weight.
- `pack24` and `unpack24`: kept values and their 2-bit positions, for storage of 2:4 weights.

Bits fill bytes from the lowest. Shape suffixes: G groups, M members of a group, W words, B bits of a word, D digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

WORD_BITS = 62
"""A word is computed in int64."""

CHUNK = 1 << 17
"""Words converted at a time, which bounds the memory that this takes."""

_WASTE = 0.01
"""The shortest word that wastes less than this share is taken."""


@dataclass(frozen=True)
class MaskCode:
    """How masks with `kept` of `members` in every group become bytes."""

    members: int
    """M."""
    kept: int
    """N."""

    @property
    def patterns(self) -> int:
        """C(M, N): what a digit counts."""
        return math.comb(self.members, self.kept)

    @property
    def word(self) -> tuple[int, int]:
        """(groups in a word, bits of a word); (1, M) where a word is the mask itself, one bit a weight.

        The fewest groups that waste less than a hundredth of the bits, else those that waste least.
        """
        best = (1, self.members)
        needed = math.log2(self.patterns)
        for groups in range(1, WORD_BITS + 1):
            bits = (self.patterns**groups - 1).bit_length()
            if bits > WORD_BITS:
                break
            if bits * best[0] < best[1] * groups:
                best = (groups, bits)
            if bits < groups * needed * (1 + _WASTE):
                break
        return best

    @property
    def by_index(self) -> bool:
        """Whether a word holds pattern indices; otherwise it holds the bits of the mask."""
        return self.word != (1, self.members)

    def nbytes(self, groups: int) -> int:
        """Bytes of the packed mask of `groups` groups."""
        per_word, bits = self.word
        return -(-(-(-groups // per_word) * bits) // 8)

    def pack(self, mask_GM: Tensor) -> Tensor:
        """(G, M) bool with `kept` True in every row -> uint8 of `nbytes(G)` bytes.

        Raises:
            ValueError: a row keeps another number.
        """
        per_word, bits = self.word
        chunks = [mask_GM.new_empty(0, dtype=torch.uint8)]
        for start in range(0, len(mask_GM), CHUNK * per_word):
            chunk_GM = mask_GM[start : start + CHUNK * per_word]
            wrong = int((chunk_GM.sum(1) != self.kept).sum())
            if wrong:
                raise ValueError(f"{wrong} groups of a mask do not keep {self.kept} of {self.members}")
            if not self.by_index:
                chunks.append(_bytes_of_bits(chunk_GM.reshape(-1)))
                continue
            digit_G = self._rank(chunk_GM)
            digit_G = torch.nn.functional.pad(digit_G, (0, -len(digit_G) % per_word))
            place_D = self.patterns ** torch.arange(per_word, device=mask_GM.device)
            word_W = (digit_G.view(-1, per_word) * place_D).sum(1)
            bit_WB = (word_W[:, None] >> torch.arange(bits, device=mask_GM.device)) & 1
            chunks.append(_bytes_of_bits(bit_WB.reshape(-1)))
        return torch.cat(chunks)

    def unpack(self, packed: Tensor, groups: int) -> Tensor:
        """Inverse of `pack`: uint8 bytes -> (groups, M) bool.

        Raises:
            ValueError: the bytes are not a mask of that many groups.
        """
        if packed.dtype != torch.uint8 or packed.ndim != 1 or len(packed) != self.nbytes(groups):
            raise ValueError(
                f"a mask of {groups} groups, {self.kept} of {self.members}, is {self.nbytes(groups)} bytes; "
                f"these are {tuple(packed.shape)} of {packed.dtype}"
            )
        per_word, bits = self.word
        rows = [packed.new_empty((0, self.members), dtype=torch.bool)]
        for start in range(0, groups, CHUNK * per_word):
            here = min(CHUNK * per_word, groups - start)
            words = -(-here // per_word)
            first = start // per_word * bits // 8  # a chunk is whole bytes
            chunk = packed[first : first - (-words * bits // 8)]
            bit = ((chunk[:, None] >> torch.arange(8, device=packed.device)) & 1).reshape(-1)
            if bit[words * bits :].any():
                raise ValueError("the bits behind a packed mask are not zero: it is damaged")
            bit_WB = bit[: words * bits].view(words, bits)
            if self.by_index:
                word_W = (bit_WB.long() << torch.arange(bits, device=packed.device)).sum(1)
                place_D = self.patterns ** torch.arange(per_word, device=packed.device)
                digit_G = ((word_W[:, None] // place_D) % self.patterns).reshape(-1)
                if bool((word_W >= self.patterns**per_word).any()) or bool(digit_G[here:].any()):
                    raise ValueError("a packed mask holds an index that no pattern has: it is damaged")
                rows.append(self._unrank(digit_G[:here]))
            else:
                rows.append(bit_WB.bool())
                if bool((bit_WB.sum(1) != self.kept).any()):
                    raise ValueError(f"a packed mask keeps another number than {self.kept}: it is damaged")
        return torch.cat(rows)

    def _rank(self, mask_GM: Tensor) -> Tensor:
        """Index of each row's pattern: the sum of C(c_j, j) over its kept members c_1 < c_2 < ... ."""
        choose = self._binomials(mask_GM.device)
        rank_G = torch.zeros(len(mask_GM), dtype=torch.long, device=mask_GM.device)
        seen_G = torch.zeros_like(rank_G)
        for member, kept_G in enumerate(mask_GM.unbind(1)):
            seen_G += kept_G
            rank_G += choose[member][seen_G] * kept_G
        return rank_G

    def _unrank(self, rank_G: Tensor) -> Tensor:
        """The pattern of an index, from the highest member down: c_j is the largest c with C(c, j) <= what is left."""
        choose = self._binomials(rank_G.device)
        left_G = torch.full_like(rank_G, self.kept)
        mask_GM = torch.empty((len(rank_G), self.members), dtype=torch.bool, device=rank_G.device)
        for member in reversed(range(self.members)):
            count_G = choose[member][left_G]
            kept_G = (rank_G >= count_G) & (left_G > 0)
            rank_G = rank_G - count_G * kept_G
            left_G -= kept_G.long()
            mask_GM[:, member] = kept_G
        return mask_GM

    def _binomials(self, device: torch.device) -> Tensor:
        """(M, N + 1): C(member, j). All are below the number of patterns, which fits a word."""
        rows = [[math.comb(member, j) for j in range(self.kept + 1)] for member in range(self.members)]
        return torch.tensor(rows, dtype=torch.long, device=device)


PACKED24 = "sparseforge_packed24"
"""What config.json calls the storage that `pack24` makes: its `quant_method`."""

PACKED24_FORMAT = 1
"""Version of that storage."""

POSITIONS = "_positions"
"""There, behind a weight's name: the tensor with its positions. The values have the name itself."""


def pack24(weight: Tensor, input_axis: int) -> tuple[Tensor, Tensor]:
    """Kept values and positions of a weight that is 2:4 along `input_axis`.

    A group with fewer than two elements that are not +0.0 is filled up with +0.0 at its first free positions. -0.0
    counts as an element to keep: unpacking gives back the bits.

    Args:
        weight: (..., out, in) at `input_axis` -1, (..., in, out) at -2; in is a multiple of 4.

    Returns:
        (values, positions): values with in/2 where `weight` has in, in its dtype; positions uint8 with ceil(in/8)
        there. A group is four bits, the lower position in the lower two; its even group is in the lower half of a byte.

    Raises:
        ValueError: a group has more than two.
    """
    rows = weight.transpose(-1, input_axis)
    group = rows.reshape(*rows.shape[:-1], rows.shape[-1] // 4, 4)
    there = group.view(_INTEGER[group.element_size()]) != 0
    half = _HALVES.to(weight.device)[_nibble(there)]
    if bool((half == _FULL).any()):
        raise ValueError(f"{int((half == _FULL).sum())} groups of four have more than two non-zeros; not a 2:4 weight")
    position = torch.stack((half & 3, half >> 2), dim=-1).long()
    values = group.gather(-1, position).reshape(*rows.shape[:-1], rows.shape[-1] // 2)
    half = torch.nn.functional.pad(half, (0, half.shape[-1] % 2))
    positions = half[..., 0::2] | half[..., 1::2] << 4
    return values.transpose(-1, input_axis).contiguous(), positions.transpose(-1, input_axis).contiguous()


def unpack24(values: Tensor, positions: Tensor) -> Tensor:
    """Inverse of `pack24`; the input axis is the one on which the shapes differ.

    Raises:
        ValueError: the two do not belong together, or a group's positions are not two different ones in order.
    """
    input_axis = packed24_axis(tuple(values.shape), tuple(positions.shape))
    if positions.dtype != torch.uint8:
        raise ValueError(f"positions of a packed weight are uint8, these are {positions.dtype}")
    rows, byte = values.transpose(-1, input_axis), positions.transpose(-1, input_axis)
    groups = rows.shape[-1] // 2
    half = torch.stack((byte & 15, byte >> 4), dim=-1).reshape(*byte.shape[:-1], -1)
    position = torch.stack((half & 3, half >> 2), dim=-1)
    inside = position[..., :groups, :]
    if bool((inside[..., 0] >= inside[..., 1]).any()) or bool(half[..., groups:].any()):
        raise ValueError("positions of a packed weight are damaged: a group does not name two elements in order")
    group = torch.zeros((*rows.shape[:-1], groups, 4), dtype=values.dtype, device=values.device)
    group.scatter_(-1, inside.long(), rows.reshape(*rows.shape[:-1], groups, 2))
    return group.reshape(*rows.shape[:-1], groups * 4).transpose(-1, input_axis).contiguous()


def packed24_shapes(shape: tuple[int, ...], input_axis: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of (values, positions) of a weight of `shape`."""
    values, positions = list(shape), list(shape)
    values[input_axis] //= 2
    positions[input_axis] = -(-positions[input_axis] // 8)
    return tuple(values), tuple(positions)


def packed24_axis(values: tuple[int, ...], positions: tuple[int, ...]) -> int:
    """Input axis of a packed weight: in/2 and ceil(in/8) differ on it, whatever in is.

    Raises:
        ValueError: the shapes do not belong together.
    """
    for axis in (-1, -2):
        if len(values) >= 2 and values[axis] % 2 == 0 and values[axis] > 0:
            shape = [*values]
            shape[axis] *= 2
            if packed24_shapes(tuple(shape), axis) == (values, positions):
                return axis
    raise ValueError(f"values of shape {values} and positions of shape {positions} are no packed 2:4 weight")


_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _nibble(there: Tensor) -> Tensor:
    """(..., 4) bool -> (...) the number with these bits, lowest first, as an index."""
    bit = there.view(torch.uint8)
    return (bit[..., 0] | bit[..., 1] << 1 | bit[..., 2] << 2 | bit[..., 3] << 3).long()


def _half(there: int) -> int:
    """Four bits of positions for a group whose non-zeros are the set bits of `there`."""
    kept = [member for member in range(4) if there >> member & 1]
    if len(kept) > 2:
        return _FULL
    kept += [member for member in range(4) if member not in kept]
    low, high = sorted(kept[:2])
    return low | high << 2


_FULL = 255
_HALVES = torch.tensor([_half(there) for there in range(16)], dtype=torch.uint8)


def _bytes_of_bits(bit: Tensor) -> Tensor:
    """Bits, lowest first -> bytes, the last one filled up with zeros."""
    bit = torch.nn.functional.pad(bit.to(torch.uint8), (0, -len(bit) % 8))
    return (bit.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=bit.device)).sum(1, dtype=torch.uint8)
