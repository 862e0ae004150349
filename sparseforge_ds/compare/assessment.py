"""What came out of a run: the exported model, whether it is sparse, its perplexity, and where its mask lies."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.compare.settings import CompareConfig, Protocol
from sparseforge_ds.compare.texts import Texts
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.evaluate.perplexity import NotFiniteError, measure
from sparseforge_ds.evaluate.pretrained import adapter_of, load_model, load_tokenizer, prune_by_magnitude
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source


class Evaluator:
    """Measures models, all in the same way; several threads may use it."""

    def __init__(self, config: CompareConfig, texts: Texts, pruned: SparseForgeConfig) -> None:
        """`pruned` says which weights of the dense model the magnitude baseline prunes, and into which pattern."""
        self.config = config
        self.texts = texts
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config.model)
        self.pruned = pruned
        self._dtype = "auto"
        self._loading = threading.Lock()  # transformers sets what is global while it loads

    @property
    def conditions(self) -> dict[str, Any]:
        """What a perplexity depends on besides the model."""
        protocols = [self.config.validation_text.protocol, self.config.test_text.protocol]
        return {"texts": self.texts.identity, "protocols": protocols, "length": self.config.evaluation_length}

    def baselines(self, known: dict[str, Any]) -> dict[str, Any]:
        """Perplexities of the dense model, then of the same after magnitude pruning, and the dtype that all models are
        measured in; `known` are those that an earlier start has measured."""
        if not known:
            model = load_model(self.config.model, "auto")
            known = {"dtype": str(model.dtype).removeprefix("torch.")}
            try:
                known |= {f"dense_{which}": self._perplexity(model, which) for which in ("validation", "test")}
            except NotFiniteError as error:
                raise ValueError(f"model {self.config.model}: {error}") from None
            prune_by_magnitude(model, self.pruned.parsed_pattern, self.pruned)
            known |= {f"magnitude_{which}": self._perplexity(model, which) for which in ("validation", "test")}
        self._dtype = known["dtype"]
        return known

    def export(self, run_folder: Path, out: Path) -> dict[str, Any]:
        """Make a model of a run, which checks every group of it; what `sparsity.json` says, in sums."""
        if not (out / "sparsity.json").exists():  # else an earlier start was interrupted just after it
            export(open_source(str(run_folder), None, self._dtype), out, workers=1, skip_proof=True)
        record = json.loads((out / "sparsity.json").read_text())
        weights = record["weights"].values()
        groups, nonzeros = (sum(weight[key] for weight in weights) for key in ("groups", "nonzeros"))
        zeros = 1 - nonzeros / sum(math.prod(weight["shape"]) for weight in weights)
        return {"pattern": record["pattern"], "weights": len(weights), "groups": groups, "zeros": zeros}

    def perplexity(self, folder: Path, which: Literal["validation", "test"]) -> float:
        """Of an exported model on one of the texts."""
        with self._loading:
            model = load_model(str(folder), self._dtype, adapter_of(str(folder), None))
        return self._perplexity(model, which)

    def _perplexity(self, model: PreTrainedModel, which: Literal["validation", "test"]) -> float:
        config, documents = self.config, getattr(self.texts, which)
        protocol: Protocol = getattr(config, f"{which}_text").protocol
        length, batch = config.evaluation_length, config.evaluation_batch
        return measure(model, self.tokenizer, documents, protocol, length, batch_size=batch).perplexity
