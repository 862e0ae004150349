"""Means and deviations over seeds, differences seed by seed, and the tables and words that say them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.studies.settings import CompareConfig

Row = Mapping[str, Any]
"""A line of results.jsonl."""
_KINDS = ("dense", "one_shot", "result")
"""In the order of the table; a run that only decided a learning rate, `tried`, has no line."""
_EDGE = " (edge)"
_MEASURED = ["validation_perplexity", "test_perplexity"]


def summarize(rows: Sequence[Row], reference: str) -> pd.DataFrame:
    """A line for every method at every budget, baselines first, then by budget and mean test perplexity.

    Returns:
        kind, method, steps, tokens, learning_rate, at_the_edge (the smallest or the largest of the grid was chosen),
        decay and decay_at_the_edge (where there was a grid of them), seeds, seconds (mean of the training time), and
        `validation`, `test` and `behind`, each a mean with its sample standard deviation beside it (`test_deviation`,
        NaN for a single number). `behind` is the test perplexity minus that of the reference with the same seed and
        budget. `<text>_kl` and its deviation follow for every text whose KL to the dense model was measured. A mean
        with a diverged run is not finite.
    """
    table = pd.DataFrame(rows)
    table = table[table["kind"].isin(_KINDS)].reset_index(drop=True)
    # JSON has no infinity: a run that diverged has null.
    table[_MEASURED] = table[_MEASURED].astype(float).fillna(math.inf)
    for edge in ("at_the_edge", "decay_at_the_edge"):
        table[edge] = table[edge].eq(True) if edge in table else False
    table["decay"] = table["decay"].astype(float) if "decay" in table else math.nan
    table["kind"] = pd.Categorical(table["kind"], _KINDS, ordered=True)
    divergences = [name for name in table.columns if name.endswith("_kl") and table[name].notna().any()]
    table[divergences] = table[divergences].astype(float).fillna(math.inf)
    of_reference = table[(table["kind"] == "result") & (table["method"] == reference)]
    against = table[["seed", "steps"]].merge(
        of_reference[["seed", "steps", "test_perplexity"]], on=["seed", "steps"], how="left"
    )
    compared = (table["kind"] == "result") & (table["method"] != reference)
    table["behind"] = (table["test_perplexity"] - against["test_perplexity"]).where(compared)
    lines = table.groupby(["kind", "method", "steps"], sort=False, observed=True).agg(
        tokens=("tokens", "first"),
        learning_rate=("learning_rate", "first"),
        at_the_edge=("at_the_edge", "first"),
        decay=("decay", "first"),
        decay_at_the_edge=("decay_at_the_edge", "first"),
        seeds=("kind", "size"),
        seconds=("seconds", "mean"),
        validation=("validation_perplexity", "mean"),
        validation_deviation=("validation_perplexity", "std"),
        test=("test_perplexity", "mean"),
        test_deviation=("test_perplexity", "std"),
        behind=("behind", lambda values: values.mean(skipna=False)),
        behind_deviation=("behind", "std"),
        **{name: (name, "mean") for name in divergences},
        **{f"{name}_deviation": (name, "std") for name in divergences},
    )
    return lines.reset_index().sort_values(["kind", "steps", "test"], kind="stable", ignore_index=True)


def spread(mean: float, deviation: float, sign: str = "") -> str:
    """5.287 ± 0.012; a difference (`sign`) that is not known is empty."""
    if not math.isfinite(mean):
        return "" if sign else "diverged"
    return f"{mean:{sign}.4g}" + ("" if math.isnan(deviation) else f" ± {deviation:.2g}")


@dataclass(frozen=True)
class Table:
    """Cells as text."""

    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """Markdown."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def markdown(lines: pd.DataFrame, rows: Sequence[Row], config: CompareConfig, notes: Sequence[str]) -> str:
    """The page `table.md`, with notes about the texts."""
    tried = selection_table(rows, config)
    listed = "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    legend = "\n".join(legend_lines(lines, config)) + "\n"
    results = "\n".join(map(str, results_tables(lines, config)))
    return f"{results}\n{legend}{listed}\n" + (f"\n{tried}" if tried else "")


@dataclass(frozen=True)
class Cost:
    """Of a pruned matrix; 1 is dense."""

    bytes: float
    multiplications: float


DENSE = Cost(1.0, 1.0)


def inference_cost(config: SparseForgeConfig) -> Cost:
    """Kept values and their places, and B of a low-rank branch, by the config's pattern and `low_rank`.

    Places take the fewest bits of naming the members that are kept, those that are not, or a bit for every member: for
    2:4 what packed24 stores. Products with zeros are counted as skipped, sums of inputs as free, and B as where k
    divides the inputs.
    """
    n, m = config.parsed_pattern.kept, config.parsed_pattern.members
    places = min(m, min(n, m - n) * math.ceil(math.log2(m)))
    branch = 0.0 if config.low_rank is None else 1 / config.low_rank.k
    return Cost((16 * n + places) / (16 * m) + branch, n / m + branch)


def cost_of(line: Any, config: CompareConfig) -> Cost:
    """What the model of a line costs at inference."""
    if line.kind == "dense":
        return DENSE
    if line.method in config.one_shot:
        method, steps = config.one_shot[line.method], 0
    elif line.kind == "one_shot":  # magnitude
        return inference_cost(replace(config.pruned, low_rank=None))
    else:
        method, steps = config.methods[line.method], line.steps
    return inference_cost(SparseForgeConfig.from_dict(config.block(method, steps)))


