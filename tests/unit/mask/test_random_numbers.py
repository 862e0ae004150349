"""Counter-based random numbers: the same wherever a weight is cut, fair and independent."""

from __future__ import annotations

import math
import zlib

import torch
from hypothesis import given
from hypothesis import strategies as st

from sparseforge_ds.mask.random_numbers import counter_hash, counter_key, rademacher, rademacher_rows, uniform

CPU = torch.device("cpu")


@given(st.integers(0, 10**12), st.integers(0, 200), st.integers(0, 200))
def test_numbers_depend_on_the_element_and_not_on_the_split(first: int, a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    for draw in (rademacher, uniform):
        full = draw(7, first, first + 200, CPU)
        chunks = [draw(7, first + s, first + e, CPU) for s, e in ((0, low), (low, high), (high, 200))]
        assert torch.equal(torch.cat(chunks), full)


def test_keys_differ_by_each_of_their_parts() -> None:
    keys = {
        counter_key(seed, step, probe, name)
        for seed in range(8)
        for step in range(50)
        for probe in range(4)
        for name in ("a.weight", "b.weight", "layers.10.weight", "layers.11.weight")
    }
    assert len(keys) == 8 * 50 * 4 * 4


def test_signs_are_fair_and_independent() -> None:
    """Five standard deviations everywhere, over weights, steps and probes as they occur."""
    n = 20_000
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(6)]
    keys = [counter_key(0, step, probe, name) for name in names for step in (5, 10) for probe in (0, 1)]
    signs = torch.stack([rademacher(key, 0, n, CPU) for key in keys])
    assert set(signs.unique().tolist()) == {-1.0, 1.0}
    bound = 5 / math.sqrt(n)
    assert signs.mean(1).abs().max() < bound
    correlation = signs @ signs.t() / n - torch.eye(len(keys))
    assert correlation.abs().max() < bound
    for lag in (1, 2, 4, 64, 4096):
        assert (signs[:, lag:] * signs[:, :-lag]).mean(1).abs().max() < 5 / math.sqrt(n - lag)


@given(st.integers(0, 10**9), st.integers(0, 30), st.sampled_from([1, 8, 63, 64, 65, 200]))
def test_signs_of_rows_are_bits_of_hashes_wherever_rows_are_cut(first: int, cut: int, columns: int) -> None:
    full = rademacher_rows(7, first, 30, columns, torch.zeros((), dtype=torch.bfloat16))
    assert full.dtype == torch.bfloat16 and full.shape == (30, columns)
    parts = [rademacher_rows(7, first + a, b - a, columns, torch.zeros(())) for a, b in ((0, cut), (cut, 30))]
    assert torch.equal(torch.cat(parts), full.float())
    words = -(-columns // 64)
    for row, column in ((0, 0), (29, columns - 1), (cut % 30, columns // 2)):
        word = counter_hash(7, torch.tensor([(first + row) * words + column // 64])).item()
        assert full[row, column].item() == (1.0 if word >> (column % 64) & 1 else -1.0)


def test_signs_of_rows_are_fair_and_independent() -> None:
    rows, columns = 400, 192
    signs = rademacher_rows(counter_key(0, 5, 0, "a outputs"), 0, rows, columns, torch.zeros(()))
    assert abs(signs.mean()) < 5 / math.sqrt(rows * columns)
    for axis, (length, line_count) in enumerate(((columns, rows), (rows, columns))):
        lines = signs if axis == 0 else signs.t()
        correlation = lines @ lines.t() / length - torch.eye(line_count)
        assert correlation.abs().max() < 6 / math.sqrt(length)


def test_uniform_is_uniform() -> None:
    values = uniform(counter_key(1, 2, 3, "labels"), 0, 50_000, CPU)
    assert values.min() >= 0 and values.max() < 1
    counts = torch.histc(values, 20, 0, 1)
    chi_square = ((counts - 2500) ** 2 / 2500).sum().item()
    assert chi_square < 19 + 5 * math.sqrt(2 * 19)


def test_the_hash_is_splitmix64() -> None:
    """A resumed run draws what the run before it would have drawn, also with a later version of this package."""

    def splitmix64(state: int) -> int:
        z = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key = counter_key(3, 50, 1, "a.weight")
    assert key == zlib.crc32(b"3/50/1/a.weight") << 31 ^ zlib.adler32(b"3/50/1/a.weight")
    words = [splitmix64((key + index * 0x9E3779B97F4A7C15) % 2**64) for index in range(64)]
    assert [word % 2**64 for word in counter_hash(key, torch.arange(64)).tolist()] == words
    assert uniform(key, 0, 64, CPU).tolist() == [(word >> 40) / 2**24 for word in words]
    assert rademacher(key, 0, 64, CPU).tolist() == [1.0 if word & 1 else -1.0 for word in words]


def test_the_hash_reaches_every_bit() -> None:
    words = counter_hash(123, torch.arange(4096))
    for bit in range(64):
        share = ((words >> bit) & 1).float().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(4096), bit
