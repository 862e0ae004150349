#!/usr/bin/env python3
"""A loop of accelerate's that makes a 2:4 model; the lines that end in `# sparse` are new.

accelerate launch --num_processes 2 --use_deepspeed --deepspeed_config_file examples/zero2.json \
    examples/accelerate_loop.py --output_dir runs/accelerate --epochs 2
sparseforge consolidate runs/accelerate/epoch_2/pytorch_model models/accelerate_2to4 --model MODEL
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparseforge_ds as sf  # sparse

ASSETS = Path(sf.__file__).parent / "assets"


def main() -> None:
    """Train, save after every epoch, and go on where an earlier launch was saved."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ASSETS / "stdlib_llama"))
    parser.add_argument("--text", default=str(ASSETS / "stdlib_text" / "train.jsonl.gz"))
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--resume", help="one of the folders epoch_* of an earlier launch")
    args = parser.parse_args()

    on_cpus = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(kwargs_handlers=on_cpus)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    text = load_dataset("json", data_files=args.text, split="train")
    tokens = torch.tensor([token for row in text for token in tokenizer(row["text"])["input_ids"]])
    loader = DataLoader(tokens[: len(tokens) // args.length * args.length].view(-1, args.length), batch_size=2)

    block = accelerator.state.deepspeed_plugin.deepspeed_config["sparseforge"]  # sparse
    config = sf.SparseForgeConfig.from_dict(block)  # sparse
    model = sf.prepare(model, config)  # sparse
    optimizer = torch.optim.AdamW(sf.param_groups(model, config, weight_decay=0.01), lr=1e-3)  # sparse
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    forge = sf.SparseForge(engine, config, max_steps=len(loader) * args.epochs)  # sparse
    if args.resume is not None:
        accelerator.load_state(args.resume)
    first_epoch, done = divmod(forge.step_count, len(loader))
    for epoch in range(first_epoch, args.epochs):
        for batch in accelerator.skip_first_batches(loader, done if epoch == first_epoch else 0):
            loss = engine(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)  # calls engine.step
            forge.step()  # sparse
            accelerator.print(f"step {forge.step_count} loss {loss.item():.4f} {forge.phase}")
        accelerator.save_state(args.output_dir / f"epoch_{epoch + 1}")
    forge.finish()  # sparse
    accelerator.end_training()


if __name__ == "__main__":
    main()
