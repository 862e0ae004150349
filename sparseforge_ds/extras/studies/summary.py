"""Summary over seeds: means, deviations, differences seed by seed, and the tables that show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.studies.settings import CompareConfig
from sparseforge_ds.extras.studies.task_columns import task_columns
from sparseforge_ds.mask.pattern import Pairs

Row = Mapping[str, Any]
"""A line of results.jsonl."""
_KINDS = ("dense", "one_shot", "result")
"""Kinds of rows in the order of the table; `tried`, a run that only decided a learning rate, has no line."""
_EDGE = " (edge)"
_COSTS = ("start_tokens", "start_epochs", "start_seconds", "tokens_a_weight", "path")
_NOT_RECORDED = "not recorded"
_MEASURED = ["validation_perplexity", "test_perplexity"]


def summarize(rows: Sequence[Row], reference: str) -> pd.DataFrame:
    """Summarize the seeds of every method at every budget in one line.

    Returns:
        Lines with baselines first, then by budget and mean test perplexity. Columns: kind, method, steps, tokens,
        learning_rate, at_the_edge (the smallest or the largest of the grid was chosen), decay and decay_at_the_edge
        (if there was a grid of decays), seeds, seconds (mean training time, with the start's).

        `start_tokens`, `start_epochs` and `start_seconds` are of the start, `tokens_a_weight` counts tokens of the run
        and of all epochs of the start by pruned weight, and `path` is explained by `train.loop.run_result`. They are
        NaN where a seed's run did not record them.

        `validation`, `test` and `behind` are means, each with its sample standard deviation (`test_deviation`, NaN for
        a single number). `behind` is the test perplexity minus the reference's with the same seed and budget.
        `<text>_kl` and its deviation follow for every text whose KL to the dense model was measured, and likewise
        `task_<task>_<figure>`. A mean with a diverged run is infinite, and one with a run that lacks the figure is NaN.
    """
    # Columns that older studies lack get their defaults.
    table = pd.DataFrame(rows)
    table = table[table["kind"].isin(_KINDS)].reset_index(drop=True)
    # JSON has no infinity: a run that diverged has null.
    table[_MEASURED] = table[_MEASURED].astype(float).fillna(math.inf)
    for edge in ("at_the_edge", "decay_at_the_edge"):
        table[edge] = table[edge].eq(True) if edge in table else False
    table["decay"] = table["decay"].astype(float) if "decay" in table else math.nan
    _add_costs(table)
    table["kind"] = pd.Categorical(table["kind"], _KINDS, ordered=True)
    measured = [name for name in table.columns if name.endswith("_kl") or name.startswith("task_")]
    measured = [name for name in measured if table[name].notna().any()]
    table[measured] = table[measured].astype(float)
    # A finite run may lack a figure: items that are graded, and not right or wrong, cannot be lost.
    has_diverged = ~table["test_perplexity"].map(math.isfinite)
    table[measured] = table[measured].mask(table[measured].isna() & has_diverged.to_numpy()[:, None], math.inf)
    # Differences to the reference, seed by seed.
    reference_rows = table[(table["kind"] == "result") & (table["method"] == reference)]
    against = table[["seed", "steps"]].merge(
        reference_rows[["seed", "steps", "test_perplexity"]], on=["seed", "steps"], how="left"
    )
    compared = (table["kind"] == "result") & (table["method"] != reference)
    table["behind"] = (table["test_perplexity"] - against["test_perplexity"]).where(compared)
    # One line for all seeds.
    lines = table.groupby(["kind", "method", "steps"], sort=False, observed=True).agg(
        tokens=("tokens", "first"),
        learning_rate=("learning_rate", "first"),
        at_the_edge=("at_the_edge", "first"),
        decay=("decay", "first"),
        decay_at_the_edge=("decay_at_the_edge", "first"),
        seeds=("kind", "size"),
        seconds=("seconds", "mean"),
        **{name: (name, lambda values: values.mean(skipna=False)) for name in _COSTS},
        validation=("validation_perplexity", "mean"),
        validation_deviation=("validation_perplexity", "std"),
        test=("test_perplexity", "mean"),
        test_deviation=("test_perplexity", "std"),
        behind=("behind", lambda values: values.mean(skipna=False)),
        behind_deviation=("behind", "std"),
        **{name: (name, lambda values: values.mean(skipna=False)) for name in measured},
        **{f"{name}_deviation": (name, "std") for name in measured},
    )
    return lines.reset_index().sort_values(["kind", "steps", "test"], kind="stable", ignore_index=True)


def _add_costs(table: pd.DataFrame) -> None:
    """Add the columns `_COSTS`; a row that did not record them has NaN."""
    for key in ("tokens", "epochs", "seconds"):
        starts = table["start"] if "start" in table else [None] * len(table)
        values = [start[key] if isinstance(start, dict) else None for start in starts]
        table[f"start_{key}"] = pd.Series(values, table.index, dtype=float)
    for key in ("tokens_a_weight", "path"):
        table[key] = table[key].astype(float) if key in table else math.nan


def spread(mean: float, deviation: float, sign: str = "") -> str:
    """Format a mean and its deviation, like "5.287 ± 0.012", or nothing for NaN; `sign` is "+" for differences."""
    if math.isnan(mean):
        return ""
    if not math.isfinite(mean):
        return "" if sign else "diverged"
    return f"{mean:{sign}.4g}" + ("" if math.isnan(deviation) else f" ± {deviation:.2g}")


@dataclass(frozen=True)
class Table:
    """A table with cells of text."""

    head: list[str]
    rows: list[list[str]]

    def __str__(self) -> str:
        """Format the table as Markdown."""
        lines = [self.head, ["---", *["---:"] * (len(self.head) - 1)], *self.rows]
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]  # names of texts are free
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def markdown(lines: pd.DataFrame, rows: Sequence[Row], config: CompareConfig, notes: Sequence[str]) -> str:
    """Return the content of `table.md`, with notes about the texts."""
    tried = selection_table(rows, config)
    note_list = "".join(f"\n- {note}" for note in notes) + ("\n" if notes else "")
    legend = "\n".join(legend_lines(lines, config)) + "\n"
    results = "\n".join(map(str, results_tables(lines, config)))
    return f"{results}\n{legend}{note_list}\n" + (f"\n{tried}" if tried else "")


@dataclass(frozen=True)
class Cost:
    """Inference cost of a pruned matrix relative to the dense matrix."""

    bytes: float
    multiplications: float


DENSE = Cost(1.0, 1.0)


def inference_cost(config: SparseForgeConfig) -> Cost:
    """Count kept values, their positions, and B of a low-rank branch, for a block.

    Positions take the shortest of three codes: the kept members, the pruned ones, or a bit for every member; packed24
    stores as many for 2:4. Products with zeros are skipped, sums of inputs are free, and k divides the inputs of B.
    Scales of quantized values take 16 bits; one for a whole row counts nothing.
    """
    pattern = config.parsed_pattern
    n = pattern.kept_count
    m = pattern.members
    # Members that are kept together have one position.
    members_per_position = 2 if isinstance(pattern, Pairs) else 1
    units = m // members_per_position
    kept_units = n // members_per_position
    position_bits = min(units, min(kept_units, units - kept_units) * math.ceil(math.log2(units)))
    branch = 0.0 if config.low_rank is None else 1 / config.low_rank.k
    value_bits = 16.0
    if config.quantize is not None:
        value_bits = config.quantize.bits + (
            0.0 if config.quantize.group_size is None else 16 / config.quantize.group_size
        )
    return Cost((value_bits * n + position_bits) / (16 * m) + branch, n / m + branch)


def cost_of(line: Any, config: CompareConfig) -> Cost:
    """Return the inference cost of the method of a summary line."""
    if line.kind == "dense":
        return DENSE
    if line.method in config.one_shot:
        block = config.one_shot_block(config.one_shot[line.method])
    elif line.kind == "one_shot":  # magnitude
        return inference_cost(replace(config.pruned, low_rank=None, quantize=None))
    else:
        block = config.block(config.methods[line.method], line.steps)
    return inference_cost(SparseForgeConfig.from_dict(block))


def results_tables(lines: pd.DataFrame, config: CompareConfig) -> list[Table]:
    """Lay out every line of the summary; methods with another cost than the reference get a table of their own."""
    head = ["bytes", "multiplications", "tokens", "learning rate", "seeds", "validation", "test", "above dense"]
    texts = [text for text in ("test", *config.other_texts) if f"{text}_kl" in lines]
    head += [f"test minus {config.compared_with}", *(f"KL {text}" for text in texts), "training"]
    # Studies that recorded no start have no columns about it.
    unit = control_seconds(lines, config)
    if has_costs(lines):
        head[3:3] = ["start's tokens", "tokens a weight", "path"]
        head += ["start", *([] if unit is None else [f"steps of {config.dense_control}"])]
    figures = {key: title for key, title in task_columns(config.tasks).items() if key in lines}
    head += figures.values()
    dense = lines.loc[lines["kind"] == "dense", "test"]
    same: list[list[str]] = []
    other: list[list[str]] = []
    usual = inference_cost(config.pruned)
    for line in lines.itertuples():
        cost = cost_of(line, config)
        rows = same if cost in (DENSE, usual) else other
        # Names of texts and tasks may be no names of Python, which attributes of a tuple are.
        means = [_with_deviation(lines, line.Index, key) for key in figures]
        closeness = [_with_deviation(lines, line.Index, f"{text}_kl") for text in texts]
        cells = _cells(line, cost, dense.iloc[0] if len(dense) else math.nan, closeness)
        if has_costs(lines):
            before, after = _cost_cells(line, unit)
            cells = [*cells[:4], *before, *cells[4:], *after]
        rows.append([*cells, *(spread(mean, deviation) for mean, deviation in means)])
    return [Table([name, *head], rows) for name, rows in (("method", same), ("method, at another cost", other)) if rows]


def _with_deviation(lines: pd.DataFrame, index: Any, key: str) -> tuple[float, float]:
    """Return the mean and the deviation of a line's value."""
    return lines.at[index, key], lines.at[index, f"{key}_deviation"]


def _cells(line: Any, cost: Cost, dense: float, closeness: Sequence[tuple[float, float]]) -> list[str]:
    """Lay out a line; `dense` is the dense model's test perplexity, `closeness` each text's KL and its deviation."""
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
        *(spread(mean, deviation) for mean, deviation in closeness),
        "" if math.isnan(line.seconds) else f"{line.seconds:,.0f} s",
    ]


