"""A model folder whose prunable weights are rounded to few bits without training, to compare with trained ones.

python -m benchmarks.rounded_weights MODEL OUT --bits 4                       # a dense model, a scale a row
python -m benchmarks.rounded_weights MODEL OUT --bits 4 --pattern 2:4 --group_size 64
sparseforge evaluate OUT --dense DENSE --text TEXT
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.writer import require_free
from sparseforge_ds.mask.pattern import parse_pattern
from sparseforge_ds.mask.quantization import quantized, scale_group
from sparseforge_ds.model.families import prunable_weights


@torch.no_grad()
def write_rounded(model_folder: str, out: str, bits: int, pattern: str, group_size: int | None) -> int:
    """Round the prunable weights of a model (eq. 14), write its folder, and return how many were rounded.

    Args:
        model_folder: folder of the model, dense or in the pattern.
        out: folder to write, in fp32.
        bits: of a code.
        pattern: what the weights are in, which says how many inputs a group of kept weights has.
        group_size: kept weights that share a scale; None for a scale a row.
    """
    require_free(out)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, trust_remote_code=False)
    parameters = dict(model.named_parameters())
    weights = prunable_weights(model, SparseForgeConfig())
    for weight in weights:
        parameter = parameters[weight.name]
        groups = scale_group(parse_pattern(pattern), group_size, weight.shape[weight.input_axis])
        weight_GI = groups.to_groups(parameter.reshape(-1), weight.shape, weight.input_axis)
        rounded = groups.from_groups(quantized(weight_GI, bits), weight.shape, weight.input_axis)
        parameter.copy_(rounded.view(parameter.shape))
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(model_folder, trust_remote_code=False).save_pretrained(out)
    return len(weights)


def main(argv: list[str] | None = None) -> None:
    """Round, and print how many weights were."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--bits", type=int, choices=range(2, 9), required=True, help="of a code")
    parser.add_argument("--pattern", default="4:4", help="pattern of the weights (default: 4:4, a dense model)")
    parser.add_argument("--group_size", type=int, help="kept weights that share a scale (default: all of a row)")
    args = parser.parse_args(argv)
    count = write_rounded(args.model, args.out, args.bits, args.pattern, args.group_size)
    print(f"{count} weights rounded, in {args.out}")


if __name__ == "__main__":
    main()
