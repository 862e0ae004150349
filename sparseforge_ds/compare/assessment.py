"""What came out of a run: the exported model, whether it is sparse, its perplexity, and where its mask lies."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.compare.settings import CompareConfig, Protocol
from sparseforge_ds.compare.texts import Texts
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.evaluate.perplexity import measure
from sparseforge_ds.evaluate.pretrained import adapter_of, load_model, load_tokenizer, prune_by_magnitude
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.model.families import prunable_weights


@dataclass(frozen=True)
class Baselines:
    """The dense model and its one-shot magnitude projection."""

    dense_validation: float
    dense_test: float
    magnitude_validation: float
    magnitude_test: float
    dtype: str
    pattern: str


class Evaluator:
    """Measures models, all in the same way; several threads may use it."""

    def __init__(self, config: CompareConfig, texts: Texts) -> None:
        self.config = config
        self.texts = texts
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config.model)
        first = next(iter(config.methods.values()))
        self.pruned = SparseForgeConfig.from_dict(config.block(first, config.budgets[0]))
        self._dtype = "auto"
        self._loading = threading.Lock()  # transformers sets what is global while it loads
        self._magnitude: dict[str, np.ndarray] = {}

    @property
    def conditions(self) -> dict[str, Any]:
        """What a perplexity depends on besides the model."""
        protocols = [self.config.validation_text.protocol, self.config.test_text.protocol]
        return {"texts": self.texts.identity, "protocols": protocols, "length": self.config.evaluation_length}

    def baselines(self, known: dict[str, Any]) -> Baselines:
        """The dense model, then the same after magnitude pruning, whose mask is kept in a bit a weight. What an
        earlier start has measured, `known`, is not measured again."""
        model = load_model(self.config.model, "auto")
        self._dtype = str(model.dtype).removeprefix("torch.")
        dense = None if known else self._perplexities(model)
        prune_by_magnitude(model, self.pruned.parsed_pattern, self.pruned)
        self._magnitude = {w.name: _packed(model.get_parameter(w.name)) for w in prunable_weights(model, self.pruned)}
        if dense is None:
            return Baselines(**known)
        return Baselines(*dense, *self._perplexities(model), self._dtype, self.pruned.pattern)

    def export(self, run_folder: Path, out: Path) -> dict[str, Any]:
        """Make a model of a run, which checks every group of it; what `sparsity.json` says, in sums."""
        if not (out / "sparsity.json").exists():  # else an earlier start was interrupted just after it
            export(open_source(str(run_folder), None, self._dtype), out, workers=1, skip_proof=True)
        record = json.loads((out / "sparsity.json").read_text())
        weights = record["weights"].values()
        groups, nonzeros = (sum(weight[key] for weight in weights) for key in ("groups", "nonzeros"))
        zeros = 1 - nonzeros / sum(math.prod(weight["shape"]) for weight in weights)
        return {"pattern": record["pattern"], "weights": len(weights), "groups": groups, "zeros": zeros}

    def validate(self, folder: Path) -> dict[str, Any]:
        """Perplexity on the validation text, and agreement of every weight's pattern with magnitude."""
        model = self._load(folder)
        # peft calls what an adapter is put on a base layer
        parameters = {name.replace(".base_layer.", "."): value for name, value in model.named_parameters()}
        pruned = json.loads((folder / "sparsity.json").read_text())["weights"]
        agreement = {n: _shared(_packed(parameters[n]), bits) for n, bits in self._magnitude.items() if n in pruned}
        return {"validation_perplexity": self._perplexity(model, "validation"), "agreement": agreement}

    def test(self, folder: Path) -> float:
        """Perplexity on the test text."""
        return self._perplexity(self._load(folder), "test")

    def _load(self, folder: Path) -> PreTrainedModel:
        with self._loading:
            return load_model(str(folder), self._dtype, adapter_of(str(folder), None))

    def _perplexities(self, model: PreTrainedModel) -> tuple[float, float]:
        return self._perplexity(model, "validation"), self._perplexity(model, "test")

    def _perplexity(self, model: PreTrainedModel, which: Literal["validation", "test"]) -> float:
        config, documents = self.config, getattr(self.texts, which)
        protocol: Protocol = getattr(config, f"{which}_text").protocol
        length, batch = config.evaluation_length, config.evaluation_batch
        return measure(model, self.tokenizer, documents, protocol, length, batch_size=batch).perplexity


def _packed(weight: Tensor) -> np.ndarray:
    """(ceil(n / 8),) bytes: which of the n members of a weight are not zero."""
    return np.packbits((weight.detach() != 0).flatten().to("cpu", torch.bool).numpy())


def _shared(mine: np.ndarray, magnitude: np.ndarray) -> float:
    """The share of what magnitude keeps that is kept here too."""
    both, all_of = (int(np.unpackbits(bits).sum(dtype=np.int64)) for bits in (mine & magnitude, magnitude))
    return both / max(1, all_of)
