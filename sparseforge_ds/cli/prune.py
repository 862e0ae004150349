"""`sparseforge prune`: a sparse model from a dense one and some text, in minutes, without a training run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports

MASKS = ("sparsegpt", "wanda", "magnitude")
TOKENS = 131072

_EPILOG = """\
Each decoder block gets its first masks. Then its weights and norms are trained to reproduce the outputs of the dense
block; in the first part of that, masks are soft and move. --soft 0 keeps the first masks, and --epochs 0 trains
nothing: SparseGPT, Wanda or magnitude as published.

first masks:
  sparsegpt  SparseGPT on the inputs that the pruned model makes; default, except for fused experts and tiles
  wanda      |W| times the norm of the input; default for these
  magnitude  |W|

Weights are read from MODEL block by block. Memory holds one block in fp32 with Adam's moments, and the hidden states of
all tokens, which go to the disk where they do not fit. OUT.part keeps finished blocks: after a stop, the same command
goes on from there. --dry_run prints what a prune would need, and changes nothing.

examples:
  sparseforge prune models/Qwen3-14B models/qwen3_14b_2to4 --text c4.jsonl --tokens 524288 --seq_length 2048
  sparseforge prune models/SmolLM2-135M models/smollm2_sparsegpt --text c4.jsonl --epochs 0
  sparseforge prune Qwen/Qwen3-14B models/out --text c4.jsonl --tokens 2097152 --seq_length 2048 --dry_run --gpu h100

