"""Tilings of the kernel for 33 to 256 rows, `staged24.cu`, chosen by arithmetic: no GPU has measured them.

The time is the largest of five, in clocks, with an eighth of the others:

- memory: 72 bytes of 64 inputs of an output, 16-bit values and positions, at 12 bytes a clock and multiprocessor. An
  H100's 2.7 TB/s are 11.7 for each of 132 at 1.75 GHz, an A100's 1.4 TB/s are 9.2 for 108 at 1.41 GHz.
- L2 cache: the same for each block, and 128 bytes of each row of x, at 28 bytes a clock.
- shared memory: a warp reads 8 times 128 bytes for each tile of 16 outputs and of 8 rows, at 128 bytes a clock.
- the tensor cores: two clocks an instruction, of which a pair of tiles has two: 0.5 of an H100's rate.
- a warp's turn: 300 clocks from a barrier to the first product, and 8 for each instruction of the tensor cores. Blocks
  that share a multiprocessor hide each other's.

So 64 inputs of 128 outputs with 64 rows take memory 768 clocks and the cache 622. With 128 rows the cache takes 914,
for 256 outputs 1,243 beside 1,536 of memory. At 256 rows, 8 warps of 4 x 8 tiles take shared memory 768 and the tensor
cores 1,024; the dense weight would take memory 1,365. A warp holds 4 registers for each pair of tiles.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

STAGED_ROWS = 256
"""Maximum of rows of x."""
_STEP = 64
"""Inputs of a step."""
_ROW_BYTES = 128
"""Bytes of a row of x in a step."""
_FIXED = 90
"""Registers of a thread beside the sums."""
_RESERVED = 1024
"""Bytes of shared memory that a block takes beside its own."""
_IN_FLIGHT = 32_000
"""Bytes on their way to a multiprocessor that fill the memory's latency."""
_PARTS = (1, 2, 3, 4, 5, 6, 8)
"""Numbers of parts to try."""
_TILES = (1, 2, 3, 4)
"""Tiles of 16 outputs of a warp to try."""
_WARPS = (1, 2, 3, 4, 5, 6, 8)
"""Numbers of warps with different outputs to try."""


class StagedTiling(NamedTuple):
    """Division of a product among blocks and warps; `staged24.cu` explains the macros."""

    WM: int
    """Tiles of 16 outputs of a warp."""
    NT: int
    """Tiles of 8 rows of a warp."""
    WO: int
    """Warps of a block with different outputs."""
    WR: int
    """Warps of a block with different rows."""
    STAGES: int
    """Slots in shared memory, one of which is being multiplied."""
    RESIDENT: int
    """Blocks that share a multiprocessor."""
    row_blocks: int
    """Blocks with different rows."""
    parts: int
    """Parts of the inputs, each with its own blocks."""

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return "staged24"

    @property
    def threads(self) -> int:
        """Threads per block."""
        return 32 * self.WO * self.WR

    @property
    def outputs(self) -> int:
        """Outputs of a block."""
        return 16 * self.WM * self.WO

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 8 * self.NT * self.WR

    def macros(self, inputs: int) -> dict[str, int]:
        """Return the macros of the kernel, without that of the dtype."""
        return {name: value for name, value in self._asdict().items() if name.isupper()}

    def shared_memory(self, inputs: int, slot: int) -> int:
        """Return the bytes of shared memory per block; `slot` is that of `Stored.slot_bytes`."""
        return self.STAGES * self._step_bytes(slot)

    def blocks(self, outputs: int, multiprocessors: int) -> tuple[int, int]:
        """Return the blocks along outputs and rows, and those along the inputs."""
        return -(-outputs // self.outputs) * self.row_blocks, self.parts

    def cost(self, rows: int, outputs: int, inputs: int, multiprocessors: int, slot: int) -> float:
        """Estimate the time in clocks."""
        along, parts = self.blocks(outputs, multiprocessors)
        turns = -(-along * parts // multiprocessors)
        steps = turns * -(-inputs // _STEP // parts)
        # Bytes of a step, of rows that exist.
        weights = self.outputs * slot / 64
        bytes_read = weights + min(rows, self.rows) * _ROW_BYTES
        in_flight = min(self.RESIDENT, turns) * (self.STAGES - 1) * bytes_read
        warps = self.WO * self.WR
        clocks = (
            along / self.row_blocks * weights * inputs / _STEP / 12 / multiprocessors,
            steps * bytes_read / 28 * max(1.0, _IN_FLIGHT / in_flight),
            steps * warps * 8 * (self.WM + self.NT),
            steps * warps * 2 * self.WM * self.NT * 2,
            steps * (300 + 16 * self.WM * self.NT) / min(self.RESIDENT, turns),
        )
        busy = max(clocks) + (sum(clocks) - max(clocks)) / 8
        # A block begins with empty slots and ends with its sums; a second kernel adds parts, which are in the L2 cache.
        adding = 0.0 if parts == 1 else 4000 + 8 * parts * rows * outputs / multiprocessors / 20
        return busy + 2000 * -(-turns // self.RESIDENT) + adding

    def _step_bytes(self, slot: int) -> int:
        return self.rows * _ROW_BYTES + self.outputs * slot // 64


def ranked_staged(
    rows: int, outputs: int, inputs: int, multiprocessors: int, shared_memory: int, slot: int
) -> list[StagedTiling]:
    """Return all tilings that fit, the cheapest first.

    They are the same for each 32 rows, so that few are compiled. Arguments are those of `mma_kernel.ranked`.
    """
    costs = []
    for row_blocks, wr, wm, wo, resident, parts in product((1, 2), (1, 2, 4), _TILES, _WARPS, (1, 2), _PARTS):
        tiles = 4 * -(-rows // (32 * row_blocks))
        # Each of four schedulers has 512 registers a lane for its warps.
        registers = 512 // -(-wo * wr * resident // 4)
        fits_registers = wm * (tiles // wr) <= 32 and registers >= 4 * wm * (tiles // wr) + _FIXED
        too_short = parts > 1 and inputs // _STEP < 4 * parts
        if tiles % wr or not 4 <= wo * wr <= 16 or not fits_registers or too_short:
            continue
        # As many slots as shared memory has room for, two at least.
        smallest = StagedTiling(wm, tiles // wr, wo, wr, 1, resident, row_blocks, parts)
        room = (shared_memory + _RESERVED) // resident - _RESERVED
        stages = min(6, room // smallest.shared_memory(inputs, slot))
        if stages >= 2:
            tiling = smallest._replace(STAGES=stages)
            costs.append((tiling.cost(tiles * 8 * row_blocks, outputs, inputs, multiprocessors, slot), tiling))
    return [tiling for _, tiling in sorted(costs)]
