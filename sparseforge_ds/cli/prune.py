"""`sparseforge prune`: a sparse model from a dense one and some text, in minutes, without a training run."""

from __future__ import annotations

import argparse
from typing import Any

from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports

MASKS = ("sparsegpt", "annealed", "wanda", "magnitude")
TOKENS = 131072

_EPILOG = """\
Each decoder block gets its mask. Then its kept weights and norms are trained to reproduce the outputs of the dense
block. --epochs 0 does without that training: SparseGPT, Wanda or magnitude as published.

masks:
  sparsegpt  SparseGPT on the inputs that the pruned model makes; default, except for mixtures with fused experts
  annealed   soft masks, annealed by the error of the block; default for mixtures with fused experts
  wanda      |W| times the norm of the input
  magnitude  |W|

Weights are read from MODEL block by block. Memory holds one block in fp32 with Adam's moments, and the hidden states of
all tokens, which go to the disk where they do not fit. OUT.part keeps finished blocks: after a stop, the same command
goes on from there.

examples:
  sparseforge prune models/Qwen3-14B models/qwen3_14b_2to4 --text c4.jsonl --tokens 524288 --seq_length 2048
  sparseforge prune models/SmolLM2-135M models/smollm2_sparsegpt --text c4.jsonl --epochs 0
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge prune`."""
    parser = commands.add_parser(
        "prune",
        help="make a 2:4 model in minutes: masks, and kept weights trained block by block, without a training run",
        description="Prune a dense model block by block, and train each block to reproduce its dense outputs. OUT "
        "appears only when it is complete and verified.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="the dense model: a folder of safetensors")
    add("out", metavar="OUT", help="folder to write; must not exist or be empty")
    add("--text", required=True, help="text to prune on, as for `sparseforge evaluate`")
    add("--pattern", default="2:4", help="the pattern that every pruned weight gets (default: 2:4)")
    add("--mask", choices=MASKS, help="source of the masks, see below")
    add("--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of --text that are read (default: {TOKENS})")
    add("--epochs", type=int, default=4, metavar="N", help="passes of a block's training over them (default: 4)")
    add("--rate", type=float, metavar="R", help="Adam's rate, relative to the RMS of a block's weights (default: 0.02)")
    add("--batch", type=int, metavar="N", help="sequences of an Adam step (default: 1/128 of all, 1K to 16K tokens)")
    add("--seq_length", type=int, metavar="N", help="tokens of a sequence (default: 512, or all the model reads)")
    add("--exclude", nargs="+", default=[], metavar="GLOB", help="weights that stay dense, as in the sparseforge block")
    add("--any_family", action="store_true", help="prune a family without rows, by the attributes of its layers")
    add("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    add("--seed", type=int, default=0, help="seed of the order of sequences (default: 0)")
    add("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prune a model, and print the number of its groups."""
    # Settle the settings, and check everything that needs no weights.
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: use an integer >= 1")
    with large_imports():
        import torch

        from sparseforge_ds.config import SparseForgeConfig, StartConfig
        from sparseforge_ds.evaluate.finished_model import load_tokenizer
        from sparseforge_ds.export.writer import parse_size, require_free
        from sparseforge_ds.model.registration import load_config
        from sparseforge_ds.prune.block_by_block import PruneSettings, prune
        from sparseforge_ds.prune.sequences import read_sequences

    rate = StartConfig.rate if args.rate is None else args.rate
    start = StartConfig(mask=args.mask, tokens=args.tokens, epochs=args.epochs, rate=rate, batch=args.batch)
    block = {"method": "oneshot", "pattern": args.pattern, "exclude": args.exclude, "seed": args.seed}
    config = SparseForgeConfig.from_dict(block)
    shard_bytes = parse_size(args.max_shard_size)
    require_model(args.model, hub=False)
    require_free(args.out)
    device = _device(args.device, torch)

    # Read the text.
    text = read_sequences(
        load_tokenizer(args.model), load_config(args.model, args.model), args.text, args.tokens, args.seq_length
    )
    if args.tokens - text.numel() >= text.shape[1]:
        print(f"note: {args.text} has {text.numel():,} of the {args.tokens:,} tokens that were asked for")

    # Prune.
    settings = PruneSettings(config, start, args.any_family, args.text)
    result = prune(args.model, args.out, text, settings, device, shard_bytes)
    weights = result.record["weights"].values()
    print(
        f"{args.out}: {len(weights)} weights in {result.record['pattern']}, "
        f"{sum(row['groups'] for row in weights):,} groups, verified; {result.seconds:.0f} s"
    )
    return 0


def _device(name: str | None, torch: Any) -> Any:
    """Return the device to prune on; ValueError where it cannot be used."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0][:200]
        raise ValueError(f"--device {name}: cannot be used here ({why}); use cpu, or cuda with a GPU") from None
    return device
