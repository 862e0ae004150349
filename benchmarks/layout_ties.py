"""Differences of fp32 masks between two layouts, where sums in another order flip a near tie.

    python benchmarks/layout_ties.py --model stories260K --text train.jsonl --seeds 8

For every seed it trains the same run at two ZeRO stages, and counts mask entries that differ at the end.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.zero_partitions import KEPT

BATCH = 8


def train(args: argparse.Namespace, folder: Path, stage: int, seed: int) -> Checkpoint:
    """Train one run on two ranks and return its last checkpoint."""
    content = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "sparseforge": {"max_steps": args.steps},
    }
    config = folder / f"zero{stage}.json"
    run = folder / f"stage{stage}_seed{seed}"
    config.write_text(json.dumps(content))
    flags = {"deepspeed": config, "model": args.model, "dataset": args.text, "output_dir": run, "seed": seed}
    flags |= {"seq_length": 64, "learning_rate": args.learning_rate, "save_every": 0, "report_to": "none"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "sparseforge_ds", "train", *(f"--{name}={value}" for name, value in flags.items())]
    subprocess.run(command, check=True, capture_output=True)
    return Checkpoint(run / "checkpoints" / f"step_{args.steps:06d}")


def main() -> None:
    """Print one line a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a dense model")
    parser.add_argument("--text", required=True, help="file of text")
    parser.add_argument("--stages", type=int, nargs=2, default=(2, 3))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning_rate", type=float, default=2e-3)
    args = parser.parse_args()
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            first, second = (train(args, Path(name), stage, seed) for stage in args.stages)
            weights = [entry["name"] for entry in first.client_state["sparseforge"]["weights"]]
            masks = [(first.state(weight, KEPT), second.state(weight, KEPT)) for weight in weights]
            flipped = sum(int((a != b).sum()) for a, b in masks)
            pairs = [(first.weight(weight), second.weight(weight)) for weight in weights]
            entries = sum(a.numel() for a, _ in pairs)
            apart = max(float((a - b).abs().max()) for a, b in pairs)
        print(
            f"seed {seed}: {flipped:,} of {entries:,} mask entries differ, weights by at most {apart:.1e}", flush=True
        )


if __name__ == "__main__":
    main()
