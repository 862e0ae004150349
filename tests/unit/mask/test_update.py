"""A fused mask update and step: the paper's literal loop, and the same bits compiled and step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch._inductor.metrics as metrics
from torch import Tensor
from torch._dynamo.utils import counters

from sparseforge_ds.config import DistillationConfig
from sparseforge_ds.mask import fusing
from sparseforge_ds.mask.anneal import Dials
from sparseforge_ds.mask.bits import pack, unpack
from sparseforge_ds.mask.codes import CODE, decode, stored_as, values_of
from sparseforge_ds.mask.curvature import fisher_sums, token_squares, weighted_squares
from sparseforge_ds.mask.effective_mask import gradient_of_kept, masked_gradient, soft_publish, soft_step
from sparseforge_ds.mask.factored import shares
from sparseforge_ds.mask.importance import Curvature, RankOne, scalings, score_stats, standardized_score
from sparseforge_ds.mask.pattern import NM, Block, Pattern, top_n
from sparseforge_ds.mask.update import Chosen, move_groups, tally
from sparseforge_ds.model.token_losses import TokenLosses
from sparseforge_ds.zero.cautious import hold_back
from sparseforge_ds.zero.layer_hooks import uncompiled
from tests.reference import updated_mask

DIALS = Dials(0.3, 0.4, 0.7, 0.5, 0.3, x=1.0)


def problem(
    shape: tuple[int, int], kind: str, dtype: torch.dtype, ties: bool, seed: int = 0
) -> tuple[Tensor, Tensor, Curvature]:
    """Weights, mask and curvature; with ties, of a few values each."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    dense, mask, h = (torch.rand(count, generator=generator) for _ in range(3))
    if ties:
        dense, mask, h = ((value * 3).floor() / 3 for value in (dense, mask, h))
    h_RC = h.view(shape).double()
    factors = shares(torch.cat([h_RC.sum(1), h_RC.sum(0)]), torch.tensor([shape]))
    curvature = {"none": None, "elements": h, "product": RankOne(*factors.split(shape), 0)}[kind]
    return dense - 0.5, stored_as(mask, dtype), curvature  # type: ignore[return-value]


def update(
    shape: tuple[int, int], axis: int, pattern: Pattern, kind: str, dtype: torch.dtype, ties: bool, dials: Dials = DIALS
) -> tuple[Tensor, Chosen, list[Tensor], Tensor]:
    """New mask, choices, the bits and sums of a tally, and moments."""
    dense, mask, curvature = problem(shape, kind, dtype, ties)
    scaling = scalings(score_stats(dense, curvature)[None], 1e-3)[0]
    chosen = move_groups(dense, mask, curvature, scaling, dials, pattern, shape, axis)
    found = tally(mask, chosen.target, chosen.kept, pack(chosen.kept))
    assert found.kept is not None
    return mask, chosen, [found.target, found.kept, torch.stack(found.sums)], score_stats(dense, curvature)


LITERAL = [
    (NM(2, 4), (6, 20), -1, "product"),
    (NM(2, 4), (8, 13), -2, "elements"),
    (NM(1, 4), (5, 12), -1, "none"),
    (NM(4, 8), (3, 40), -1, "elements"),
    (NM(3, 5), (3, 25), -1, "product"),
    (NM(8, 32), (3, 64), -1, "product"),
    (NM(8, 32), (64, 3), -2, "elements"),
    (Block(16), (32, 48), -1, "product"),
    (Block(4), (8, 12), -2, "elements"),
]


