"""What came out of a run: the exported model, whether it is sparse, its perplexity, and where its mask lies."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.evaluate.finished_model import find_adapter, load_model, load_tokenizer, prune_by_magnitude
from sparseforge_ds.evaluate.perplexity import NotFiniteError, Perplexity, Scoring, measure
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.texts import Texts


class Evaluator:
    """Measures models, all in the same way; several threads may use it."""

    def __init__(self, config: CompareConfig, texts: Texts, pruned: SparseForgeConfig) -> None:
        """`pruned` says which weights of the dense model the magnitude baseline prunes, and into which pattern."""
        self.config = config
        self.texts = texts
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config.model)
        self.pruned = pruned
        self._documents = {"validation": texts.validation, "test": texts.test, **texts.others}
        self._held_out = {"validation": config.validation_text, "test": config.test_text, **config.other_texts}
        self._dtype = "auto"
        self._dense: PreTrainedModel | None = None
        self._loading = threading.Lock()  # transformers sets what is global while it loads

    @property
    def conditions(self) -> dict[str, Any]:
        """What a perplexity depends on besides the model."""
        protocols = [text.protocol for text in self._held_out.values()]
        return {"texts": self.texts.identity, "protocols": protocols, "length": self.config.evaluation_length}

    def baselines(self, known: dict[str, Any]) -> dict[str, Any]:
        """Measure the dense model, then the same after magnitude pruning, on every text.

        Args:
            known: what an earlier start has measured; nothing is measured again.

        Returns:
            `dense_<text>` and `magnitude_<text>`, a perplexity each, `magnitude_<text>_kl`, and the dtype that all
            models are measured in.
        """
        if not known:
            dense = self._dense_model()
            known = {"dtype": str(dense.dtype).removeprefix("torch.")}
            try:
                known |= {f"dense_{text}": self._score(dense, text, None).perplexity for text in self._documents}
            except NotFiniteError as error:
                raise ValueError(f"model {self.config.model}: {error}") from None
            pruned = load_model(self.config.model, "auto")
            prune_by_magnitude(pruned, self.pruned.parsed_pattern, self.pruned)
            for text in self._documents:
                score = self._score(pruned, text, dense)
                known |= {f"magnitude_{text}": score.perplexity, f"magnitude_{text}_kl": score.kl}
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

    def measure(self, folder: Path, *texts: str) -> dict[str, float]:
        """Measure an exported model on some of the texts.

        Returns:
            `<text>_perplexity`, and `<text>_kl`, the KL divergence to the dense model in nats a token.

        Raises:
            NotFiniteError: the model computes no finite loss.
        """
        with self._loading:
            model = load_model(str(folder), self._dtype, find_adapter(str(folder), None))
            dense = self._dense_model()
        measured: dict[str, float] = {}
        for text in texts:
            score = self._score(model, text, dense)
            assert score.kl is not None
            measured |= {f"{text}_perplexity": score.perplexity, f"{text}_kl": score.kl}
        return measured

    def _dense_model(self) -> PreTrainedModel:
        """Load the dense model once for all comparisons, in the dtype of its files."""
        if self._dense is None:
            self._dense = load_model(self.config.model, "auto")
        return self._dense

    def _score(self, model: PreTrainedModel, text: str, dense: PreTrainedModel | None) -> Perplexity:
        """Score one of the texts, beside the dense model where one is given."""
        protocol = self._held_out[text].protocol
        assert protocol is not None  # `read_config` has decided it
        scoring = Scoring(protocol, self.config.evaluation_length, batch_size=self.config.evaluation_batch)
        return measure(model, self.tokenizer, self._documents[text], scoring, dense=dense)
