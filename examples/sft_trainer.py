#!/usr/bin/env python3
"""TRL's SFTTrainer makes a 2:4 model from prompts and completions; the lines that end in `# sparse` are new.

deepspeed examples/sft_trainer.py --deepspeed examples/zero2.json --output_dir runs/sft --max_steps 200 --max_length 256
sparseforge consolidate runs/sft/checkpoint-200 models/sft_2to4

A prompt is not trained on: its labels are -100, for the teacher and for the curvature as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, TrlParser

import sparseforge_ds
from sparseforge_ds.integrations.transformers import SparseForgeMixin  # sparse

ASSETS = Path(sparseforge_ds.__file__).parent / "assets"


class SparseForgeSFTTrainer(SparseForgeMixin, SFTTrainer):  # sparse
    """The mixin stands first."""


@dataclass
class ScriptArguments:
    """What is trained on what; everything else is one of the training arguments."""

    model: str = field(default=str(ASSETS / "stdlib_llama"), metadata={"help": "folder or hub id; also the teacher"})
    text: str = field(
        default=str(ASSETS / "stdlib_text" / "train.jsonl.gz"),
        metadata={"help": "JSON lines with the field text, whose first line is taken for the prompt"},
    )


def prompt_and_completion(row: dict[str, str]) -> dict[str, str]:
    """The first line of a document, and what follows it."""
    prompt, newline, completion = row["text"].partition("\n")
    return {"prompt": prompt + newline, "completion": completion}


def main() -> None:
    """Train and save."""
    script, args = TrlParser((ScriptArguments, SFTConfig)).parse_args_and_config()
    text = load_dataset("json", data_files=script.text, split="train")
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = SparseForgeSFTTrainer(  # sparse
        model=AutoModelForCausalLM.from_pretrained(script.model),
        args=args,
        train_dataset=text.map(prompt_and_completion, remove_columns=text.column_names),
        processing_class=tokenizer,
        teacher=script.model,  # sparse
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