@pytest.mark.parametrize(("pattern", "shape", "axis", "kind"), LITERAL)
@pytest.mark.parametrize("dtype", [torch.float32, CODE])
@pytest.mark.parametrize("late", [False, True])
def test_an_update_is_the_literal_loop(
    pattern: Pattern, shape: tuple[int, int], axis: int, kind: str, dtype: torch.dtype, late: bool
) -> None:
    dials = replace(DIALS, beta=0.8, mask_rate=0.6) if late else DIALS
    dense, old, curvature = problem(shape, kind, dtype, ties=False)
    mask, chosen, found, _ = update(shape, axis, pattern, kind, dtype, False, dials)
    index_GM = pattern.to_groups(torch.arange(mask.numel()), shape, axis)
    h = {"none": torch.ones_like(dense)}.get(kind)
    if h is None:
        h = curvature if isinstance(curvature, Tensor) else torch.outer(*curvature[:2]).flatten()  # type: ignore[index]
    at = {"temperature": 0.3, "beta": dials.beta, "mid_penalty": 0.7, "penalty_rate": 0.5, "mask_rate": dials.mask_rate}
    lists = (values_of(old).tolist(), dense.tolist(), h.tolist(), index_GM.tolist())
    expected, target = updated_mask(*lists, pattern.kept, at, "midpoint", 1e-3)
    assert chosen.target.float().tolist() == target
    bound = 2e-6 if dtype == torch.float32 else 1e-5
    torch.testing.assert_close(values_of(mask), torch.tensor(expected), atol=bound, rtol=0)
    top_GM = top_n(values_of(mask)[index_GM], pattern.kept)
    assert torch.equal(chosen.kept[index_GM], top_GM)
    disagrees = ((values_of(mask)[index_GM] > 0.5) != top_GM).any(1)
    assert chosen.disagrees.numel() == len(index_GM) and torch.equal(chosen.disagrees.flatten(), disagrees)
    m = values_of(mask).double()
    sums = [(m * (1 - m)).sum(), m.sum(), (chosen.target != chosen.kept).sum().double()]
    torch.testing.assert_close(found[2], torch.stack(sums), rtol=1e-12, atol=1e-12)
    assert torch.equal(unpack(found[0], mask.numel()), chosen.target)
    assert torch.equal(unpack(found[1], mask.numel()), chosen.kept)


def test_ends_of_the_schedule_are_exact() -> None:
    """The target itself at beta = alpha = 1; nothing moves at alpha = 0; a decided mask stays exactly 0 or 1."""
    dense, mask, curvature = problem((8, 40), "product", torch.float32, ties=False)
    scaling = scalings(score_stats(dense, curvature)[None], 1e-3)[0]
    given = (curvature, scaling)
    still, hard = mask.clone(), mask.clone()
    move_groups(dense, still, *given, replace(DIALS, mask_rate=0.0), NM(2, 4), (8, 40), -1)
    assert torch.equal(still, mask)
    chosen = move_groups(dense, hard, *given, replace(DIALS, beta=1.0, mask_rate=1.0), NM(2, 4), (8, 40), -1)
    assert torch.equal(hard, chosen.target.float()) and not chosen.disagrees.any()
    for rate in (0.1, 0.3, 0.7):
        move_groups(dense, hard, *given, replace(DIALS, beta=1.0, mask_rate=rate), NM(2, 4), (8, 40), -1)
        assert torch.equal(hard, chosen.target.float())


def test_ties_go_to_the_lower_index() -> None:
    dense, mask = torch.full((8,), 2.0), torch.ones(8)
    chosen = move_groups(dense, mask, None, torch.tensor([0.0, 0, 1]).double(), DIALS, NM(2, 4), (2, 4), -1)
    assert chosen.target.tolist() == chosen.kept.tolist() == [True, True, False, False] * 2


def test_an_update_in_runs_is_one_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [((65, 1000), -1, NM(2, 4)), ((400, 52), -2, NM(4, 8)), ((96, 160), -1, Block(16))]
    for shape, axis, pattern in shapes:
        whole = update(shape, axis, pattern, "product", torch.float32, True)
        with monkeypatch.context() as patch:
            patch.setattr("sparseforge_ds.mask.chunks.ELEMENTS_PER_THREAD", 1 << 10)
            chunks = update(shape, axis, pattern, "product", torch.float32, True)
        assert torch.equal(whole[0], chunks[0])
        assert all(
            torch.equal(a, b) for a, b in zip((*whole[1], *whole[2][:2]), (*chunks[1], *chunks[2][:2]), strict=True)
        )
        torch.testing.assert_close(chunks[2][2], whole[2][2], rtol=1e-12, atol=0)
        torch.testing.assert_close(chunks[3], whole[3], rtol=1e-12, atol=0)


def step_of(
    count: int, dtype: torch.dtype, out_dtype: torch.dtype, x_before: float, x: float, aliased: bool
) -> tuple[Tensor, ...]:
    """W and what is published after a soft step."""
    generator = torch.Generator().manual_seed(count)
    before, dense = torch.randn(2, count, generator=generator)
    mask = (torch.rand(count, generator=generator) * 1.6 - 0.3).clamp(0, 1)
    kept = pack(torch.rand(count, generator=generator) > 0.5)
    out = before.clone() if aliased else torch.empty(count, dtype=out_dtype)
    soft_step(dense, out if aliased else before, stored_as(mask, dtype), kept, x_before, x, out)
    gradient = torch.randn(count, generator=generator, dtype=torch.float32).to(out_dtype)
    masked_gradient(gradient, kept)
    return dense, out, gradient


