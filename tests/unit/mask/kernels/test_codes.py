"""Fixed-point masks: every code, and values between codes, against exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import torch

from sparseforge_ds.mask.kernels.codes import CODE, STEPS, decode, encode, stored_as, values_of

ALL = torch.arange(STEPS + 1, dtype=torch.int32).to(CODE)


def test_every_code_is_read_and_written_again() -> None:
    value = decode(ALL)
    assert value.dtype == torch.float32 and value[0] == 0 and value[-1] == 1
    assert (value.diff() > 0).all()
    assert torch.equal(encode(value), ALL)
    exact = torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
    assert (value.double() - exact).abs().max() < 2**-24


def test_the_nearest_code_is_taken() -> None:
    value = torch.rand(50_000, generator=torch.Generator().manual_seed(0)).sort().values
    code = encode(value).int()
    assert (code.diff() >= 0).all()
    # fp32 products are off by at most half an ulp of 65535, which moves a value that lies halfway.
    assert (code.double() - value.double() * STEPS).abs().max() <= 0.5 + 2**-9


def test_halves_are_rounded_to_even() -> None:
    # The only fp32 values whose product with 65535 is exactly a half are odd multiples of 1/2.
    assert encode(torch.tensor([0.5])).item() == round(Fraction(STEPS, 2)) == 32768
    halves = torch.tensor([(k + 0.5) / STEPS for k in range(0, STEPS, 97)])
    product = halves * STEPS
    tied = product.frac() == 0.5
    assert tied.sum() > 100
    assert encode(halves)[tied].int().tolist() == [round(Fraction(p)) for p in product[tied].tolist()]


def test_either_way_of_storing_is_read_and_written() -> None:
    value = torch.rand(100, generator=torch.Generator().manual_seed(1))
    assert values_of(value) is value and stored_as(value, torch.float32) is value
    assert torch.equal(values_of(stored_as(value, CODE)), decode(encode(value)))
