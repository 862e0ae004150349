"""Evaluation of a run: its exported model, the sparsity of its weights, and its perplexity."""

from __future__ import annotations

import json
import math
import os
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.evaluate.finished_model import (
    find_adapter,
    load_model,
    load_tokenizer,
    prune_by_magnitude,
)
from sparseforge_ds.evaluate.perplexity import NotFiniteError, Perplexity, Scoring, cut_text, measure
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.task_columns import TaskColumns
from sparseforge_ds.extras.studies.texts import Texts
from sparseforge_ds.model.registration import load_config


class Evaluator:
    """Measurements of models, all under the same conditions. Several threads may use it.

    Args:
        config: the comparison.
        texts: its held-out texts.
        pruned: block whose pattern and layers the magnitude baseline has.

    Raises:
        ValueError: a text or a task cannot be measured as the comparison asks.
    """

    def __init__(self, config: CompareConfig, texts: Texts, pruned: SparseForgeConfig) -> None:
        self.config = config
        self.texts = texts
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(config.model)
        self.pruned = pruned
        self._documents = {"validation": texts.validation, "test": texts.test, **texts.other_texts}
        self._held_out = {"validation": config.validation_text, "test": config.test_text, **config.other_texts}
        # What the dense model's measurement would refuse shows now, before a record is begun.
        dense = load_config(config.model, config.model)
        for name, documents in self._documents.items():
            try:
                cut_text(self.tokenizer, documents, self._scoring(name), [dense])
            except ValueError as error:
                message = str(error).replace("--seq_length", "evaluation_length")
                raise ValueError(f"{name} text: {message}") from None
        self._tasks: TaskColumns | None = None
        if config.tasks is not None:
            self._tasks = TaskColumns(config.tasks, config.evaluation_batch, config.model, self.tokenizer)
        self._dtype = "auto"
        self._dense: PreTrainedModel | None = None
        self._loading = threading.Lock()  # transformers changes global state while it loads a model

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions that a perplexity depends on, besides the model."""
        protocols = [text.protocol for text in self._held_out.values()]
        conditions = {"texts": self.texts.identity, "protocols": protocols, "length": self.config.evaluation_length}
        if self.config.tasks is None:
            return conditions
        tasks = asdict(self.config.tasks)
        if tasks["include_path"] is not None:  # the same folder from wherever the comparison is called
            tasks["include_path"] = os.path.abspath(tasks["include_path"])
        return {**conditions, "tasks": tasks}

    @property
    def task_rows(self) -> str | None:
        """Hash of what the tasks ask; None without tasks."""
        return None if self._tasks is None else self._tasks.identity

    def baselines(self, known: dict[str, Any]) -> dict[str, Any]:
        """Measure the dense model, and the same model after magnitude pruning, on every text.

        Args:
            known: measurements of an earlier launch, which are not repeated.

        Returns:
            Perplexities `dense_<text>` and `magnitude_<text>`, KL divergences `magnitude_<text>_kl`, and the dtype that
            all models are measured in. Where the pruned model has no finite loss, both are None, and
            `magnitude_diverged` says why.
        """
        if not known:
            # The dense model first: it must compute a finite loss.
            dense = self._dense_model()
            known = {"dtype": str(dense.dtype).removeprefix("torch.")}
            try:
                known |= {f"dense_{text}": self._score(dense, text, None).perplexity for text in self._documents}
            except NotFiniteError as error:
                raise ValueError(f"model {error}") from None
            # Then a pruned copy, compared with the dense model.
            pruned = load_model(self.config.model, "auto")
            prune_by_magnitude(pruned, self.pruned.parsed_pattern, self.pruned)
            for text in self._documents:
                known |= self._score_of_magnitude(pruned, text, dense)
            if self._tasks is not None:
                for name, model in (("dense", dense), ("magnitude", pruned)):
                    figures = self._tasks.measure(model, dense)
                    known |= {f"{name}_{key}": value for key, value in figures.items()}
        self._dtype = known["dtype"]
        return known

    def _score_of_magnitude(self, pruned: PreTrainedModel, text: str, dense: PreTrainedModel) -> dict[str, Any]:
        """Return perplexity and KL of the magnitude-pruned model on a text; None where fp16 overflows in it."""
        try:
            score = self._score(pruned, text, dense)
        except NotFiniteError as error:
            diverged = {"magnitude_diverged": f"{text} text: {error}"}
            return {f"magnitude_{text}": None, f"magnitude_{text}_kl": None, **diverged}
        assert score.kl is not None
        return {f"magnitude_{text}": score.perplexity, f"magnitude_{text}_kl": score.kl}

    def export(self, run_folder: Path, out: Path) -> dict[str, Any]:
        """Export the model of a run, which checks every group, and return `sparsity` of it."""
        if not (out / "sparsity.json").exists():  # an earlier launch may have been interrupted after the export
            export(open_source(str(run_folder), None, self._dtype), out, workers=1, skip_proof=True)
        return self.sparsity(out)

    def sparsity(self, out: Path) -> dict[str, Any]:
        """Return the totals of the `sparsity.json` of a model."""
        record = json.loads((out / "sparsity.json").read_text())
        weights = record["weights"].values()
        groups = sum(weight["groups"] for weight in weights)
        nonzeros = sum(weight["nonzeros"] for weight in weights)
        elements = sum(math.prod(weight["shape"]) for weight in weights)
        totals = {"pattern": record["pattern"], "weights": len(weights), "groups": groups}
        return {**totals, "elements": elements, "zeros": 1 - nonzeros / elements}

    def measure(self, folder: Path, *texts: str) -> dict[str, float]:
        """Measure an exported model on the named texts.

        Returns:
            `<text>_perplexity`, and `<text>_kl`, the KL divergence to the dense model in nats a token. With the test
            text also the figures of tasks (`task_columns`).

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
        if self._tasks is not None and "test" in texts:
            measured |= self._tasks.measure(model, dense)
        return measured

    def _dense_model(self) -> PreTrainedModel:
        """Load the dense model once for all comparisons, in the dtype of its files."""
        if self._dense is None:
            self._dense = load_model(self.config.model, "auto")
        return self._dense

    def _score(self, model: PreTrainedModel, text: str, dense: PreTrainedModel | None) -> Perplexity:
        """Measure perplexity on one text, and the KL divergence to `dense` if it is not None.

        Raises:
            NotFiniteError: the loss or the perplexity is not finite.
        """
        score = measure(model, self.tokenizer, self._documents[text], self._scoring(text), dense=dense)
        if not math.isfinite(score.perplexity):
            raise NotFiniteError(f"{model.name_or_path}: the loss is {score.nll:.4g} nats, too much for a perplexity")
        return score

    def _scoring(self, text: str) -> Scoring:
        protocol = self._held_out[text].protocol
        assert protocol is not None  # `read_config` has decided it
        return Scoring(protocol, self.config.evaluation_length, batch_size=self.config.evaluation_batch)