@pytest.mark.parametrize("x_before, x", [(1.0, 1.0), (0.7, 0.6), (0.4, 0.3), (0.1, 0.0)])
def test_a_soft_step_is_its_formula(x_before: float, x: float) -> None:
    count = 1003
    generator = torch.Generator().manual_seed(count)
    before, dense = torch.randn(2, count, generator=generator)
    mask = (torch.rand(count, generator=generator) * 1.6 - 0.3).clamp(0, 1)
    kept = (torch.rand(count, generator=generator) > 0.5).float()
    then, now = (share * mask + (1 - share) * kept for share in (x_before, x))
    followed, out, gradient = step_of(count, torch.float32, torch.float32, x_before, x, aliased=False)
    torch.testing.assert_close(followed, before + then * (dense - before), atol=1e-6, rtol=0)
    torch.testing.assert_close(out, now * followed, atol=1e-6, rtol=0)
    assert not torch.signbit(out[now == 0]).any() and torch.equal(followed[then == 1], dense[then == 1])
    still = torch.randn(count, generator=generator)
    stood = still.clone()
    soft_step(stood, still.clone(), stored_as(mask, CODE), pack(kept > 0), x_before, x, torch.empty(count))
    assert torch.equal(stood, still), "a weight that the optimizer left alone moved"
    near = still * 1.1
    soft_step(
        near,
        still.clone(),
        torch.zeros(count),
        torch.zeros(-(-count // 8), dtype=torch.uint8),
        x_before,
        x,
        still.clone(),
    )
    assert torch.equal(near, still), "a weight without a share of the step moved"
    assert not gradient[kept == 0].any() and not torch.signbit(gradient[kept == 0]).any()
    assert (gradient[kept == 1] != 0).all()
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            step_of(count, torch.float32, torch.float32, x_before, x, aliased=True),
            (followed, out, gradient),
            strict=True,
        )
    )


COMPILED: list[tuple[tuple[int, int], int, Pattern, str, torch.dtype]] = [
    ((33, 44), -1, NM(2, 4), "product", CODE),
    ((25, 52), -1, NM(2, 4), "product", CODE),
    ((8, 13), -2, NM(2, 4), "elements", torch.float32),
    ((7, 24), -1, NM(4, 8), "none", torch.float32),
]
"""Each but the second takes seconds to compile."""


def test_the_compiler_makes_as_many_kernels_as_are_counted() -> None:
    """A device's cost is counted by `KERNELS`, which are what the compiler makes of every fused function."""
    dense, mask, curvature = problem((16, 24), "product", CODE, ties=False, seed=3)
    assert isinstance(curvature, RankOne)
    scaling = scalings(score_stats(dense, curvature)[None], 1e-3)[0]
    bits, given = pack(mask.int() > 0), torch.randn(12, 24, dtype=torch.bfloat16)
    losses = TokenLosses(torch.arange(12), DistillationConfig(temperature=2.0), given.dtype)
    functions: dict[str, Callable[[], object]] = {
        "move_mask": lambda: move_groups(dense, mask, curvature, scaling, DIALS, NM(2, 4), (16, 24), -1),
        "sum_moments": lambda: score_stats(dense, curvature),
        "score_chunk": lambda: standardized_score(dense, curvature, scaling),
        "tally": lambda: tally(mask, dense > 0, dense > 0, bits),
        "soft_step": lambda: soft_step(dense, dense.clone(), mask, bits, 0.7, 0.6, torch.empty_like(dense)),
        "soft_publish": lambda: soft_publish(dense, mask, bits, 0.6, torch.empty_like(dense)),
        "hold_back": lambda: hold_back(dense.clone(), dense, torch.randn_like(dense)),
        "keep_in_place": lambda: masked_gradient(dense.clone(), bits),
        "gradient_of_kept": lambda: gradient_of_kept(given, torch.relu(given)),
        "token_squares": lambda: token_squares(given),
        "fisher_sums": lambda: fisher_sums(given, given[:, :20].clone()),
        "weighted_squares": lambda: weighted_squares(given, torch.rand(12)),
        "token_losses": lambda: losses.add(slice(None), given, given.flip(1)),
        "logit_gradient": lambda: losses.gradient(given, given.flip(1), torch.ones(()), dtype=given.dtype),
    }
    assert functions.keys() == fusing.KERNELS.keys()
    torch._dynamo.reset()
    made = {}
    # A graph from the cache would generate no kernel.
    with fusing.compiled(True), torch._inductor.config.patch(force_disable_caches=True):
        for name, call in functions.items():
            metrics.reset()
            call()
            made[name] = metrics.generated_kernel_count
    assert made == fusing.KERNELS


