from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sparseforge_ds.cli.main import main
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.extras.studies.settings import CompareConfig, HeldOutText, read_comparison
from tests.distributed import ROOT

GOOD: dict[str, Any] = {
    "model": "model",
    "train_text": "train.jsonl",
    "validation_text": {"path": "heldout.jsonl", "documents": [0, 4]},
    "test_text": {"path": "heldout.jsonl", "documents": [4, None]},
    "base": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "sparseforge": {"importance": "magnitude"}},
    "methods": {
        "ours": {"method": {"update_every": 2}, "learning_rates": [0.5], "flags": {"teacher": "larger"}},
        "fixed": {"method": "naive_retrain"},
    },
    "one_shot": {"pruned": {"mask": "wanda"}},
    "learning_rates": [2e-3, 1e-3],
    "seeds": [3, 0],
    "budgets": [80, 40],
}


def write(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v != "absent"}))
    return str(folder / "config.json")


def test_a_config_gives_each_method_its_block(tmp_path: Path) -> None:
    config = read_comparison(write(tmp_path))
    assert (config.budgets, config.seeds, config.learning_rates) == ((40, 80), (3, 0), (1e-3, 2e-3))
    assert config.validation_text == HeldOutText(
        str(tmp_path / "heldout.jsonl"), (0, 4), "documents"
    ) and config.test_text.documents == (4, None)
    assert config.compared_with == "ours" and config.test_text.protocol == "documents"
    ours = config.methods["ours"]
    assert ours.learning_rates == (0.5,) and ours.flags == {"teacher": "larger"}
    assert config.methods["fixed"].learning_rates == (1e-3, 2e-3)
    block = config.block(ours, 80)
    assert block["importance"] == "magnitude" and block["method"] == {"update_every": 2} and block["max_steps"] == 80
    assert block["monitor"] == {"histograms_every": 2, "gap_every": 4}
    assert read_comparison(write(tmp_path, reference="fixed")).compared_with == "fixed"


def test_settings_of_the_method_of_the_base_are_of_no_other_method(tmp_path: Path) -> None:
    base = {**GOOD["base"], "sparseforge": {"method": {"update_every": 3}}}
    methods = {
        "ours": {"method": {"hardening": [0, 0]}},
        "named": {"method": "sparseforge"},
        "ast": {"method": {"name": "ast", "decay": 0.1}},
    }
    config = read_comparison(write(tmp_path, base=base, methods=methods, one_shot={}))
    blocks = {name: config.block(method, 40)["method"] for name, method in config.methods.items()}
    assert blocks == {
        "ours": {"update_every": 3, "hardening": [0, 0]},
        "named": {"update_every": 3},
        "ast": {"name": "ast", "decay": 0.1},
    }


def test_the_environment_stands_in_for_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "/there")
    assert read_comparison(write(tmp_path, model="$PLACE/model")).model == "/there/model"
    with pytest.raises(ValueError, match=r"the environment has no \$\{OTHER\}; export it"):
        read_comparison(write(tmp_path, train_text="${OTHER}/train.jsonl"))


