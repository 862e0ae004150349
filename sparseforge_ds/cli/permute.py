"""`sparseforge permute`: a dense model with its channels in the order that suits a pattern best."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports
from sparseforge_ds.cli.printing import printable

if TYPE_CHECKING:
    from sparseforge_ds.config import SparseForgeConfig
    from sparseforge_ds.extras.basis.permutation.dense_folder import DenseFolder
    from sparseforge_ds.extras.basis.permutation.find import SearchSettings
    from sparseforge_ds.extras.basis.permutation.record import Permutation

DIMENSIONS = ("mlp", "mlp+heads", "all")

_EPILOG = """\
dimensions:
  mlp        the inner dimension of every MLP and of every expert
  mlp+heads  also the values of every key-value head, and the latents of latent attention
  all        also the residual stream, in one order for all layers

OUT is an ordinary model of its family and computes the same function as MODEL, within rounding. Train it as --model;
the teacher may be either. OUT/permutation.json records the search for the order, and runs and exports of OUT carry it
along.

By magnitude, weights are read one at a time. With --text the whole model is loaded, on the GPU where there is one, and
the score is Wanda's, |W| times the norm of the input.

examples:
  sparseforge permute models/Qwen3-14B models/Qwen3-14B-permuted
  sparseforge permute models/Qwen3-14B models/Qwen3-14B-permuted --text calibration.jsonl --dimensions mlp+heads
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge permute`."""
    parser = commands.add_parser(
        "permute",
        help="reorder the channels of a dense model so that a pattern keeps more of it; its function stays the same",
        description="Reorder the channels of a dense model, so that large weights share fewer groups of the pattern. "
        "OUT appears only when it is complete.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="the dense model: a folder of safetensors")
    add("out", metavar="OUT", help="folder to write; must not exist or be empty")
    add("--dimensions", default="all", choices=DIMENSIONS, help="see below (default: all)")
    add("--pattern", default="2:4", help="the n:m pattern that the model is going to have (default: 2:4)")
    add("--exclude", nargs="+", default=[], metavar="GLOB", help="weights that stay dense, as in the sparseforge block")
    add(
        "--text", help="calibration text, a file of any kind that training reads, or stdlib:train: score by activations"
    )
    add("--text_field", metavar="NAME", help="field of a record that holds the text (default: text)")
    add("--sequences", type=int, metavar="N", help="sequences of --text to read, at most (default: 32)")
    add("--seq_length", type=int, metavar="N", help="tokens of a sequence (default: 512, or all the model reads)")
    add("--rows", type=int, default=2048, metavar="N", help="outputs to score a dimension, at most (default: 2048)")
    add("--seed", type=int, default=0, help="seed of the sample and of the search (default: 0)")
    add("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    add("--workers", type=int, help="threads that write (default: one per processor, at most 8)")
    parser.set_defaults(run=run, keys_are_flags=True)


def run(args: argparse.Namespace) -> int:
    """Permute a model, and print what the pattern keeps before and after."""
    with large_imports():
        from sparseforge_ds.config import SparseForgeConfig
        from sparseforge_ds.evaluate.scored_text import require_text_field
        from sparseforge_ds.export.unused import describe_unused
        from sparseforge_ds.export.writer import parse_size, unfinished_folder
        from sparseforge_ds.extras.basis.permutation.dense_folder import DenseFolder
        from sparseforge_ds.extras.basis.permutation.find import SearchSettings

    parse_size(args.max_shard_size)  # before work that ends in a file of that size
    for flag in ("workers", "sequences", "rows"):
        if (value := getattr(args, flag)) is not None and value < 1:
            raise ValueError(f"--{flag} {value}: use an integer >= 1")
    for flag in ("text_field", "sequences", "seq_length"):
        if args.text is None and getattr(args, flag) is not None:
            raise ValueError(
                f"--{flag} {getattr(args, flag)}: it belongs to --text, which scores by activations; give it"
            )
    if args.text is not None:
        require_text_field([args.text], args.text_field)
    require_model(args.model, hub=False)
    config = SparseForgeConfig(pattern=args.pattern, exclude=tuple(args.exclude), seed=args.seed)
    settings = SearchSettings(config.parsed_pattern, args.dimensions, args.rows, config.seed)
    dense = DenseFolder(args.model)
    dense.require_channels()
    if dense.unused:
        print(printable(describe_unused(args.model, dense.unused)))

    # Search for the order, and write the model.
    with unfinished_folder(args.out) as folder:
        permutation = _find(args, config, settings, dense)
        dense.write(permutation, folder, args.max_shard_size, args.workers)

    # Print the gain.
    for part, score in permutation.facts["kept_score"].items():
        before = score["before"]
        after = score["after"]
        lost = 1 - (1 - after) / (1 - before) if before < 1 else 0.0
        print(f"{part}: {config.pattern} keeps {after:.2%} of the score, {before:.2%} before: {lost:.1%} less is lost")
    seconds = permutation.facts["seconds"]
    print(f"{args.out}: {len(permutation.index_BC)} dimensions in a new order, found in {seconds:.0f} s")
    return 0


def _find(
    args: argparse.Namespace, config: SparseForgeConfig, settings: SearchSettings, dense: DenseFolder
) -> Permutation:
    import torch

    # Without a text, weights decide alone, and the model is not built.
    if args.text is None:
        with large_imports():
            from sparseforge_ds.model.architecture import bare_model
            from sparseforge_ds.model.registration import load_config

        empty = bare_model(load_config(dense.folder, args.model))
        shapes = {name: tuple(parameter.shape) for name, parameter in empty.named_parameters()}
        return dense.find(config, settings, shapes, "cuda" if torch.cuda.is_available() else "cpu")

    with large_imports():
        from sparseforge_ds.evaluate.calibration import calibration_windows
        from sparseforge_ds.evaluate.finished_model import load_model
        from sparseforge_ds.extras.basis.permutation.input_squares import find_by_activations

    # With a text, weights are scored by the activations that they meet.
    sequences = 32 if args.sequences is None else args.sequences
    text_field = args.text_field or "text"
    batches = calibration_windows(args.model, dense.config, args.text, sequences, args.seq_length, text_field)
    print(f"{args.text}: {len(batches)} sequences of {batches[0].numel()} tokens are read")
    return find_by_activations(load_model(str(Path(args.model))), batches, config, settings)
