"""Exchange of the missing members of groups that a shard boundary cuts; both ranks then decide the same group.

A *period* is the smallest number of consecutive flat elements that contain whole groups only. A shard that starts or
stops inside a period lacks a prefix or a suffix, its *halo*; the ranks that hold these elements send exactly them. The
plan is made once, from the shards of all ranks; an exchange is one all-to-all, and none at all if no group is cut.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.chunks import ALIGNMENT, CHUNK
from sparseforge_ds.zero.shard import Shard, ShardLayout

Halo = dict[str, tuple[Tensor, Tensor]]
"""(prefix, suffix) of the shards that lack elements, by weight name."""


@dataclass(frozen=True)
class Span:
    """Consecutive flat elements [start, stop) of one weight."""

    name: str
    start: int
    stop: int


class HaloExchange:
    """Exchange that completes the shards of this rank to whole groups."""

    def __init__(self, layout: ShardLayout, shards: dict[str, Shard], periods: dict[str, int]) -> None:
        """Plan the exchange. Collective.

        Args:
            layout: shard map of the engine.
            shards: shards of the prunable weights on this rank, by name, in the same order on every rank.
            periods: number of elements of a period, by weight name.

        Raises:
            RuntimeError: the ranks' shards do not tile some weight exactly.
        """
        # What each shard lacks at its ends, and the chunks that it is worked on in.
        self.layout = layout
        self.shards = shards
        self.prefix = {name: shard.start % periods[name] if shard.numel else 0 for name, shard in shards.items()}
        """Number of elements that each shard lacks before its first, by weight name."""
        self.suffix = {name: -shard.stop % periods[name] if shard.numel else 0 for name, shard in shards.items()}
        """Number of elements that each shard lacks after its last, by weight name."""
        self.chunks = {name: cut_into_chunks(shard, periods[name]) for name, shard in shards.items()}
        """Consecutive chunks of each shard, so that the memory of a computation has a bound; none of an empty shard."""
        # Who sends what to whom.
        self.ranges = self._all_ranges()
        """(start, stop) of every weight on every rank."""
        self.send: list[list[Span]] = [[] for _ in range(layout.world_size)]
        """Spans that this rank sends to each rank."""
        self.receive: list[list[Span]] = [[] for _ in range(layout.world_size)]
        """Spans that this rank receives from each rank."""
        if not layout.replicated:
            for name in shards:
                self._plan(name, periods[name])
        # Without a cut group on any rank, nothing is ever exchanged.
        cut = torch.tensor(
            [any(self.prefix.values()) or any(self.suffix.values())], device=layout.device, dtype=torch.int
        )
        self.any_cut = bool(layout.all_reduce(cut).item())
        """True if a group is cut on some rank; the same on every rank."""

    def _all_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """Gather (start, stop) of every weight on every rank, and check that they tile the weight."""
        own_ranges = [(shard.start, shard.stop) for shard in self.shards.values()]
        ranges_of_rank: list[list[tuple[int, int]]] = self.layout.all_gather_object(own_ranges)
        ranges = {name: [of_rank[i] for of_rank in ranges_of_rank] for i, name in enumerate(self.shards)}
        for name, shard in self.shards.items():
            numel = math.prod(shard.shape)
            if self.layout.replicated:
                tiled = all(bounds == (0, numel) for bounds in ranges[name])
            else:
                filled = sorted((start, stop) for start, stop in ranges[name] if start < stop)
                starts = [start for start, _ in filled]
                stops = [stop for _, stop in filled]
                tiled = starts == [0, *stops[:-1]] and stops[-1:] == [numel]
            if not tiled:
                raise RuntimeError(f"{name}: the shards of the ranks do not tile its {numel} elements: {ranges[name]}")
        return ranges

    def _plan(self, name: str, period: int) -> None:
        """Add the spans of one weight that this rank sends and receives."""
        own_rank = self.layout.rank
        # Shards tile the weight, so that the first holder of an element is found by bisection.
        filled = sorted((start, stop, rank) for rank, (start, stop) in enumerate(self.ranges[name]) if start < stop)
        starts = [start for start, _, _ in filled]
        for start, stop, reader in filled:
            prefix = (start - start % period, start)
            suffix = (stop, stop - stop % -period)
            for low, high in (prefix, suffix):
                if low == high:
                    continue
                # Each holder sends its part of the missing elements.
                for number in range(bisect.bisect_right(starts, low) - 1, len(filled)):
                    first, last, holder = filled[number]
                    if first >= high:
                        break
                    span = Span(name, max(low, first), min(high, last))
                    if reader == own_rank:
                        self.receive[holder].append(span)
                    if holder == own_rank:
                        self.send[reader].append(span)

    def exchange(self, read: Callable[[Shard], Tensor], names: Collection[str] | None = None) -> Halo:
        """Fetch the missing elements of this rank's shards. Collective if a group is cut on some rank, else free.

        Args:
            read: function that returns the (numel,) fp32 values of a part of a shard of this rank.
            names: weights to exchange, the same on every rank; None for all.

        Returns:
            (prefix, suffix) of the shards that lack elements, by weight name, on the device of the shards.
        """
        if not self.any_cut:
            return {}
        device = self.layout.device
        home = self.layout.flats[0].device
        names = self.shards.keys() if names is None else names
        send = [[span for span in spans if span.name in names] for spans in self.send]
        receive = [[span for span in spans if span.name in names] for spans in self.receive]
        # With optimizer offload the shards are on the host: one copy to the device and one back.
        outgoing = [read(self.shards[span.name].part(span.start, span.stop)) for spans in send for span in spans]
        buffer = torch.cat(outgoing).to(device) if outgoing else torch.empty(0, device=device)
        send_sizes = [sum(span.stop - span.start for span in spans) for spans in send]
        receive_sizes = [sum(span.stop - span.start for span in spans) for spans in receive]
        incoming = torch.empty(sum(receive_sizes), device=device)
        self.layout.all_to_all(incoming, buffer, receive_sizes, send_sizes)
        incoming = incoming.to(home)
        # Each received span goes to its place in a prefix or a suffix.
        halo = {
            name: (torch.empty(self.prefix[name], device=home), torch.empty(self.suffix[name], device=home))
            for name in names
            if self.prefix[name] or self.suffix[name]
        }
        position = 0
        for span in (span for spans in receive for span in spans):
            length = span.stop - span.start
            shard = self.shards[span.name]
            prefix, suffix = halo[span.name]
            is_prefix = span.start < shard.start
            target = prefix if is_prefix else suffix
            first = shard.start - prefix.numel() if is_prefix else shard.stop
            target[span.start - first : span.stop - first] = incoming[position : position + length]
            position += length
        return halo

    def with_halo(self, shard: Shard, values: Tensor, halo: Halo) -> Tensor:
        """Return (prefix + numel + suffix,) values of whole groups: (numel,) of a shard or a chunk, and its halo.

        Only a chunk at an end of its shard has a halo. Without one, the result is `values` itself.
        """
        before, after = self._missing(shard)
        if shard.name not in halo or not (before or after):
            return values
        prefix, suffix = halo[shard.name]
        return torch.cat([prefix[:before], values, suffix[:after]])

    def span_with_halo(self, shard: Shard) -> Span:
        """Return the span of the elements that `with_halo` returns for a shard or a chunk of one."""
        before, after = self._missing(shard)
        return Span(shard.name, shard.start - before, shard.stop + after)

    def without_halo(self, shard: Shard, values: Tensor) -> Tensor:
        """Return a (numel,) view of a shard's or chunk's own elements in a tensor laid out as `with_halo` returns."""
        before, _ = self._missing(shard)
        return values[before : before + shard.numel]

    def _missing(self, shard: Shard) -> tuple[int, int]:
        """Return the number of halo elements before and after a shard or a chunk of one."""
        full_shard = self.shards[shard.name]
        before = self.prefix[shard.name] if shard.start == full_shard.start else 0
        after = self.suffix[shard.name] if shard.stop == full_shard.stop else 0
        return before, after


def cut_into_chunks(shard: Shard, period: int) -> list[Shard]:
    """Return consecutive chunks of a shard, of about `CHUNK` elements each, cut between periods."""
    unit = period * ALIGNMENT // math.gcd(period, ALIGNMENT)
    size = max(unit, CHUNK - CHUNK % unit)
    bounds = [shard.start, *range(shard.start - shard.start % period + size, shard.stop, size), shard.stop]
    return [shard.part(start, stop) for start, stop in zip(bounds[:-1], bounds[1:], strict=True) if stop > start]
