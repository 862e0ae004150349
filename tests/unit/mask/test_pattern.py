"""Groups of every pattern: a permutation of the elements, cut along the input axis, exactly N kept, ties by index."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparseforge_ds.export.counting import WeightReport, count_members
from sparseforge_ds.mask.kernels.groups import survivors
from sparseforge_ds.mask.pattern import NM, Block, Pairs, Pattern, parse_pattern, rank_in_group, top_n
from tests.reference import groups_of, winners


@st.composite
def patterned_shapes(draw: st.DrawFn) -> tuple[Pattern, tuple[int, ...], int]:
    """Draw a pattern, a shape that carries it (2-D or fused experts), and the input axis."""
    kind = draw(st.sampled_from([NM, Pairs, Block]))
    if kind is not Block:
        m = draw(st.integers(2, 9)) if kind is NM else 2 * draw(st.integers(2, 4))
        n = draw(st.integers(1, m - 1)) if kind is NM else 2 * draw(st.integers(1, m // 2 - 1))
        pattern: Pattern = kind(n, m)
        fit = m * draw(st.integers(1, 4))
        other = draw(st.integers(1, 7))
    else:
        size = draw(st.sampled_from([2, 4]))
        pattern = Block(size, 0.5)
        fit = size * draw(st.integers(1, 3))
        other = size * draw(st.integers(1, 3))
    axis = draw(st.sampled_from([-1, -2]))
    matrix = (other, fit) if axis == -1 else (fit, other)
    experts = draw(st.sampled_from([(), (3,)]))
    return pattern, (*experts, *matrix), axis


@given(patterned_shapes())
def test_groups_are_a_permutation_and_from_groups_undoes_it(case: tuple[Pattern, tuple[int, ...], int]) -> None:
    pattern, shape, axis = case
    assert pattern.misfit(shape, axis) is None
    flat = torch.arange(torch.Size(shape).numel())
    group_GM = pattern.to_groups(flat, shape, axis)
    assert group_GM.shape[1] == pattern.members
    assert torch.equal(group_GM.flatten().sort().values, flat)
    assert torch.equal(pattern.from_groups(group_GM, shape, axis), flat)


@given(patterned_shapes())
def test_groups_are_the_literal_ones(case: tuple[Pattern, tuple[int, ...], int]) -> None:
    pattern, shape, axis = case
    size = shape[-2] * shape[-1]
    literal = [
        [expert * size + e for e in group]
        for expert in range(torch.Size(shape).numel() // size)
        for group in groups_of(str(pattern), shape[-2:], axis)
    ]
    result = pattern.to_groups(torch.arange(torch.Size(shape).numel()), shape, axis).tolist()
    assert sorted(result) == sorted(literal)


@given(patterned_shapes(), st.data())
def test_any_run_of_whole_spans_can_be_grouped_alone(
    case: tuple[Pattern, tuple[int, ...], int], data: st.DataObject
) -> None:
    pattern, shape, axis = case
    numel = torch.Size(shape).numel()
    period = pattern.period(shape, axis)
    assert numel % period == 0 and period % pattern.members == 0
    start = data.draw(st.integers(0, numel // period - 1)) * period
    stop = data.draw(st.integers(start // period + 1, numel // period)) * period
    source = pattern.to_groups(torch.arange(start, stop), shape, axis)
    full = pattern.to_groups(torch.arange(numel), shape, axis).tolist()
    assert all(group in full for group in source.tolist())
    assert torch.equal(pattern.from_groups(source, shape, axis), torch.arange(start, stop))


VALUES = st.integers(0, 3) | st.floats(-1e6, 1e6, width=32)


@st.composite
def group_values(draw: st.DrawFn) -> Tensor:
    members = draw(st.sampled_from([2, 3, 4, 8, 16, 17, 64]))
    rows = draw(st.integers(1, 3))
    pool = draw(st.lists(VALUES, min_size=1, max_size=6))
    picks = draw(st.lists(st.integers(0, len(pool) - 1), min_size=rows * members, max_size=rows * members))
    return torch.tensor([float(pool[i]) for i in picks]).view(rows, members)


@given(group_values(), st.data())
def test_top_n_keeps_n_and_breaks_ties_by_index(group_GM: Tensor, data: st.DataObject) -> None:
    members = group_GM.shape[1]
    n = data.draw(st.integers(1, members - 1))
    kept = top_n(group_GM, n)
    assert kept.dtype == torch.bool
    assert kept.sum(1).tolist() == [n] * group_GM.shape[0]
    for row, choice in zip(group_GM.tolist(), kept.tolist(), strict=True):
        assert sorted(winners(row, n)) == [i for i, chosen in enumerate(choice) if chosen]


@given(group_values())
def test_ranks_are_permutations(group_GM: Tensor) -> None:
    rank_GM = rank_in_group(group_GM).long()
    assert rank_GM.sort(1).values.tolist() == [list(range(group_GM.shape[1]))] * group_GM.shape[0]


@given(st.permutations(range(8)), st.permutations(range(20)))
def test_without_ties_the_choice_follows_the_members(small: list[int], large: list[int]) -> None:
    for order in (small, large):
        values = torch.tensor([float(i) ** 1.5 for i in range(len(order))])[None]
        kept = top_n(values, 3)
        assert torch.equal(top_n(values[:, order], 3), kept[:, order])


def test_all_equal_keeps_the_first() -> None:
    assert top_n(torch.zeros(2, 4), 2).tolist() == [[True, True, False, False]] * 2
    assert top_n(torch.zeros(1, 256), 128)[0].nonzero().flatten().tolist() == list(range(128))


@pytest.mark.parametrize(
    ("text", "pattern"),
    [("2:4", NM(2, 4)), ("4:8", NM(4, 8)), ("block16", Block(16, 0.5)), ("block4:.25", Block(4, 0.25))],
)
def test_a_pattern_is_read_from_its_text(text: str, pattern: Pattern) -> None:
    assert parse_pattern(text) == pattern
    assert parse_pattern(str(pattern)) == pattern


@pytest.mark.parametrize(
    "text",
    ["", "2-4", "2:4:8", "block", "block16:2", "block16:0.3001", "block16:.000000000001", "block1", "4:2", "0:4"],
)
def test_a_text_that_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="like|for example|whole number"):
        parse_pattern(text)


@pytest.mark.parametrize("density", [0.07, 0.29, 0.57])
def test_a_density_that_floats_cannot_hold_is_still_a_whole_number_of_entries(density: float) -> None:
    assert Block(10, density).kept_count == round(100 * density)


@pytest.mark.parametrize("size", [2, 16, 128])
def test_the_text_of_a_tile_pattern_is_read_back(size: int) -> None:
    entries = {1, 2, 3, size**2 // 3, size**2 // 2, size**2 - 1}
    for pattern in (Block(size, kept / size**2) for kept in entries if 0 < kept < size**2):
        assert parse_pattern(str(pattern)) == pattern, str(pattern)


def test_misfit_names_the_size() -> None:
    assert "10" in str(NM(2, 4).misfit((8, 10), -1))
    assert NM(2, 4).misfit((8, 10), -2) is None
    assert "24 x 16" in str(Block(16).misfit((24, 16), -1))


@given(st.lists(st.lists(st.floats(0, 4, width=16), min_size=8, max_size=8), min_size=1, max_size=5))
def test_pairs_are_kept_by_their_sums(values: list[list[float]]) -> None:
    group_GM = torch.tensor(values)
    kept = survivors(group_GM, Pairs(4, 8))
    for row, choice in zip(values, kept.tolist(), strict=True):
        sums = [(torch.tensor(row[i]) + torch.tensor(row[i + 1])).item() for i in range(0, 8, 2)]
        best = winners(sums, 2)
        assert choice == [i // 2 in best for i in range(8)]


def test_a_half_kept_pair_takes_the_place_of_a_whole_one() -> None:
    kept = torch.tensor([1, 0, 0, 1, 0, 0, 0, 0] + [1, 0, 1, 0, 1, 0, 0, 0] + [0] * 8).bool()
    assert count_members(kept, Pairs(4, 8), (3, 8), -1).tolist() == [4, 6, 0]
    report = WeightReport("w", (3, 8), -1)
    report.add(kept.float(), Pairs(4, 8))
    assert (report.groups, report.nonzeros, report.violations) == (3, 5, 1)


def test_pairs_are_read_from_their_text() -> None:
    assert parse_pattern("4:8 pairs") == Pairs(4, 8) and str(Pairs(4, 8)) == "4:8 pairs"
    assert Pairs(4, 8) != NM(4, 8)
    for text in ("3:8 pairs", "2:6 pair", "4:4 pairs", "2:5 pairs", "4:8pairs"):
        with pytest.raises(ValueError, match="4:8 pairs"):
            parse_pattern(text)