def test_paths_are_read_from_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the working directory, where the same names may be other files."""
    # Files of the same names in both folders.
    study, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    for folder, rate in ((study, 0.1), (elsewhere, 0.2)):
        (folder / "dense").mkdir(parents=True)
        (folder / "base.json").write_text(json.dumps({"rate": rate}))
        (folder / "train.jsonl").touch()
    # A study names them by relative paths; a name of the hub is none.
    path = write(
        study,
        base="base.json",
        model="dense",
        train_text="stream:train.jsonl",
        validation_text={"path": "stdlib:heldout"},
        methods={"ours": {"flags": {"teacher": "dense"}}, "theirs": {"flags": {"teacher": "owner/model"}}},
    )
    monkeypatch.chdir(elsewhere)
    for name in (path, "../study/config.json"):
        config = read_comparison(name)
        folder = Path(name).parent
        assert config.base == {"rate": 0.1} and Path(config.model) == folder / "dense"
        assert config.train_text == f"stream:{folder / 'train.jsonl'}"
        assert config.validation_text.path == "stdlib:heldout" and config.test_text.path == str(
            folder / "heldout.jsonl"
        )
        assert config.methods["ours"].flags == {"teacher": str(folder / "dense")}
        assert config.methods["theirs"].flags == {"teacher": "owner/model"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seedz": [1]}, r"seedz: unknown key; did you mean seeds\?"),
        ({"test_text": "absent"}, "test_text: missing; it has no default"),
        ({"seeds": []}, r"seeds = \[\]: give a list"),
        ({"seeds": [0, 0]}, "two values are the same"),
        ({"budgets": [0]}, "budgets = 0: use an integer >= 1"),
        ({"learning_rates": [-1]}, "-1 is no learning rate"),
        ({"learning_rates": [True]}, r"learning_rates\[0\] = True: expected a number"),
        ({"methods": {"a": {"learning_rates": [0]}}}, "0 is no learning rate"),
        ({"methods": {"a": {"learning_rates": []}}}, "methods.a.learning_rates: the list is empty; remove it"),
        ({"batch": 3, "ranks": 2}, "batch = 3 cannot be divided over ranks = 2"),
        ({"reference": "theirs"}, "reference = 'theirs': use one of the methods, ours, fixed"),
        ({"validation_text": {"path": "a.jsonl", "documents": [4, 4]}}, "0 <= first < end"),
        ({"validation_text": {"path": "a.jsonl", "rows": 4}}, "validation_text.rows: unknown key"),
        ({"methods": {}}, "name at least one"),
        ({"methods": {"a b": {}}}, "'a b' becomes the name of a folder"),
        ({"methods": {"a-b": {}}}, "'a-b' becomes the name of a folder"),
        ({"methods": {"a": {"maskrate": 1}}}, r"methods.a with 40 steps: sparseforge.\w+: unknown key"),
        ({"methods": {"pruned": {}}}, "'pruned' is a name in methods and in one_shot"),
        ({"methods": {"a": {"flags": {"seed": 3}}}}, "methods.a.flags.seed: the grid or its base decides it"),
        ({"flags": {"global_batch": 16}}, "flags.global_batch: the grid or its base decides it"),
        ({"flags": {"gradient_accumulation_steps": 4}}, "flags.gradient_accumulation_steps: the grid or its base"),
        (
            {"methods": {"a": {"flags": {"warm_up": 0}}}},
            "a.flags.warm_up: unknown key; did you mean methods.a.flags.warmup",
        ),
        ({"flags": {"epochs": 2}}, "flags.epochs: the grid or its base decides it"),
        ({"methods": {"a": {"max_steps": 5}}}, "methods.a.max_steps: budgets decide it"),
        ({"learning_rates": [0.0012345671, 0.0012345674]}, "two values are the same to six digits"),
        ({"validation_text": {"path": "a.jsonl", "protocol": "words"}}, "validation_text.protocol = 'words'"),
        ({"flags": {"dry_run": True}}, "flags.dry_run: the grid or its base decides it"),
        ({"flags": {"warmup": "much"}}, "flags.warmup = 'much': expected a number"),
        ({"flags": {"warmup": 2}}, "--warmup 2.0 is not valid"),
        ({"one_shot": {"p": {"learning_rates": [1]}}}, "one_shot.p.learning_rates: unknown key"),
        ({"one_shot": {"p": {"mask": "fisher"}}}, "one_shot.p.mask = 'fisher' is not valid: use one of sparsegpt"),
        ({"one_shot": {"p": {"epochs": -1}}}, "one_shot.p: sparseforge.start.epochs = -1 is not valid"),
        ({"one_shot": {"p": {"tokens": 5}}}, "one_shot.p: tokens = 5: less than one sequence of 256"),
        ({"one_shot": {"p": {"pattern": "4:2"}}}, "one_shot.p: .*4:2"),
        ({"one_shot": {"p": {"name": "../x"}}}, "one_shot.p.name: unknown key; an entry is called by its own key, 'p'"),
        ({"one_shot": {"p": {"tokens": 0}}}, "one_shot.p: sparseforge.start.tokens = 0 is not valid"),
        ({"one_shot": {"p q": {}}}, "'p q' becomes the name of a folder"),
        ({"methods": {"p": {"method": "oneshot"}}}, "sparseforge.method = 'oneshot' is not valid"),
        ({"base": "no.json"}, "base .*/no.json: no such file; give the path of a JSON file"),
        ({"tasks": {"names": ["piqa"], "limit": 0}}, "tasks.limit = 0: use null or an integer >= 1"),
        ({"tasks": {"names": ["piqa"], "num_fewshot": -3}}, "tasks.num_fewshot = -3: use null or an integer >= 0"),
        ({"workers": 0}, "workers = 0: use an integer >= 1"),
        ({"keep_models": "yes"}, "keep_models = 'yes': expected true or false"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        read_comparison(path)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "studies").glob("*.json")))
def test_the_shipped_studies_are_read_from_anywhere(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPARSEFORGE_ASSETS", "assets")
    monkeypatch.chdir(ROOT / "tests")  # from anywhere
    config = read_comparison(f"../studies/{name}")
    texts = (config.train_text, config.validation_text.path, config.test_text.path)
    # Others are assets, or made by a script.
    missing = [path for path in (config.model, *texts) if not Path(path).exists()]
    assert main(["compare", f"../studies/{name}", "--dry_run"]) == (2 if missing else 0)
    assert isinstance(config, CompareConfig) and len(config.seeds) >= 3
    count = len(config.methods) * len(config.seeds) * len(config.budgets)
    said = capsys.readouterr()
    assert f"{count} count: {len(config.methods)} methods x {len(config.seeds)} seeds" in said.out
    if not missing:
        assert "every method fits the model and the texts" in said.out
    else:
        assert said.err.startswith("error: ") and any(path in said.err for path in missing), said.err


def test_the_methods_of_the_guides_example_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEFORGE_ASSETS", "assets")
    page = (ROOT / "docs" / "guides" / "compare.md").read_text()
    (example,) = re.findall(r'^```json\n(\{\n  "model".*?)```$', page, re.MULTILINE | re.DOTALL)
    (tmp_path / "studies").mkdir()
    (tmp_path / "ds_configs").symlink_to(ROOT / "ds_configs")
    (tmp_path / "studies" / "example.json").write_text(example)
    config = read_comparison(str(tmp_path / "studies" / "example.json"))
    for method in config.methods.values():
        SparseForgeConfig.from_dict(config.block(method, config.budgets[0]))


def test_the_command_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        ([str(tmp_path / "none.json")], "none.json: no such file; give one like studies/stories.json"),
        ([write(tmp_path), "--workers", "0"], "--workers 0"),
        (
            [write(tmp_path), "--out", str(tmp_path / "out")],
            f"validation_text: --text {tmp_path / 'heldout.jsonl'}: ",
        ),
    ):
        assert main(["compare", *words]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "protocol"),
    [
        ({"path": "a.jsonl"}, "documents"),
        ({"path": "a.jsonl.gz"}, "documents"),
        ({"path": "a.parquet"}, "documents"),
        ({"path": "a.txt"}, "windows"),
        ({"path": "stdlib:heldout"}, "windows"),
        ({"path": "a.jsonl.gz", "protocol": "windows"}, "windows"),
    ],
)
def test_a_text_is_measured_as_evaluate_does(tmp_path: Path, text: dict[str, Any], protocol: str) -> None:
    assert read_comparison(write(tmp_path, test_text=text)).test_text.protocol == protocol