def has_costs(lines: pd.DataFrame) -> bool:
    """Return True if some run of a summary recorded its start and its path."""
    return bool(lines[["start_tokens", "path"]].notna().any(axis=None))


def control_seconds(lines: pd.DataFrame, config: CompareConfig) -> float | None:
    """Return the seconds of a step of the dense control, at the largest budget that it was run with; None without one.

    NaN if they were not recorded.
    """
    control = lines[(lines["kind"] == "result") & (lines["method"] == config.dense_control)]
    if control.empty:
        return None
    longest = control.loc[control["steps"].idxmax()]
    return float(longest["seconds"] / longest["steps"])


def _cost_cells(line: Any, unit: float | None) -> tuple[list[str], list[str]]:
    """Lay out the columns about start and path, and those behind the training time, for a run; else blanks.

    `unit` is the result of `control_seconds`.
    """

    def recorded(value: float, form: str) -> str:
        return _NOT_RECORDED if math.isnan(value) else format(value, form)

    if line.kind == "dense" or math.isnan(line.learning_rate) and math.isnan(line.start_tokens):
        return ["", "", ""], ["", *([] if unit is None else [""])]
    tokens = recorded(line.start_tokens, ",.0f")
    if line.start_epochs > 1:
        tokens += f" x {line.start_epochs:.0f}"
    start = [tokens, recorded(line.tokens_a_weight, ".3g"), recorded(line.path, ".3g")]
    seconds = recorded(line.start_seconds, ",.0f")
    time = [seconds if seconds == _NOT_RECORDED else f"{seconds} s"]
    return start, time if unit is None else [*time, recorded(line.seconds / unit, ",.0f")]