def test_compiled_is_step_by_step() -> None:
    """Odd lengths, ties, all forms of H, both ways of storing a mask; no graph for a size."""
    graphs = []
    for shape, axis, pattern, kind, dtype in COMPILED:
        for ties, dials in ((False, DIALS), (True, replace(DIALS, temperature=0.21, beta=0.1, mask_rate=0.2))):
            plain = update(shape, axis, pattern, kind, dtype, ties, dials)
            with fusing.compiled(True):
                one = update(shape, axis, pattern, kind, dtype, ties, dials)
            graphs.append(counters["stats"]["unique_graphs"])
            assert torch.equal(one[0], plain[0]), (shape, pattern, kind)
            for a, b in zip((*one[1], *one[2][:2]), (*plain[1], *plain[2][:2]), strict=True):
                assert torch.equal(a, b), (shape, pattern, kind)
            torch.testing.assert_close(one[2][2], plain[2][2], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(one[3], plain[3], rtol=1e-12, atol=0)
    assert graphs[0] == graphs[3], "another size or rate made another graph"
    for arguments in ((1003, CODE, torch.float32), (64, CODE, torch.float32), (333, torch.float32, torch.bfloat16)):
        for aliased in (False, arguments[2] == torch.float32):
            plain_step = step_of(*arguments, 0.7, 0.6, aliased)
            with fusing.compiled(True):
                one_step = step_of(*arguments, 0.7, 0.6, aliased)
            assert all(torch.equal(a, b) for a, b in zip(one_step, plain_step, strict=True))


def test_what_hooks_call_is_compiled_where_the_model_is_not() -> None:
    """While layers are heard, compiled code of the model stands back; ours ran step by step there, with whole copies of
    the inputs in fp32."""

    def steps() -> set[str]:
        with torch.profiler.profile() as seen:
            fisher_sums(torch.ones(12, 20), torch.ones(12, 8))
        return {event.key for event in seen.key_averages()} & {"aten::mul", "aten::pow", "aten::mv"}

    assert steps() == {"aten::pow", "aten::mv"}
    with fusing.compiled(True), uncompiled():
        steps()  # in which the compiler runs some of its own
        assert steps() == set()


def test_sums_of_any_size_are_of_rows_by_one_graph() -> None:
    """Sums over everything are divided among a GPU's multiprocessors by the first size; rows do for every size."""

    def sums(rows: int, columns: int) -> list[Tensor]:
        dense, mask, curvature = problem((rows, columns), "product", CODE, ties=False, seed=rows)
        found = tally(mask, dense > 0, dense > 0, pack(dense > 0.25))
        grad, given = dense.view(rows, columns), dense.view(rows, columns)[:, :20].clone()
        return [score_stats(dense, curvature), *found.sums, *fisher_sums(grad, given)]

    graphs = []
    for rows, columns in ((16, 24), (128, 32), (130, 68), (1024, 40)):  # less than a row, exactly one, some
        plain = sums(rows, columns)
        with fusing.compiled(True):
            torch.testing.assert_close(sums(rows, columns), plain)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4
    with mock.patch.object(torch.compiler, "is_compiling", lambda: True):
        found = [fusing.row_sums([torch.ones(count, dtype=torch.float64)]) for count in (1, 4096, 16385)]
    assert [one.tolist()[0] for one in found] == [[1, 0], [4096, 0], [4096] * 4 + [1, 0]]


def test_no_rate_makes_a_graph_of_its_own() -> None:
    """A rate moves at every step: of floats, torch makes a graph for each value where it does not know better."""
    graphs = []
    with fusing.compiled(True), torch._dynamo.config.patch(specialize_float=True):
        for x_before, x in ((0.7, 0.65), (0.65, 0.6), (0.6, 0.6), (1.0, 0.3)):
            step_of(64, CODE, torch.float32, x_before, x, aliased=False)
            update((24, 24), -1, NM(2, 4), "product", CODE, False, replace(DIALS, temperature=x, mask_rate=1 - x))
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4


def test_codes_are_rounded_once_at_the_end_of_an_update() -> None:
    exact = update((12, 40), -1, NM(2, 4), "product", torch.float32, False)[0]
    _, old, _ = problem((12, 40), "product", torch.float32, False)
    coded = update((12, 40), -1, NM(2, 4), "product", CODE, False)[0]
    assert coded.dtype == CODE and (decode(coded) - exact).abs().max() <= 1 / 65535
    assert (decode(coded) > 0.5).any() and old.dtype == torch.float32