exit code: 0 done, or with --dry_run it fits; 1 it does not fit; 2 an error, printed as one line
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge prune`."""
    parser = commands.add_parser(
        "prune",
        help="make a 2:4 model in minutes: masks and weights trained block by block, without a training run",
        description="Prune a dense model block by block, and train each block to reproduce its dense outputs. OUT "
        "appears only when it is complete and verified.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="the dense model: a folder of safetensors")
    add("out", metavar="OUT", help="folder to write; must not exist or be empty")
    add("--text", required=True, help="file of text to prune on, of the kinds that `sparseforge evaluate` reads")
    add("--text_field", metavar="NAME", help="field of a record that holds the text (default: text)")
    add("--pattern", default="2:4", help="the pattern that every pruned weight gets (default: 2:4)")
    add("--mask", choices=MASKS, help="source of the first masks, see below")
    add("--soft", type=float, metavar="SHARE", help="share of a block's steps in which masks move (default: 0.4)")
    add("--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of --text that are read (default: {TOKENS})")
    add("--epochs", type=int, default=4, metavar="N", help="passes of a block's training over them (default: 4)")
    add("--rate", type=float, metavar="R", help="Adam's rate, relative to the RMS of each matrix (default: 0.02)")
    add(
        "--batch",
        type=int,
        metavar="N",
        help="sequences of an Adam step (default: some 512 steps, 16K tokens at most)",
    )
    add("--seq_length", type=int, metavar="N", help="tokens of a sequence (default: 512, or all the model reads)")
    add("--exclude", nargs="+", default=[], metavar="GLOB", help="weights that stay dense, as in the sparseforge block")
    add("--any_family", action="store_true", help="prune a family without rows, by the attributes of its layers")
    add("--device", help="cpu, cuda or cuda:N (default: cuda where there is one)")
    add("--seed", type=int, help="seed of the order of sequences (default: 0)")
    add("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    add("--dry_run", action="store_true", help="print memory, disk and time, by one block that is measured")
    planned = "with --dry_run: plan for this GPU, which need not be here, such as h100; MODEL may be a hub id"
    add("--gpu", metavar="NAME", help=planned)
    add("--mfu", type=float, metavar="SHARE", help="with --gpu: share of its peak that is reached (default: 0.4)")
    parser.set_defaults(run=run, keys_are_flags=True, cure_of_memory="lower --batch or --seq_length")


def run(args: argparse.Namespace) -> int:
    """Prune a model, and print the number of its groups."""
    # Settle the settings, and check everything that needs no weights.
    for flag in ("rate", "soft", "batch", "seed") if args.epochs == 0 else ():
        if getattr(args, flag) is not None:
            raise ValueError(f"--{flag} {getattr(args, flag)}: --epochs 0 trains nothing; leave one of the two out")
    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: use an integer >= 1")
    with large_imports():
        import torch

        from sparseforge_ds.config import BlockStartConfig, SparseForgeConfig
        from sparseforge_ds.evaluate.scored_text import require_text_field, text_file
        from sparseforge_ds.export.writer import parse_size, require_free
        from sparseforge_ds.model.any_family import few_pruned
        from sparseforge_ds.model.families import coverage
        from sparseforge_ds.prune.block_by_block import PruneSettings, open_dense, prune

    rate = BlockStartConfig.rate if args.rate is None else args.rate
    soft = BlockStartConfig.soft if args.soft is None else args.soft
    block_start = BlockStartConfig(
        mask=args.mask, soft=soft, tokens=args.tokens, epochs=args.epochs, rate=rate, batch=args.batch
    )
    block = {"method": "naive_retrain", "pattern": args.pattern, "exclude": args.exclude, "seed": args.seed or 0}
    settings = PruneSettings(SparseForgeConfig.from_dict(block), block_start, args.any_family, args.text)
    parse_size(args.max_shard_size)  # before work that ends in files of that size
    _require_dry_run(args)
    require_free(args.out)
    if args.gpu is None:  # a plan for another machine needs no text
        text_file(args.text)
        require_text_field([args.text], args.text_field)
    if args.dry_run:
        return _plan(args, settings)
    require_model(args.model, hub=False)
    device = _device(args.device, torch)
    # Refuse what cannot be pruned before a long text is read.
    dense, _, pruned_weights, _ = open_dense(args.model, settings)
    if args.any_family and not args.exclude and (warning := few_pruned(coverage(dense.module, pruned_weights))):
        print(f"warning: {warning}")

    # Read the text.
    text = _read_text(args)
    if args.tokens - text.numel() >= text.shape[1]:
        print(f"note: {args.text} has {text.numel():,} of the {args.tokens:,} tokens that were asked for")

    # Prune.
    result = prune(args.model, args.out, text, settings, device, args.max_shard_size)
    weights = result.record["weights"].values()
    print(
        f"{args.out}: {len(weights)} weights in {result.record['pattern']}, "
        f"{sum(row['groups'] for row in weights):,} groups, verified; {result.seconds:.0f} s"
    )
    return 0


def _read_text(args: argparse.Namespace) -> Any:
    """Return the sequences of token ids that the model is pruned on."""
    from sparseforge_ds.evaluate.finished_model import load_tokenizer
    from sparseforge_ds.model.registration import load_config
    from sparseforge_ds.prune.sequences import read_sequences

    return read_sequences(
        load_tokenizer(args.model),
        load_config(args.model, args.model),
        args.text,
        args.tokens,
        args.seq_length,
        args.text_field or "text",
    )


def _require_dry_run(args: argparse.Namespace) -> None:
    """Reject flags of a plan that have no meaning here."""
    for flag, needed in (("gpu", "dry_run"), ("mfu", "gpu")):
        if getattr(args, flag) is not None and not getattr(args, needed):
            raise ValueError(
                f"--{flag} {getattr(args, flag)}: it belongs to --{needed}; give that too, or leave it out"
            )
    if args.gpu is not None and args.device is not None:
        raise ValueError(f"--gpu {args.gpu} and --device {args.device}: give one of them")
    if args.mfu is not None and not 1e-3 <= args.mfu <= 1:
        raise ValueError(f"--mfu {args.mfu}: use a share from 0.001 to 1")


def _plan(args: argparse.Namespace, settings: Any) -> int:
    """Print memory, disk and time, and return 1 where the memory is too small."""
    with large_imports():
        import torch

        from sparseforge_ds.evaluate.perplexity import max_positions
        from sparseforge_ds.extras.planner.machine import GPUS
        from sparseforge_ds.extras.planner.prune_plan import plan_prune
        from sparseforge_ds.model.any_family import any_family
        from sparseforge_ds.model.architecture import bare_model
        from sparseforge_ds.model.families import prunable_weights
        from sparseforge_ds.model.model_config import read_model_config
        from sparseforge_ds.prune.block_by_block import finished_blocks, folder_of_blocks
        from sparseforge_ds.prune.dense_model import DenseModel
        from sparseforge_ds.prune.sequences import length_of
        from sparseforge_ds.train.banner import layout_rows

    if args.gpu is not None and args.gpu.lower() not in GPUS:
        raise ValueError(f"--gpu {args.gpu}: known are {', '.join(GPUS)}")
    # Without files of weights, the config says what the model is.
    dense = DenseModel(args.model) if any(Path(args.model).glob("*.safetensors")) else None
    model: Any = bare_model(read_model_config(args.model, "MODEL")) if dense is None else dense.module
    config, block_start = settings.config, settings.block_start
    config = any_family(model, config) if args.any_family else config
    names = [weight.name for weight in prunable_weights(model, config)]
    dtype = (model.config.dtype or torch.bfloat16) if dense is None else dense.dtype(names)
    length = length_of(args.seq_length, max_positions(model.config))
    if args.tokens < length:
        raise ValueError(f"--tokens {args.tokens}: less than one sequence of {length}; use more")
    shape = args.tokens // length, length
    # Only this machine goes on from what is here, and the text says whether it is the same prune.
    device = _device(args.device, torch) if args.gpu is None else None
    done: set[int] = set()
    if device is not None and dense is not None and folder_of_blocks(Path(args.out)).exists():
        sequences_NS = _read_text(args)
        shape = tuple(sequences_NS.shape)
        done = finished_blocks(args.model, Path(args.out), sequences_NS, settings, device)
    hardware = (args.gpu.lower(), args.mfu or 0.4) if device is None else device
    plan = plan_prune(model, config, block_start, dtype, shape, Path(args.out), hardware, done)
    print(layout_rows(plan.lines()))
    return 0 if plan.fits else 1


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
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name}: use cpu, or cuda with a GPU")
    return device
