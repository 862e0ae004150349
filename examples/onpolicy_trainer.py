#!/usr/bin/env python3
r"""On-policy distillation by TRL's DistillationTrainer: the lines that end in `# sparse` make the student 2:4.

deepspeed examples/onpolicy_trainer.py --deepspeed examples/zero2.json --output_dir runs/onpolicy --max_steps 200 \
    --learning_rate 1e-3
sparseforge consolidate runs/onpolicy/checkpoint-200 models/onpolicy_2to4

The student writes the answers, and the teacher's distribution of every token of them is what it learns. A student that
is 2:4 already keeps its zeros with `--keep_mask true`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer, TrlParser

import sparseforge_ds
from sparseforge_ds.integrations.transformers import SparseForgeMixin  # sparse

ASSETS = Path(sparseforge_ds.__file__).parent / "assets"
KEEP_MASK = {"method": "naive_retrain", "importance": "magnitude"}  # the largest of each group: those that are not 0


class SparseForgeDistillationTrainer(SparseForgeMixin, DistillationTrainer):  # sparse
    """The mixin stands first."""


@dataclass
class ScriptArguments:
    """Models and prompts; everything else is one of the training arguments."""

    model: str = field(default=str(ASSETS / "stdlib_llama"), metadata={"help": "student: folder or hub id"})
    teacher: str = field(default=str(ASSETS / "stdlib_llama"), metadata={"help": "dense model: folder or hub id"})
    text: str = field(
        default=str(ASSETS / "stdlib_text" / "train.jsonl.gz"),
        metadata={"help": "JSON lines with the field prompt, or with text, whose first line is taken for the prompt"},
    )
    keep_mask: bool = field(default=False, metadata={"help": "the model is 2:4 already: train what is not 0"})


def prompt_of(row: dict[str, str]) -> dict[str, str]:
    """Return the prompt of a row, or the first line of its text."""
    return {"prompt": row.get("prompt") or row["text"].partition("\n")[0] + "\n"}


def main() -> None:
    """Train and save."""
    script, args = TrlParser((ScriptArguments, DistillationConfig)).parse_args_and_config()
    text = load_dataset("json", data_files=script.text, split="train")
    tokenizer = AutoTokenizer.from_pretrained(script.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = SparseForgeDistillationTrainer(  # sparse
        model=AutoModelForCausalLM.from_pretrained(script.model),
        teacher_model=AutoModelForCausalLM.from_pretrained(script.teacher),
        args=args,
        train_dataset=text.map(prompt_of, remove_columns=text.column_names),
        processing_class=tokenizer,
        sparseforge=KEEP_MASK if script.keep_mask else None,  # sparse
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
