"""Who may import whom (CONTRIBUTING has the table for people), and which file names do not exist."""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from sparseforge_ds.transformers_internals import WHERE

PACKAGE = Path(__file__).resolve().parents[2] / "sparseforge_ds"

# What each part may import besides itself and the standard library. A name stands for all below it. A part imports only
# parts that stand above it here.
MAY_IMPORT: dict[str, set[str]] = {
    "ranks": {"torch"},
    "started_by": set(),
    "transformers_internals": set(),
    "mask": {"torch"},
    "runtime": {"torch", "mask.packing"},
    "config": {"mask.pattern", "mask.anneal"},
    "checkpoint": {"torch", "safetensors"},
    "zero": {"torch", "deepspeed", "mask", "config.refused_settings", "checkpoint"},
    "model": {
        "torch",
        "transformers",
        "config",
        "mask.pattern",
        "mask.packing",
        "mask.fusing",
        "runtime",
    },
    "start": {"torch", "config", "mask", "model.families", "zero"},
    "data": {"torch", "transformers", "datasets", "numpy", "pyarrow", "config", "checkpoint.disk", "ranks"},
    "curvature": {"torch", "numpy", "config", "mask", "zero"},
    "methods": {
        "torch",
        "transformers.cache_utils",
        "transformers.pytorch_utils",
        "config",
        "mask",
        "zero",
        "model",
        "curvature",
        "start",
    },
    "permutation": {
        "torch",
        "safetensors",
        "transformers",
        "tqdm",
        "config",
        "mask.pattern",
        "checkpoint",
        "model.families",
        "zero",
    },
    "rotation": {
        "torch",
        "transformers",
        "tqdm",
        "config",
        "mask.pattern",
        "checkpoint",
        "model.families",
        "permutation.channels",
        "zero",
    },
    "saved_state": {"__version__", "config.run_state", "checkpoint.reader", "zero", "model.branch", "methods"},
    "forge": {"torch", "config", "mask.anneal", "zero", "model", "methods", "checkpoint", "saved_state"},
    "export": {
        "torch",
        "numpy",
        "transformers",
        "tqdm",
        "config",
        "mask",
        "checkpoint",
        "model.families",
        "model.registration",
        "permutation",
        "rotation.record",
    },
    "planning": {"torch", "transformers", "config", "mask", "model", "zero.expert_hooks"},
    "evaluate": {"torch", "transformers", "datasets", "tqdm", "config", "mask", "model", "ranks"},
    "prune": {
        *(
            "torch",
            "safetensors",
            "accelerate",
            "transformers",
            "tqdm",
            "config",
            "checkpoint",
            "mask.pattern",
            "model",
        ),
        *("start", "data.packing", "export", "evaluate", "permutation.record"),
    },
    "train": {"*"},
    "integrations": {"torch"},
    "compare": {
        "torch",
        "transformers",
        "tqdm",
        "numpy",
        "config",
        "checkpoint.disk",
        "export",
        "evaluate",
    },
    "cli": {"torch", "config", "mask", "checkpoint", "export"},
}
# One file of a part may need more than the part.
ONE_FILE_MORE: dict[str, set[str]] = {
    "cli.main": {"__version__"},
    "cli.bench": {"evaluate"},
    "cli.compare": {"compare"},
    "cli.evaluate": {"evaluate", "ranks", "model.any_family"},
    "cli.generate": {
        *("transformers", "evaluate", "runtime"),
        *("model.chat_template", "model.sound_weights", "model.tokenizer"),
    },
    "cli.given_model": {"huggingface_hub", "model.hub_access", "model.registration"},
    "cli.inspect": {"model.coverage"},
    "cli.permute": {"evaluate", "permutation", "model.registration", "planning.architecture"},
    "cli.prune": {"evaluate.finished_model", "model.registration", "prune"},
    "cli.rotate": {"evaluate", "rotation"},
    "cli.train": {"train.trainer"},
    "cli.plan": {"transformers", "planning", "train"},
    "compare.check": {"train.spec", "data.splits"},
    "compare.figures": {"matplotlib", "pandas"},
    "compare.page": {"jinja2"},
    "compare.summary": {"pandas"},
    "compare.texts": {"data.formats"},
    "compare.training": {"train.trainer"},
    "config.command_line": {"transformers"},
    "config.deepspeed_config": {"torch", "deepspeed", "pydantic"},
    "config.deepspeed_keys": {"deepspeed", "pydantic"},
    "config.optimizer_settings": {"torch", "deepspeed"},
    "config.refused_settings": {"torch", "deepspeed"},
    "data.documents": {"model.chat_template"},
    "data.formats": {"fsspec", "huggingface_hub"},
    "data.hub": {"huggingface_hub", "model.hub_access"},
    "data.packing": {"model.chat_template", "model.tokenizer"},
    "data.splits": {"yaml", "fsspec", "huggingface_hub"},
    "export.compressed_tensors": {"compressed_tensors", "pydantic"},
    "export.model_card": {"huggingface_hub", "yaml"},
    "export.folder_source": {"model.branch"},
    "export.loaded": {"safetensors"},
    "export.mask_only": {"model.sound_weights"},
    "export.free_memory": {"psutil"},
    "export.permuted_folder": {"model.sound_weights"},
    "export.proof": {"safetensors"},
    "export.reference": {"model.loading_error"},
    "export.run_source": {"model.family_table"},
    "export.source": {"model.loading_error"},
    "export.writer": {"huggingface_hub", "psutil"},
    "evaluate.benchmark_files": {"data.local_rows"},
    "evaluate.harness": {"lm_eval", "jinja2"},
    "evaluate.perplexity": {"data.documents"},
    "evaluate.finished_model": {"checkpoint.folder", "checkpoint.tensors", "huggingface_hub", "safetensors"},
    "evaluate.scored_text": {"data.formats", "data.local_rows", "data.stdlib_text"},
    "evaluate.graph_speed": {"runtime.packed_experts", "runtime.packed_linear"},
    "evaluate.speed": {"matplotlib", "runtime.packed_experts"},
    "evaluate.zero_shot": {"lm_eval"},
    "model.chat_template": {"jinja2"},
    "model.hub_access": {"huggingface_hub"},
    "model.low_rank": {"deepspeed"},
    "model.packed24_files": {"safetensors"},
    "model.registration": {"huggingface_hub", "checkpoint.model_files"},
    "model.tokenizer": {"huggingface_hub", "sentencepiece", "checkpoint.model_files", "tokenizers"},
    "permutation.apply": {"deepspeed", "model.groups"},
    "integrations.step_text": {"data.micro_batch", "model", "train", "zero.probe"},
    "integrations.trainer_settings": {"transformers", "checkpoint", "config", "model", "train"},
    "integrations.transformers": {
        *("transformers", "accelerate", "config", "data.micro_batch", "forge", "model", "train"),
        *("permutation.record", "rotation.record", "runtime.extension_locks"),
    },
    "integrations.vllm.__init__": {"vllm", "mask.packing"},
    "integrations.vllm.experts": {"vllm", "mask.packing", "runtime.experts24"},
    "integrations.vllm.linear": {"vllm", "mask.packing", "runtime.linear24"},
    "integrations.vllm.packed24": {"vllm", "mask.packing"},
    "rotation.rotate": {"model.sound_weights"},
    "runtime.triton_kernel": {"triton"},
    "runtime.triton_programs": {"triton"},
    "runtime.triton_words": {"triton"},
    "zero.expert_hooks": {"transformers_internals"},
    "zero.layer_hooks": {"transformers.modeling_utils"},
}
# The public names.
FREE = {"__init__", "__main__"}