def results_tables(lines: pd.DataFrame, config: CompareConfig) -> list[Table]:
    """A row for every line of the summary; those that cost another thing than the reference in a table of their own."""
    head = ["bytes", "multiplications", "tokens", "learning rate", "seeds", "validation", "test", "above dense"]
    texts = [text for text in ("test", *config.other_texts) if f"{text}_kl" in lines]
    head += [f"test minus {config.compared_with}", *(f"KL {text}" for text in texts), "training"]
    dense = lines.loc[lines["kind"] == "dense", "test"]
    same: list[list[str]] = []
    other: list[list[str]] = []
    usual = inference_cost(config.pruned)
    for line in lines.itertuples():
        cost = cost_of(line, config)
        rows = same if cost in (DENSE, usual) else other
        rows.append(_cells(line, cost, dense.iloc[0] if len(dense) else math.nan, texts))
    return [Table([name, *head], rows) for name, rows in (("method", same), ("method, at another cost", other)) if rows]


def _cells(line: Any, cost: Cost, dense: float, texts: Sequence[str]) -> list[str]:
    """Lay out a line; `dense` is the dense model's test perplexity, and `texts` are those with a KL column."""
    rate = "" if math.isnan(line.learning_rate) else f"{line.learning_rate:g}{_EDGE if line.at_the_edge else ''}"
    if not math.isnan(line.decay):
        rate += f", decay {line.decay:g}{_EDGE if line.decay_at_the_edge else ''}"
    above = line.test / dense - 1
    return [
        line.method,
        f"{cost.bytes:.4g}",
        f"{cost.multiplications:.4g}",
        f"{line.tokens:,}" if line.kind == "result" else "",
        rate,
        "" if line.kind == "dense" else str(line.seeds),
        spread(line.validation, line.validation_deviation),
        spread(line.test, line.test_deviation),
        f"{above:.1%}" if line.kind != "dense" and math.isfinite(above) else "",
        spread(line.behind, line.behind_deviation, "+"),
        *(spread(getattr(line, f"{text}_kl"), getattr(line, f"{text}_kl_deviation")) for text in texts),
        "" if math.isnan(line.seconds) else f"{line.seconds:,.0f} s",
    ]


def legend_lines(lines: pd.DataFrame, config: CompareConfig) -> list[str]:
    """What one must know to read the table."""
    first, one = config.seeds[0], len(config.seeds) == 1
    over = f"of seed {first} alone" if one else "mean ± sample standard deviation over seeds"
    legend = [
        f"Perplexity per token, {over}. At the same budget and seed all methods read the same tokens in the same "
        f"order. Learning rates, and decays where there is a grid of them, were chosen {_by(config)}on the validation "
        f"text, at {_at(config)}, seed {first}; nothing was chosen on the test text. Differences are taken seed by "
        "seed.",
        "Bytes and multiplications for a token are those of a pruned matrix at inference, relative to the dense one: "
        "values of 16 bits and the places of what is kept; products with zeros are skipped.",
    ]
    if any(f"{text}_kl" in lines for text in ("test", *config.other_texts)):
        legend.append("KL is the mean of KL(dense || model) over the tokens of a text, in nats; 0 is the dense model.")
    if "windows" in (config.validation_text.protocol, config.test_text.protocol):
        legend.append("Texts are cut into windows, where other studies score every document by itself.")
    if len(config.patterns) > 1:
        legend.append(f"One-shot magnitude has the pattern of {config.compared_with}, {config.pruned.pattern}.")
    if lines[["at_the_edge", "decay_at_the_edge"]].any(axis=None):
        legend.append("(edge): the smallest or the largest of the grid; a better one may lie outside.")
    return legend


def selection_table(rows: Sequence[Row], config: CompareConfig) -> Table | None:
    """Lay out what every learning rate, and decay, that was tried came to on the validation text."""
    tried = pd.DataFrame([row for row in rows if row["decides"]])
    if tried.empty:
        return None
    tried["shown"] = [_tried(row, config) for row in tried.to_dict("records")]
    decays = tried["decay"].astype(float) if "decay" in tried else pd.Series(math.nan, tried.index)
    names = zip(tried["method"], decays, strict=True)
    tried["tuned"] = [name if math.isnan(decay) else f"{name}, decay {decay:g}" for name, decay in names]
    cells = tried.pivot(index=["tuned", "steps"], columns="learning_rate", values="shown").fillna("")
    figure = "KL" if config.choose_by == "kl" else "perplexity"
    head = [f"validation {figure} at learning rate", "steps", *(f"{rate:g}" for rate in cells.columns)]
    order = list(config.methods)
    rank = {tuned: order.index(method) for tuned, method in zip(tried["tuned"], tried["method"], strict=True)}
    lines = dict.fromkeys(zip(tried["tuned"], tried["steps"], strict=True))
    shown = sorted(lines, key=lambda line: (line[1], rank[line[0]]))
    return Table(head, [[name, str(steps), *cells.loc[(name, steps)]] for name, steps in shown])


def _at(config: CompareConfig) -> str:
    return "each budget" if config.choose_at_each_budget else f"{config.budgets[0]} steps"


def _by(config: CompareConfig) -> str:
    return "by the KL to the dense model " if config.choose_by == "kl" else ""


def _tried(row: Row, config: CompareConfig) -> str:
    value = row[f"validation_{config.choose_by}"]
    shown = "diverged" if value is None or math.isnan(value) else f"{value:.4g}"
    return f"**{shown}**" if row["chosen"] else shown
