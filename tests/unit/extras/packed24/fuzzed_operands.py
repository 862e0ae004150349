"""Random operands, sound and damaged, for every operator on packed 2:4 weights, in a process of its own.

    python -m tests.unit.extras.packed24.fuzzed_operands CASES [LIBRARY]

LIBRARY takes the place of the CPU kernel, for one that was built with a sanitizer. Damaged operands must be refused by
a ValueError; whatever is accepted must be the product of literal unpacking. A fault of memory ends the process.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from sparseforge_ds.extras.packed24.experts24 import experts24
from sparseforge_ds.extras.packed24.linear24 import linear24
from sparseforge_ds.packed_format.packed_values import GRIDS, PAIRS, Grid, round_values
from sparseforge_ds.packed_format.packing import VALUE_DTYPES, unpack24

FLOATS = sorted(VALUE_DTYPES, key=str)
OTHERS = [torch.int8, torch.uint8, torch.bool, torch.int16, torch.int64, torch.float8_e4m3fn, torch.complex128]
GROUPS = torch.tensor([low | high << 2 for low in range(4) for high in range(low + 1, 4)], dtype=torch.uint8)
"""Every sound half byte of positions."""
CAN_ROUND_ROWS = "avx512_vnni" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
"""True if the CPU kernel may take rows of x in 8 bits."""
Operands = dict[str, Tensor]


def sound(operator: str, rng: random.Random) -> Operands:
    """Operands that belong together, of any size up to several tiles."""
    dtype = rng.choice(FLOATS)
    outputs = rng.choice([1, 2, 7, 64, 300])
    groups = rng.choice([1, 2, 3, 16, 33, 48])
    rows = rng.choice([0, 1, 2, 5, 40, 300])
    lead = [rng.choice([1, 4])] if "experts" in operator else []
    half = GROUPS[torch.randint(len(GROUPS), (*lead, outputs, groups + groups % 2))]
    if groups % 2:
        half[..., -1] = 0
    operands = {
        "x": torch.randn(rows, outputs if "gradient" in operator else 4 * groups).to(dtype),
        "values": torch.randn(*lead, outputs, 2 * groups).to(dtype),
        "positions": half[..., ::2] | half[..., 1::2] << 4,
    }
    if rng.random() < 0.5:  # rounded values
        name = rng.choice(list(GRIDS))
        sizes = [size for size in (16, 32, 48) if name == "int4" and 2 * groups % size == 0]
        grid = Grid(name, rng.choice([None, *sizes]))
        operands["values"], operands["scale"] = round_values(operands["values"].float(), -1, grid)
    if operator == "linear24" and rng.random() < 0.5:
        operands["bias"] = torch.randn(outputs).to(dtype)
    if lead:
        operands["ends"] = torch.tensor(sorted(rng.randrange(rows + 1) for _ in range(lead[0])))
    return operands


def damaged(operands: Operands, rng: random.Random) -> Operands:
    """Return the operands with one of another dtype, shape, device, layout or content, or all in a foreign dtype."""
    if rng.random() < 0.2:  # as a mixture of a damaged file has them: x takes the dtype of the values
        dtype = rng.choice(OTHERS)
        kept = {name: operands[name] for name in operands.keys() & {"positions", "ends", "scale"}}
        return {name: tensor.to(dtype) for name, tensor in operands.items()} | kept
    if "scale" in operands and rng.random() < 0.1:
        return {name: tensor for name, tensor in operands.items() if name != "scale"}
    # Else one operand is damaged.
    name = rng.choice(sorted(operands))
    tensor = operands[name]
    axis = rng.randrange(tensor.ndim)
    damages: list[Callable[[], Tensor]] = [
        lambda: tensor.to(rng.choice([*OTHERS, *FLOATS])),
        lambda: tensor.narrow(axis, 0, max(0, tensor.shape[axis] - rng.choice([1, 2, 3]))),
        lambda: torch.cat((tensor, tensor), axis),
        lambda: tensor[None],
        lambda: tensor.reshape(-1),
        lambda: tensor.float().sum().to(tensor.dtype),
        lambda: tensor.to("meta"),
        lambda: (tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor).to_sparse(),
        lambda: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor.clone(),
    ]
    # Content that no export writes, and that kernels must not follow out of memory.
    if name == "ends":
        damages += [lambda: torch.randint(-(2**40), 2**40, tensor.shape), lambda: tensor.flip(0) - 1] * 3
    if name == "positions":
        damages += [lambda: torch.randint(0, 256, tensor.shape).to(torch.uint8)] * 2
    return operands | {name: rng.choice(damages)()}


def literal(operands: Operands, backward: bool) -> Tensor:
    """Compute the product in float64, by `unpack24` and one row after another; ValueError for damaged positions."""
    x, values, positions = (operands[name] for name in ("x", "values", "positions"))
    if values.dtype == PAIRS:
        weight = unpack24(values, positions, operands["scale"], torch.float64)
    else:
        weight = unpack24(values.float().double() if "scale" in operands else values.double(), positions)
        weight = weight * operands["scale"].double() if "scale" in operands else weight
    if "ends" not in operands:
        product = x.double() @ (weight if backward else weight.mT)
        return product + operands["bias"].double() if "bias" in operands else product
    product = x.new_zeros(len(x), weight.shape[-1] if backward else weight.shape[-2], dtype=torch.float64)
    start = 0
    for expert, end in enumerate(operands["ends"].tolist()):
        for row in range(start, end):
            product[row] = x[row].double() @ (weight[expert] if backward else weight[expert].mT)
        start = end
    return product


OPERATORS: dict[str, Callable[..., Tensor]] = {
    "linear24": linear24,
    "experts24": experts24,
    "linear24_input_gradient": torch.ops.sparseforge.linear24_input_gradient.default,
    "experts24_input_gradient": torch.ops.sparseforge.experts24_input_gradient.default,
}


def by_argument(operator: str, operands: Operands) -> Operands:
    """Return operands by the names of an operator's arguments."""
    return {"gradient" if name == "x" and "gradient" in operator else name: tensor for name, tensor in operands.items()}