FORBIDDEN_STEMS = {"utils", "util", "common", "helpers", "helper", "base", "misc"}

FILES = sorted(PACKAGE.rglob("*.py"))


def _module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def _imports(path: Path, types: bool = True) -> set[str]:
    """Every module a file names in an import, at its top or inside a function; ours without the `sparseforge_ds.`.

    DeepSpeed counts where it is imported in fact, and not for types alone; the others do without `types`.
    """
    found, for_types = set(), set()
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for_types |= {id(below) for statement in node.body for below in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in for_types and (not types or getattr(node, "module", None) == "deepspeed"):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write it from sparseforge_ds down"
            assert node.module is not None
            if node.module == "sparseforge_ds" or (PACKAGE.parent / node.module.replace(".", "/")).is_dir():
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return {name.removeprefix("sparseforge_ds.") for name in found}


def _covered(name: str, allowed: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_go_one_way(path: Path) -> None:
    part = _module(path).split(".")[0]
    if part in FREE:
        return
    assert part in MAY_IMPORT, (
        f"{part} is a new part of the package: give it a row in MAY_IMPORT and in CONTRIBUTING.md"
    )
    if "*" in MAY_IMPORT[part]:
        return
    allowed = MAY_IMPORT[part] | ONE_FILE_MORE.get(_module(path), set()) | {part}
    if "transformers" in allowed:
        allowed |= {"transformers_internals"}
    offenders = {
        name
        for name in _imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names | {"typing_extensions"} and not _covered(name, allowed)
    }
    assert not offenders, f"{path.relative_to(PACKAGE.parent)} may not import {sorted(offenders)}"


def test_no_arrow_runs_upward() -> None:
    order = list(MAY_IMPORT)
    for path in FILES:
        part = _module(path).split(".")[0]
        if part in order and path.stem != "__main__":
            above = {name.split(".")[0] for name in _imports(path)} & set(order[order.index(part) + 1 :])
            assert not above, f"{path.relative_to(PACKAGE.parent)} imports {sorted(above)}, which stand on {part}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    modules = {_module(path): path for path in FILES}
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for name, path in modules.items():
        found = {
            next((one for one in (f, f.rpartition(".")[0]) if one in modules), None)
            for f in _imports(path, types=False)
        }
        sorter.add(name, *(found - {name, None}))
    try:
        sorter.prepare()
    except CycleError as circle:
        pytest.fail(f"a circle of imports: {' -> '.join(circle.args[1])}")


def test_internals_of_transformers_are_imported_in_one_place() -> None:
    """Where their absence is an error that names the version."""
    modules = {f"transformers.{module}" for module in WHERE.values()} - {"transformers.modeling_outputs"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "transformers":
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert node.module not in modules and not private, (
                    f"{path}, line {node.lineno}: import it from sparseforge_ds.transformers_internals"
                )


def test_rows_of_one_file_are_not_stale() -> None:
    modules = {_module(path): path for path in FILES}
    for name, more in ONE_FILE_MORE.items():
        assert name in modules, f"{name} is gone; take it out of ONE_FILE_MORE"
        unused = {entry for entry in more if not any(_covered(found, {entry}) for found in _imports(modules[name]))}
        assert not unused, f"{name} no longer imports {sorted(unused)}"


def test_collectives_go_through_the_layout() -> None:
    """A layout has ZeRO's own group; beside it there are the trainer and the ranks' talk about errors and results."""
    direct = {_module(path) for path in FILES if "torch.distributed" in _imports(path)}
    direct = {name for name in direct if not name.startswith("train.")}
    assert direct == {"zero.shard", "zero.deepspeed_layouts", "ranks"}


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_a_file_has_a_noun_of_its_own(path: Path) -> None:
    assert path.stem not in FORBIDDEN_STEMS
    assert path.parent.name not in FORBIDDEN_STEMS
