"""Groups that a shard boundary cuts: only the missing members travel, both sides then decide the same group.

A *span* is the shortest run of flat elements that contains whole groups. A shard that starts or stops inside a span
lacks a prefix or a suffix; the ranks that hold these elements send exactly them. The plan is made once, from the
geometry of all ranks; an exchange is one all-to-all, and none at all when no group is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparseforge_ds.mask.kernels.chunks import ALIGNMENT, CHUNK
from sparseforge_ds.zero.shard import Shard, ShardLayout

Halo = dict[str, tuple[Tensor, Tensor]]
"""(prefix, suffix) that a shard lacks, by weight name."""


@dataclass(frozen=True)
class Span:
    """A run of one weight's flat elements that one rank holds and another needs."""

    name: str
    start: int
    stop: int


class HaloExchange:
    """Completes shards to whole groups."""

    def __init__(self, layout: ShardLayout, shards: dict[str, Shard], spans: dict[str, int]) -> None:
        """Plan the exchange. Collective.

        Args:
            layout: of the engine.
            shards: of the prunable weights on this rank, by name, in the same order on every rank.
            spans: flat elements that contain whole groups only, by weight name.

        Raises:
            RuntimeError: the ranks' shards do not tile some weight exactly.
        """
        self.layout = layout
        self.shards = shards
        self.prefix = {name: shard.start % spans[name] if shard.numel else 0 for name, shard in shards.items()}
        self.suffix = {name: -shard.stop % spans[name] if shard.numel else 0 for name, shard in shards.items()}
        self.chunks = {name: chunks_of(shard, spans[name]) for name, shard in shards.items()}
        """Each shard as consecutive runs, so that what is worked on at a time has a limit; none of an empty one."""
        self.ranges = self._all_ranges()
        self.send: list[list[Span]] = [[] for _ in range(layout.world_size)]
        self.receive: list[list[Span]] = [[] for _ in range(layout.world_size)]
        if not layout.replicated:
            for name in shards:
                self._plan(name, spans[name])
        cut = torch.tensor(
            [any(self.prefix.values()) or any(self.suffix.values())], device=layout.device, dtype=torch.int
        )
        self.any_cut = bool(layout.all_reduce(cut).item())
        """Whether some rank holds a part of a group: the same answer on every rank."""

    def _all_ranges(self) -> dict[str, list[tuple[int, int]]]:
        """(start, stop) of every weight on every rank, checked to tile the weight."""
        mine = [(shard.start, shard.stop) for shard in self.shards.values()]
        everyone: list[list[tuple[int, int]]] = self.layout.all_gather_object(mine)
        ranges = {name: [rank[i] for rank in everyone] for i, name in enumerate(self.shards)}
        for name, shard in self.shards.items():
            numel = math.prod(shard.shape)
            if self.layout.replicated:
                tiled = all(chunk == (0, numel) for chunk in ranges[name])
            else:
                held = sorted(chunk for chunk in ranges[name] if chunk[0] < chunk[1])
                starts, stops = [start for start, _ in held], [stop for _, stop in held]
                tiled = starts == [0, *stops[:-1]] and stops[-1:] == [numel]
            if not tiled:
                raise RuntimeError(f"{name}: the shards of the ranks do not tile its {numel} elements: {ranges[name]}")
        return ranges

    def _plan(self, name: str, span: int) -> None:
        me = self.layout.rank
        for reader, (start, stop) in enumerate(self.ranges[name]):
            if stop == start:
                continue
            for low, high in ((start - start % span, start), (stop, stop - stop % -span)):
                if low == high:
                    continue
                for holder, (first, last) in enumerate(self.ranges[name]):
                    chunk = Span(name, max(low, first), min(high, last))
                    if chunk.start >= chunk.stop or holder == reader:
                        continue
                    if reader == me:
                        self.receive[holder].append(chunk)
                    if holder == me:
                        self.send[reader].append(chunk)

    def exchange(self, read: Callable[[Span], Tensor], names: Collection[str] | None = None) -> Halo:
        """Fetch what this rank's shards lack. Collective when any group is cut on any rank, otherwise free.

        Args:
            read: gives the (stop - start,) fp32 values of a chunk that this rank holds.
            names: the weights meant, the same on every rank; None for all.

        Returns:
            (prefix, suffix) by weight name, for the shards that lack something.
        """
        if not self.any_cut:
            return {}
        device, home = self.layout.device, self.layout.flats[0].device
        names = self.shards.keys() if names is None else names
        send, receive = (
            [[p for p in chunks if p.name in names] for chunks in plan] for plan in (self.send, self.receive)
        )
        outgoing = [read(chunk) for chunks in send for chunk in chunks]
        send_sizes = [sum(chunk.stop - chunk.start for chunk in chunks) for chunks in send]
        receive_sizes = [sum(chunk.stop - chunk.start for chunk in chunks) for chunks in receive]
        # With optimizer offload the shards are on the host: one copy there and one back.
        buffer = torch.cat(outgoing).to(device) if outgoing else torch.empty(0, device=device)
        incoming = torch.empty(sum(receive_sizes), device=device)
        self.layout.all_to_all(incoming, buffer, receive_sizes, send_sizes)
        incoming = incoming.to(home)
        halo = {
            name: (torch.empty(self.prefix[name], device=home), torch.empty(self.suffix[name], device=home))
            for name in names
            if self.prefix[name] or self.suffix[name]
        }
        position = 0
        for chunk in (chunk for chunks in receive for chunk in chunks):
            length = chunk.stop - chunk.start
            shard, (prefix, suffix) = self.shards[chunk.name], halo[chunk.name]
            if chunk.start < shard.start:
                target, first = prefix, shard.start - prefix.numel()
            else:
                target, first = suffix, shard.stop
            target[chunk.start - first : chunk.stop - first] = incoming[position : position + length]
            position += length
        return halo

    def with_halo(self, shard: Shard, mine: Tensor, halo: Halo) -> Tensor:
        """(numel,) of a shard or a chunk of one -> (prefix + numel + suffix,), whole groups; `mine` where it has them.

        A halo is at the ends of the whole shard only.
        """
        before, after = self._missing(shard)
        if shard.name not in halo or not (before or after):
            return mine
        prefix, suffix = halo[shard.name]
        return torch.cat([prefix[:before], mine, suffix[:after]])

    def span_with_halo(self, shard: Shard) -> Span:
        """The elements that `with_halo` gives of a shard or a chunk of one."""
        before, after = self._missing(shard)
        return Span(shard.name, shard.start - before, shard.stop + after)

    def without_halo(self, shard: Shard, widened: Tensor) -> Tensor:
        """The own elements of a shard, or of a chunk of one, in a widened tensor."""
        before, _ = self._missing(shard)
        return widened[before : before + shard.numel]

    def _missing(self, shard: Shard) -> tuple[int, int]:
        """Elements of the halo before and after a shard, or a chunk of one."""
        whole = self.shards[shard.name]
        before = self.prefix[shard.name] if shard.start == whole.start else 0
        return before, self.suffix[shard.name] if shard.stop == whole.stop else 0


def chunks_of(shard: Shard, span: int) -> list[Shard]:
    """Consecutive chunks of a shard of about `CHUNK` elements, cut between spans."""
    unit = span * ALIGNMENT // math.gcd(span, ALIGNMENT)
    size = max(unit, CHUNK - CHUNK % unit)
    bounds = [shard.start, *range(shard.start - shard.start % span + size, shard.stop, size), shard.stop]
    return [
        replace(shard, start=start, stop=stop, offset=shard.offset + start - shard.start)
        for start, stop in zip(bounds[:-1], bounds[1:], strict=True)
        if stop > start
    ]
