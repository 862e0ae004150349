from __future__ import annotations

import torch

from sparseforge_ds.model.peak_memory import PeakMemoryCounter


def test_a_repeated_operation_takes_memory_again_and_a_view_none() -> None:
    """Shapes are derived once for equal arguments; `_unsafe_view` names no view in its schema."""
    x = torch.empty(4, 6, device="meta")
    with PeakMemoryCounter([x]) as counter:
        sums = [x.t() + x.t() for _ in range(3)]
        assert counter.bytes == 3 * 96 and len({value.untyped_storage()._cdata for value in sums}) == 3
        assert {(value.shape, value.stride(), value.dtype) for value in sums} == {((6, 4), (1, 6), torch.float32)}
        for _ in range(3):
            view = torch.ops.aten._unsafe_view.default(x, [24])
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x
        assert counter.bytes == 3 * 96
        # What differs in a number, its type, a dtype or a shape alone is another operation.
        assert [(x + 1).dtype, (x.long() + 1).dtype, (x.long() + 1.0).dtype] == [x.dtype, torch.long, x.dtype]
        assert [(x[:n] * 2).shape[0] for n in (1, 2, 1)] == [1, 2, 1]
        del sums
    assert counter.peak > 3 * 96
