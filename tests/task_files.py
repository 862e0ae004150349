"""Task files in the format of lm-evaluation-harness, for its own tasks on rows of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STOPS = ["."]
GENERATION_LIMIT = 14


def write_task(folder: Path, name: str, rows: Path, **more: Any) -> Path:
    """Write a task file in `folder`, with which the harness reads `rows`; `more` are further keys of the file."""
    import lm_eval

    root = Path(lm_eval.__file__).parent / "tasks"
    reference = {"boolq": "super_glue/boolq/default", "rte": "glue/rte/default", "winogrande": "winogrande/default"}
    own = root / f"{reference[name]}.yaml" if name in reference else next(root.glob(f"*/{name}.yaml"))
    splits = {"training_split": None, "validation_split": None, "test_split": "test"}
    data = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(rows)}}}
    content = {"include": str(own), "task": name, **data, **splits, **more}
    (folder / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
    return folder


def write_generation_task(folder: Path, rows: list[dict[str, str]], **more: Any) -> None:
    """Write a task `openings` whose answers are generated, of rows with `opening` and `ending`; `more` as above."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "openings",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "output_type": "generate_until",
        "test_split": "test",
        "doc_to_text": "{{opening}}",
        "doc_to_target": "{{ending}}",
        "target_delimiter": "",
        "generation_kwargs": {"until": STOPS, "max_gen_toks": GENERATION_LIMIT, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        **more,
    }
    (folder / "openings.yaml").write_text(json.dumps(task))
