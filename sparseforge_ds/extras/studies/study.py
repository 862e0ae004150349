"""One comparison, from CONFIG to its folder; finished parts are not repeated.

OUT/
  config.json      copy of CONFIG
  results.jsonl    a row for each run
  table.md         the summary, with the learning rates that were tried
  index.html       table and figures on one page
  figures/         PNG files
  records/         settings and outcome of each run
  runs/            DeepSpeed JSON, log and TensorBoard folder of each run
  models/          exported model of each run
  data/            the token cache of all runs
"""

from __future__ import annotations

import json
import math
import os
import queue
import shutil
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from sparseforge_ds.checkpoint.disk import locked
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.evaluate.perplexity import NotFiniteError
from sparseforge_ds.extras.studies.check import check_study, threads_of_environment
from sparseforge_ds.extras.studies.page import write_pages
from sparseforge_ds.extras.studies.records import Records, settled, write_rows, write_text
from sparseforge_ds.extras.studies.runs import Pruning, Run, choose_rates, prunings, result_runs, selection_runs, unique
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.training import (
    DivergedRunError,
    StoppedError,
    Trainer,
    has_checkpoint,
)

_BASELINES = "baselines"


class Study:
    """One comparison, in its folder.

    Args:
        config: the parsed CONFIG.
        out: the folder.
        text: content of the file CONFIG.

    Raises:
        ValueError: `check_study` refuses the CONFIG; the folder is not yet made then.
    """

    def __init__(self, config: CompareConfig, out: Path, text: str) -> None:
        self.config = config
        self.out = out
        self.text = text
        # Threads of this process and of those that it starts.
        fair_share = max(1, (os.cpu_count() or 1) // (config.workers * config.ranks))
        threads = config.threads or threads_of_environment() or fair_share
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        # Everything that can be refused, before the first file is written.
        self.texts, self.checks, self.evaluator = check_study(config)
        shared = Path(config.train_text).exists()
        self.trainer = Trainer(config.ranks, threads, out / "data" if shared else None)
        self.records = Records(out / "records")
        self.chosen: dict[tuple[str, int], Run] = {}
        for name in ("runs", "models"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def run(self) -> str:
        """Do the parts that are missing, write all pages, and return the table.

        Raises:
            ValueError: a run failed. The others have saved, and the same command continues.
        """
        config = self.config
        refusal = f"{self.out}: a comparison is running in it"
        with locked(self.out / ".lock", refusal, "wait for its end, or give another --out"):
            write_text(self.out / "config.json", self.text)
            self.baselines = self._measure_baselines()
            # First the runs that decide learning rates, and those that need none.
            deciding = selection_runs(config)
            untrained = prunings(config)
            self._do_all([*deciding, *untrained], {run.name for run in untrained})
            # Then choose by the validation text alone.
            records = {run.name: self.records.read(run.name) or {} for run in deciding}
            criterion = f"validation_{config.choose_by}"
            measured = {name: record.get(criterion) for name, record in records.items()}
            validation = {name: math.inf if value is None else value for name, value in measured.items()}
            self.chosen = choose_rates(config, validation)
            counting = result_runs(config, self.chosen)
            # Models of candidates that lost are not needed; the others are measured on the test text.
            names = {run.name for run in counting} | {pruning.name for pruning in untrained}
            for name in records.keys() - names:
                shutil.rmtree(self.out / "models" / name, ignore_errors=True)
            self._do_all(counting, names)
            return write_pages(self.out, config, self._write_rows(), self.texts.notes)

    @property
    def _device(self) -> dict[str, str]:
        """Kind of device here, which models are pruned and measured on."""
        return {"device": self.checks[self.config.compared_with].hardware["device"]}

    def _measure_baselines(self) -> dict[str, Any]:
        """Measure the dense and the magnitude-pruned model, or read the record of an earlier launch."""
        pruned = self.evaluator.pruned
        files = self.checks[self.config.compared_with].files["model_files"]
        wanted = {"pattern": pruned.pattern, "include": pruned.include, "exclude": pruned.exclude}
        wanted = {"model": self.config.model, "model_files": files, **wanted, **self.evaluator.conditions}
        here = {"hardware": self._device, "task_rows": self.evaluator.task_rows}
        record = self.records.open(_BASELINES, {**wanted, **here})
        measured = self.evaluator.baselines(record.get("found", {}))
        self.records.write(_BASELINES, {**record, "found": measured})
        return measured

    def _do_all(self, runs: Sequence[Run | Pruning], counting: set[str]) -> None:
        """Do all runs, `workers` at a time; the first failure stops the others, which save.

        Args:
            runs: the runs, possibly with repetitions.
            counting: names of those that are measured on the test text.
        """
        runs = unique(runs)
        # A record with other settings is refused before any run starts, and before other records are begun.
        wanted = {run.name: self._wanted(run) for run in runs}
        for name, settings in wanted.items():
            self.records.compare(name, settings)
        for name, settings in wanted.items():
            self.records.open(name, settings)
        # A slot is a worker's share of the GPUs.
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.config.workers):
            slots.put(slot)

        def work(run: Run | Pruning) -> str:
            slot = slots.get()
            try:
                return self._do(run, run.name in counting, slot)
            finally:
                slots.put(slot)

        bar = tqdm(total=len(runs), unit="run", disable=not sys.stderr.isatty(), file=sys.stderr)
        with bar, ThreadPoolExecutor(self.config.workers) as pool:
            try:
                for done in as_completed([pool.submit(work, run) for run in runs]):
                    if news := done.result():
                        bar.write(news, file=sys.stdout if bar.disable else sys.stderr)
                    bar.update()
                    self._write_rows()
            except BaseException as error:
                self.trainer.stop()
                pool.shutdown(wait=False, cancel_futures=True)
                if isinstance(error, StoppedError):
                    raise ValueError("a run was stopped from outside, and saved; the same command goes on") from None
                raise

    def _do(self, run: Run | Pruning, counts: bool, slot: int) -> str:
        """Make and measure the model of one run, as far as that is not done, and return a line about it, or ""."""
        record = self.records.open(run.name, self._wanted(run))
        folder = self.out / "runs" / run.name
        model = self.out / "models" / run.name
        news = []
        untested = counts and "test_perplexity" not in record and "diverged" not in record
        # Train or prune; also again, if the model to test was removed.
        if not settled(record) or (untested and not (model / "sparsity.json").exists()):
            if isinstance(run, Pruning):
                outcome = self._prune(run, folder, model, slot)
            else:
                content = json.dumps(run.deepspeed(self.config), indent=2) + "\n"
                write_text(folder.with_name(f"{run.name}.json"), content)
                outcome = self.train_run(run, folder, model, slot)
            record = {**{key: record[key] for key in ("wanted", "resolved") if key in record}, **outcome}
            self.records.write(run.name, record)
            shown = "validation {validation_perplexity:.4g}, KL {validation_kl:.4g}"
            news.append("diverged" if "diverged" in record else shown.format(**record))
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        # Measure on the texts that decide nothing.
        if untested and "diverged" not in record:
            try:
                record |= self.evaluator.measure(model, "test", *self.config.other_texts)
                news.append(f"test {record['test_perplexity']:.4g}, KL {record['test_kl']:.4g}")
            except NotFiniteError as error:
                record["diverged"] = f"a text that decides nothing: {error}"
                news.append("diverged")
            self.records.write(run.name, record)
        if counts and not self.config.keep_models:
            shutil.rmtree(model, ignore_errors=True)
        return f"{run.name}: {', '.join(news)}" if news else ""

    def train_run(self, run: Run, folder: Path, model: Path, slot: int) -> dict[str, Any]:
        """Train and export one run, measure it on the validation text, and return its outcome."""
        # A model may be of an earlier run of this name, whose record was removed. Only behind a checkpoint of this run
        # it is this run's, and that stays so where this launch is stopped.
        if not has_checkpoint(folder):
            shutil.rmtree(model, ignore_errors=True)
        try:
            result, resumed = self.trainer.train(folder, run.arguments(self.config, folder), slot)
        except DivergedRunError as error:
            return {"diverged": str(error)}
        # After a resume the trainer reports the seconds of its last launch alone.
        seconds = None if resumed else result.get("seconds")
        outcome = {"sparsity": self.evaluator.export(folder, model), "seconds": seconds, "resumed": resumed}
        outcome |= {key: result.get(key) for key in ("start", "path")}
        return self._validated(outcome, model)

    def _prune(self, pruning: Pruning, folder: Path, model: Path, slot: int) -> dict[str, Any]:
        """Prune one model, measure it on the validation text, and return its outcome."""
        resumed = model.with_name(f"{model.name}.part").exists()
        shutil.rmtree(model, ignore_errors=True)  # of an earlier one of this name, whose record was removed
        result = self.trainer.prune(folder, pruning.settings(self.config), model, slot)
        seconds = None if resumed else result["seconds"]
        outcome = {"sparsity": self.evaluator.sparsity(model), "seconds": seconds, "resumed": resumed}
        outcome |= {"start": {**result["start"], "seconds": seconds}, "path": 0.0}
        return self._validated(outcome, model)

    def _validated(self, outcome: dict[str, Any], model: Path) -> dict[str, Any]:
        """Return an outcome with the measurements on the validation text, or with the reason that there are none."""
        try:
            return outcome | self.evaluator.measure(model, "validation")
        except NotFiniteError as error:
            return outcome | {"diverged": f"validation text: {error}"}

    def _wanted(self, run: Run | Pruning) -> dict[str, Any]:
        """Return everything that a run's outcome depends on, as its record keeps it."""
        conditions = {"dtype": self.baselines["dtype"], **self.evaluator.conditions}
        task_rows = {"task_rows": self.evaluator.task_rows}
        if isinstance(run, Pruning):
            files = self.checks[self.config.compared_with].files
            files = {name: files[name] for name in ("dataset_files", "model_files")}
            hardware = {"dtype": self.baselines["dtype"], **self._device}
            return {**run.settings(self.config), **files, "measured": conditions, "hardware": hardware, **task_rows}
        content = run.deepspeed(self.config)
        # The parsed block too: defaults may change between two releases that continue one study.
        block = json.loads(json.dumps(SparseForgeConfig.from_dict(content["sparseforge"]).comparable()))
        return {
            **run.flags(self.config),
            **self.checks[run.method.name].files,
            "json": content,
            "meant": block,
            "ranks": self.config.ranks,
            "measured": conditions,
            "hardware": self.checks[run.method.name].hardware,
            **task_rows,
        }

    def _write_rows(self) -> list[dict[str, Any]]:
        return write_rows(self.out, self.config, self.baselines, self.records, self.chosen)
