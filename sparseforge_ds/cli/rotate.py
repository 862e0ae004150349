"""`sparseforge rotate`: a dense model in the basis in which a pattern costs it least."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sparseforge_ds.cli.given_model import require_model
from sparseforge_ds.cli.imports import large_imports

_EPILOG = """\
OUT is an ordinary model of its family and computes the same function as MODEL, within rounding. Its residual stream and
the values of its heads are rotated, and its weights have absorbed the rotations and the gains of the norms. Each norm
keeps the size of its gains, so that learning rates suit OUT as they suit MODEL. A head that was tied to the embedding
has a weight of its own. Train it as --model, without --teacher; it may be permuted too.

Memory, on the GPU where there is one, holds the whole model and four matrices of moments a layer, each as wide as the
model.

examples:
  sparseforge rotate models/Qwen3-14B models/Qwen3-14B-rotated --text calibration.jsonl
  sparseforge rotate models/gpt2 models/gpt2-rotated --text calibration.jsonl --sequences 128 --steps 1000
"""


def register(commands: Any) -> None:
    """Add the parser of `sparseforge rotate`."""
    parser = commands.add_parser(
        "rotate",
        help="rotate the hidden vectors of a dense model so that a pattern costs less; its function stays the same",
        description="Rotate the hidden vectors of a dense model, so that the pattern removes the least of its score. "
        "OUT appears only when it is complete and computes the same function as MODEL.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="the dense model: a folder of safetensors")
    add("out", metavar="OUT", help="folder to write; must not exist or be empty")
    add("--text", required=True, help="calibration text: a file of any kind that training reads, or stdlib:train")
    add("--text_field", metavar="NAME", help="field of a record that holds the text (default: text)")
    add("--pattern", default="2:4", help="the n:m pattern that the model is going to have (default: 2:4)")
    add("--exclude", nargs="+", default=[], metavar="GLOB", help="weights that stay dense, as in the sparseforge block")
    add("--sequences", type=int, default=64, metavar="N", help="sequences of --text to read, at most (default: 64)")
    add("--seq_length", type=int, metavar="N", help="tokens of a sequence (default: 512, or all the model reads)")
    add("--steps", type=int, default=600, metavar="N", help="steps of the search (default: 600)")
    add("--seed", type=int, default=0, help="seed of the labels and of the search (default: 0)")
    add("--max_shard_size", default="5GB", help="largest safetensors file (default: 5GB)")
    parser.set_defaults(run=run, keys_are_flags=True)


def run(args: argparse.Namespace) -> int:
    """Rotate a model, and print how much less the pattern removes."""
    for name in ("sequences", "steps"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name} {value}: use an integer >= 1")
    with large_imports():
        from sparseforge_ds.checkpoint.disk import write_json
        from sparseforge_ds.config import SparseForgeConfig
        from sparseforge_ds.evaluate.calibration import calibration_windows
        from sparseforge_ds.evaluate.finished_model import load_model
        from sparseforge_ds.evaluate.scored_text import require_text_field
        from sparseforge_ds.export.model_folder import copy_other_files
        from sparseforge_ds.export.writer import parse_size, require_free, unfinished_folder
        from sparseforge_ds.extras.basis.permutation.dense_folder import DenseFolder
        from sparseforge_ds.extras.basis.rotation.rotate import require_nm, rotate
        from sparseforge_ds.model.basis import ROTATION

    require_model(args.model, hub=False)
    config = SparseForgeConfig(pattern=args.pattern, exclude=tuple(args.exclude), seed=args.seed)
    require_nm(config.parsed_pattern)
    shard_bytes = parse_size(args.max_shard_size)
    require_free(args.out)
    require_text_field([args.text], args.text_field)
    if (Path(args.model) / ROTATION).exists():
        raise ValueError(
            f"{args.model}: is rotated already ({ROTATION}); start from the dense model that it was made of"
        )
    dense_config = DenseFolder(args.model).config
    text_field = args.text_field or "text"
    batches = calibration_windows(args.model, dense_config, args.text, args.sequences, args.seq_length, text_field)
    print(f"{args.text}: {len(batches)} sequences of {batches[0].numel()} tokens are read")

    # Rotate in memory, and save like any model.
    with unfinished_folder(args.out) as folder:
        model = load_model(str(Path(args.model)))
        facts = rotate(model, batches, config, args.steps)
        model.save_pretrained(folder, max_shard_size=shard_bytes)
        copy_other_files(Path(args.model), folder)
        write_json(folder / ROTATION, facts)
    print(
        f"{args.out}: {config.pattern} removes {1 - facts['removed']:.1%} less of the score than before, found in "
        f"{facts['seconds']:.0f} s; the function stays within {facts['kl']:.1e} nats"
    )
    if facts["untied"]:
        print(f"{args.out}: the head has a weight of its own now")
    return 0