def try_case(seed: int) -> str:
    """Run one case and say what came of it: refused, or accepted with the right product."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    operator = rng.choice(sorted(OPERATORS))
    # A fifth of the cases is sound, and must be accepted.
    operands = sound(operator, rng)
    is_sound = rng.random() < 0.2
    if not is_sound:
        operands = damaged(operands, rng)
    in_8_bits = CAN_ROUND_ROWS and rng.random() < 0.3
    os.environ["SPARSEFORGE_CPU_ACTIVATIONS"] = "int8" if in_8_bits else ""
    # Refusals are ValueErrors of one line, of damaged operands alone.
    try:
        product = OPERATORS[operator](**by_argument(operator, operands))
    except ValueError as error:
        # Not every processor with the instruction has the kernel of this dtype.
        cannot_round = in_8_bits and "it needs a processor with AVX512-VNNI" in str(error)
        assert (not is_sound or cannot_round) and "\n" not in str(error), f"seed {seed}: {operator}: {error}"
        return "refused"
    try:
        expected = literal(operands, "gradient" in operator)
    except ValueError:  # damaged positions: the loader refuses them, a product has only to stay inside of memory
        assert not is_sound, f"seed {seed}"
        return "any number"
    # What is accepted is right, within the rounding of its dtype.
    assert product.shape == expected.shape and product.dtype == operands["x"].dtype, f"seed {seed}: {operator}"
    tolerance = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(product.dtype, 1e-3)
    absolute = tolerance
    if in_8_bits and "gradient" not in operator and operands["values"].dtype == torch.int8:
        absolute = 0.5  # sums of up to 132 products of normal numbers, whose inputs are up to 0.02 off
    torch.testing.assert_close(product.double(), expected, rtol=tolerance, atol=absolute, msg=f"seed {seed}")
    return "right"


def main(cases: int, library: str | None = None) -> None:
    """Try every case, and print how many ended in which way."""
    if library is not None:
        torch.ops.load_library(library)
    print(dict(Counter(map(try_case, range(cases)))))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
