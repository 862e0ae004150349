"""A comparison from CONFIG to its folder; whatever is there already is not made again.

OUT/
  config.json      CONFIG as it was given
  results.jsonl    a row for each run
  table.md         the summary, with the learning rates that were tried
  index.html       table and figures on one page
  figures/         PNG files
  records/         what each run was to be and what it came to
  histories/       its curves
  runs/            its DeepSpeed JSON, log and TensorBoard folder
  models/          its exported model
  data/            the token cache of all runs
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import queue
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from sparseforge_ds.compare.assessment import Assessor, Baselines
from sparseforge_ds.compare.figures import draw
from sparseforge_ds.compare.history import read_history
from sparseforge_ds.compare.page import page
from sparseforge_ds.compare.records import Records, write_text
from sparseforge_ds.compare.runs import (
    Run,
    at_the_edge,
    choose_rates,
    one_shot_runs,
    result_runs,
    selection_runs,
    unique,
)
from sparseforge_ds.compare.settings import CompareConfig
from sparseforge_ds.compare.summary import summarize
from sparseforge_ds.compare.table import markdown
from sparseforge_ds.compare.texts import read_texts
from sparseforge_ds.compare.training import DivergedError, StoppedError, Trainer, current_step
from sparseforge_ds.config import SparseForgeConfig

_BASELINES = "baselines"
_EVERY = 1.0
"""Seconds between looks at the logs."""


class Study:
    """One comparison.

    Args:
        config: the grid.
        out: its folder.
        text: CONFIG as it was given, for the record.

    Raises:
        ValueError: a text cannot be used, the model cannot be loaded, or the folder is of another comparison.
    """

    def __init__(self, config: CompareConfig, out: Path, text: str) -> None:
        self.config = config
        self.out = out
        self.text = text
        divided = max(1, (os.cpu_count() or 1) // (config.workers * config.ranks))
        threads = config.threads or int(os.environ.get("OMP_NUM_THREADS", divided))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # of the processes that are started
        torch.set_num_threads(threads)
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.texts = read_texts(config)
        self.assessor = Assessor(config, self.texts)
        shared = Path(config.train_text).exists()
        self.trainer = Trainer(config.ranks, threads, out / "data" if shared else None)
        self.records = Records(out / "records")
        self.chosen: dict[tuple[str, int], float] = {}
        for name in ("runs", "models", "histories"):
            (out / name).mkdir(parents=True, exist_ok=True)

    def run(self) -> str:
        """Do what is missing, and write everything.

        Returns:
            The table.

        Raises:
            ValueError: a run failed; the others are saved, and the same command goes on.
        """
        with _locked(self.out):
            write_text(self.out / "config.json", self.text)
            self.baselines = self._baselines()
            deciding, untrained = selection_runs(self.config), one_shot_runs(self.config)
            self._bar = tqdm(total=self._steps(), unit="step", disable=not sys.stderr.isatty(), file=sys.stderr)
            try:
                self._do_all([*deciding, *untrained], {run.name for run in untrained})
                validation = {run.name: self._validation(run) for run in deciding}
                self.chosen = choose_rates(self.config, validation)
                counting = result_runs(self.config, self.chosen)
                names = {run.name for run in [*counting, *untrained]}
                for run in deciding:
                    if run.name not in names:
                        shutil.rmtree(self.out / "models" / run.name, ignore_errors=True)
                self._do_all(counting, names)
            finally:
                self._bar.close()
            return self._write_all()

    def _baselines(self) -> Baselines:
        pruned, length = self.assessor.pruned, self.config.evaluation_length
        wanted: dict[str, Any] = {"model": self.config.model, "dtype": self.config.dtype, "texts": self.texts.identity}
        wanted |= {"pattern": pruned.pattern, "include": pruned.include, "exclude": pruned.exclude, "length": length}
        record = self.records.open(_BASELINES, wanted)
        found = self.assessor.baselines(record.get("found", {}))
        self.records.write(_BASELINES, {**record, "found": asdict(found)})
        return found

    def _steps(self) -> int:
        """Steps of all runs. Of those that decide a learning rate, the chosen one counts too if its seed does."""
        config = self.config
        before = [*selection_runs(config), *one_shot_runs(config)]
        decided = {(run.method.name, run.steps): run.steps for run in before if run.trained}
        again = sum(decided.values()) if config.first_seed in config.seeds else 0
        return sum(run.steps for run in before) + sum(config.budgets) * len(config.seeds) * len(config.methods) - again

    def _do_all(self, runs: list[Run], counting: set[str]) -> None:
        """All of them, some at a time; the first failure stops the others, which save."""
        slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(self.config.workers):
            slots.put(slot)

        def work(run: Run) -> str:
            slot = slots.get()
            try:
                return self._do(run, run.name in counting, slot)
            finally:
                slots.put(slot)

        with ThreadPoolExecutor(self.config.workers) as pool:
            pending: dict[Future[str], Run] = {}
            try:
                for run in unique(runs):  # a wrong one is found before any of them starts
                    self.records.open(run.name, self._wanted(run))
                pending = {pool.submit(work, run): run for run in unique(runs)}
                finished = self._bar.n
                while pending:
                    done, _ = wait(pending, _EVERY, FIRST_COMPLETED)
                    for future in done:
                        run = pending.pop(future)
                        self._say(future.result())
                        finished += run.steps
                        self._write_rows()
                    self._show(finished, list(pending.values()))
            except BaseException as error:
                self.trainer.stop()
                for future in pending:
                    future.cancel()
                if isinstance(error, StoppedError):
                    raise ValueError("a run was stopped from outside, and saved; the same command goes on") from None
                raise

    def _show(self, finished: int, runs: list[Run]) -> None:
        if self._bar.disable:
            return
        running = sum(min(run.steps, current_step(self._folder(run))) for run in runs)
        self._bar.update(max(0, finished + running - self._bar.n))

    def _say(self, text: str) -> None:
        if text:
            self._bar.write(text, file=sys.stderr) if not self._bar.disable else print(text, flush=True)

    def _do(self, run: Run, counts: bool, slot: int) -> str:
        """One run: trained, exported, verified, measured; only what is missing of it.

        Returns:
            A line to show; empty when nothing was to be done.
        """
        record = self.records.open(run.name, self._wanted(run))
        folder, model = self._folder(run), self.out / "models" / run.name
        news = ""
        untested = counts and "test_perplexity" not in record and "diverged" not in record
        if not _settled(record) or (untested and not (model / "sparsity.json").exists()):
            write_text(folder.with_name(f"{run.name}.json"), json.dumps(run.deepspeed(self.config), indent=2) + "\n")
            record = {"wanted": record["wanted"], **self._train(run, folder, model, slot)}
            self.records.write(run.name, record)
            news = "diverged" if "diverged" in record else f"validation {record['validation_perplexity']:.4g}"
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        if counts and "test_perplexity" not in record and "diverged" not in record:
            record["test_perplexity"] = self.assessor.test(model)
            self.records.write(run.name, record)
            news += f"{', ' if news else ''}test {record['test_perplexity']:.4g}"
        if counts and not self.config.keep_models:
            shutil.rmtree(model, ignore_errors=True)
        return f"{run.name}: {news}" if news else ""

    def _train(self, run: Run, folder: Path, model: Path, slot: int) -> dict[str, Any]:
        try:
            resumed = self.trainer.train(folder, run.arguments(self.config, folder), slot)
        except DivergedError as error:
            return {"diverged": str(error)}
        if run.trained:
            history = read_history(folder)
            write_text(self.out / "histories" / f"{run.name}.json", json.dumps(history) + "\n")
        sparsity = self.assessor.export(folder, model)
        result = folder / "result.json"
        seconds = json.loads(result.read_text())["seconds"] if result.exists() else None
        found = {"sparsity": sparsity, "seconds": seconds, "resumed": resumed}
        return found | self.assessor.validate(model)

    def _wanted(self, run: Run) -> dict[str, Any]:
        config = self.config
        measured = {"dtype": self.baselines.dtype, "length": config.evaluation_length, "texts": self.texts.identity}
        json_of_run = run.deepspeed(config)
        # What the block means, too: defaults may change between two releases that go on with one study.
        meant = json.loads(json.dumps(SparseForgeConfig.from_dict(json_of_run["sparseforge"]).comparable()))
        flags = run.flags(config)
        return {**flags, "json": json_of_run, "meant": meant, "ranks": config.ranks, "measured": measured}

    def _folder(self, run: Run) -> Path:
        return self.out / "runs" / run.name

    def _validation(self, run: Run) -> float:
        return float((self.records.read(run.name) or {}).get("validation_perplexity", math.inf))

    def _rows(self) -> list[dict[str, Any]]:
        """Everything that is known by now."""
        deciding, untrained = selection_runs(self.config), one_shot_runs(self.config)
        counting = {run.name for run in result_runs(self.config, self.chosen)} if self.chosen else set()
        decides = {run.name for run in deciding}
        runs = [*deciding, *untrained, *(result_runs(self.config, self.chosen) if self.chosen else [])]
        rows = _baseline_rows(self.baselines)
        for run in unique(runs):
            record = self.records.read(run.name) or {}
            if not _settled(record):
                continue
            kind = "one_shot" if not run.trained else "result" if run.name in counting else "tried"
            best = self.chosen.get((run.method.name, run.steps)) == run.learning_rate
            rows.append(
                {
                    "kind": kind,
                    "method": run.method.name,
                    "run": run.name,
                    "seed": run.seed,
                    "steps": run.steps,
                    "tokens": run.steps * self.config.batch * self.config.seq_length if run.trained else 0,
                    "learning_rate": run.learning_rate if run.trained else None,
                    "decides": run.name in decides,
                    "chosen": best,
                    "at_the_edge": run.trained and at_the_edge(run.method, run.learning_rate),
                    "validation_perplexity": record.get("validation_perplexity"),
                    "test_perplexity": record.get("test_perplexity"),
                    "diverged": record.get("diverged"),
                    "sparsity": record.get("sparsity"),
                    "seconds": record.get("seconds"),
                    "resumed": record.get("resumed"),
                    "settings": run.method.block,
                    "flags": run.method.flags,
                    "agreement": record.get("agreement"),
                    "command": run.command(self.config, self._folder(run)),
                }
            )
        return rows

    def _write_rows(self) -> list[dict[str, Any]]:
        rows = self._rows()
        write_text(self.out / "results.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
        return rows

    def _write_all(self) -> str:
        rows = self._write_rows()
        lines = summarize(rows, self.config.compared_with)
        table = markdown(lines, rows, self.config, self.texts.notes)
        write_text(self.out / "table.md", table)
        stored = (
            (row["run"], self.out / "histories" / f"{row['run']}.json") for row in rows if row["kind"] == "result"
        )
        histories = {name: json.loads(path.read_text()) for name, path in stored if path.exists()}
        figures = draw(lines, rows, histories, self.out / "figures")
        commands = [row["command"] for row in rows if row["command"]]
        title = f"Comparison on {Path(self.config.model).name}, {self.baselines.pattern}"
        write_text(self.out / "index.html", page(title, table, figures, self.text, commands))
        return table


def _baseline_rows(baselines: Baselines) -> list[dict[str, Any]]:
    values = asdict(baselines)
    rows = []
    for kind, name, which in (("dense", "dense", "dense"), ("one_shot", "one-shot magnitude", "magnitude")):
        rows.append(
            {
                "kind": kind,
                "method": name,
                "run": None,
                "seed": None,
                "steps": 0,
                "tokens": 0,
                "learning_rate": None,
                "decides": False,
                "chosen": False,
                "validation_perplexity": values[f"{which}_validation"],
                "test_perplexity": values[f"{which}_test"],
                "seconds": None,
                "command": None,
            }
        )
    return rows


def _settled(record: dict[str, Any]) -> bool:
    """Whether a run is trained and measured, or known to diverge."""
    return "validation_perplexity" in record or "diverged" in record


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second comparison out of the folder."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{folder}: a comparison is at work in it; wait for its end, or give another --out"
            ) from None
        yield