def legend_lines(lines: pd.DataFrame, config: CompareConfig) -> list[str]:
    """Return the sentences that explain the table."""
    first = config.seeds[0]
    over = f"of seed {first} alone" if len(config.seeds) == 1 else "mean ± sample standard deviation over seeds"
    is_quantized = any(config.block(method, 1).get("quantize") for method in config.methods.values())
    values = "values, of 16 bits or quantized," if is_quantized else "values of 16 bits"
    # What every table has.
    legend = [
        f"Perplexity per token, {over}. At the same budget and seed all methods read the same tokens in the same "
        f"order. Learning rates, and decays where there is a grid of them, were chosen {_by(config)}on the validation "
        f"text, at {_at(config)}, seed {first}; nothing was chosen on the test text. Differences are taken seed by "
        "seed.",
        "Bytes and multiplications for a token are those of a pruned matrix at inference, relative to the dense one: "
        f"{values} and the positions of kept values; products with zeros are skipped.",
    ]
    # Columns that only some studies have.
    if has_costs(lines):
        legend.append(
            "Tokens a weight are those of the run and of all epochs of the start, by pruned weight. Path is steps x "
            "learning rate x mean of the schedule's shape, by the root mean square of the pruned weights before the "
            "start. Training time has the start's in it, which stands behind it."
        )
        if config.dense_control is not None:
            legend.append(
                f"Steps of {config.dense_control} are the training time in those of the dense control, at its largest "
                "budget; rows with equal numbers took equal time. Times of other studies are of other machines."
            )
    if any(f"{text}_kl" in lines for text in ("test", *config.other_texts)):
        legend.append("KL is the mean of KL(dense || model) over the tokens of a text, in nats; 0 is the dense model.")
    if config.tasks is not None:
        legend.append(
            "Columns of tasks are the share of right items, of items that the dense model alone has right (lost), and "
            "of answers that the limit cut, and the mean tokens of an answer."
        )
    # What sets this study apart.
    if "windows" in (config.validation_text.protocol, config.test_text.protocol):
        legend.append("Texts are cut into windows, where other studies score every document by itself.")
    if len(config.patterns) > 1:
        legend.append(f"One-shot magnitude has the pattern of {config.compared_with}, {config.pruned.pattern}.")
    if lines[["at_the_edge", "decay_at_the_edge"]].any(axis=None):
        legend.append("(edge) marks the smallest or the largest value of the grid; a better one may lie outside.")
    return legend


def selection_table(rows: Sequence[Row], config: CompareConfig) -> Table | None:
    """Lay out the validation result of every learning rate and decay that was tried, or return None without any."""
    tried = pd.DataFrame([row for row in rows if row["decides"]])
    if tried.empty:
        return None
    # A table line for every method, decay and budget; a column for every learning rate.
    tried["shown"] = [_tried(row, config) for row in tried.to_dict("records")]
    decays = tried["decay"].astype(float) if "decay" in tried else pd.Series(math.nan, tried.index)
    names = zip(tried["method"], decays, strict=True)
    tried["tuned"] = [name if math.isnan(decay) else f"{name}, decay {decay:g}" for name, decay in names]
    cells = tried.pivot(index=["tuned", "steps"], columns="learning_rate", values="shown").fillna("")
    criterion = "KL" if config.choose_by == "kl" else "perplexity"
    head = [f"validation {criterion} at learning rate", "steps", *(f"{rate:g}" for rate in cells.columns)]
    # Lines by budget, then in the order of CONFIG.
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
