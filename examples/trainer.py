#!/usr/bin/env python3
"""transformers' Trainer makes a 2:4 model. The three lines that end in `# sparse` are all that is not as in any script.

deepspeed examples/trainer.py --deepspeed examples/zero2.json --output_dir runs/trainer --max_steps 200
sparseforge consolidate runs/trainer/checkpoint-200 models/trainer_2to4
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainingArguments,
    default_data_collator,
)

import sparseforge_ds
from sparseforge_ds.integrations.transformers import SparseForgeTrainer  # sparse

ASSETS = Path(sparseforge_ds.__file__).parent / "assets"


@dataclass
class ScriptArguments:
    """What is trained on what; everything else is one of the training arguments."""

    model: str = field(default=str(ASSETS / "stdlib_llama"), metadata={"help": "folder or hub id; also the teacher"})
    text: str = field(
        default=str(ASSETS / "stdlib_text" / "train.jsonl.gz"), metadata={"help": "JSON lines with the field text"}
    )
    length: int = field(default=256, metadata={"help": "tokens of a sequence"})


def main() -> None:
    """Tokenize, train, save."""
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(script.model)
    model = AutoModelForCausalLM.from_pretrained(script.model)

    def sequences(rows: dict[str, list[str]]) -> dict[str, Any]:
        tokens = list(chain.from_iterable(tokenizer(rows["text"])["input_ids"]))
        whole = [tokens[at : at + script.length] for at in range(0, len(tokens) - script.length + 1, script.length)]
        return {"input_ids": whole, "labels": whole}

    with args.main_process_first():
        text = load_dataset("json", data_files=script.text, split="train")
        dataset = text.map(sequences, batched=True, remove_columns=text.column_names)

    trainer = SparseForgeTrainer(  # sparse
        model=model,
        args=args,
        train_dataset=dataset,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        teacher=script.model,  # sparse
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
