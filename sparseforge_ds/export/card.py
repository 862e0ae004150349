"""README.md of an export whose weights compute nonsense without the low-rank adapter beside them."""

from __future__ import annotations

from pathlib import Path

from sparseforge_ds.export.source import Source

_CARD = """\
# A {pattern} model in two parts

This model is the weights in `model*.safetensors` **and** the low-rank branch (SLoRB, a PEFT LoRA adapter) in
`adapter_model.safetensors`. {why} Nothing else warns whoever loads the weights alone.

With peft installed, transformers loads both:

```python
import peft  # fails where it is missing; transformers itself would leave the adapter out and say nothing
{packed}from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
```

An inference engine that is not told of the adapter computes with the weights alone: give it the adapter as its LoRA
(rank {rank}), or do not use it for this model. Merging the adapter into the weights would fill what was pruned.

`sparsity.json` says which weights are sparse and where they come from; `sparseforge verify` checks them and the
adapter.
"""
_SHIFTED = (
    "Before training, every run of weights gave up a part of itself to the branch: alone, the weights are useless."
)
_LEARNED = "Both were trained together: alone, the weights are a worse model."


def write_card(source: Source, folder: Path, packed: bool) -> None:
    """Write it, for a source that has branches."""
    text = _CARD.format(
        pattern=source.pattern,
        why=_SHIFTED if source.shifted else _LEARNED,
        packed="import sparseforge_ds  # knows the packed24 format\n" if packed else "",
        rank=max(shape[1] for shape in source.branches.values()),
    )
    (folder / "README.md").write_text(text)
