"""Exports of real runs as Hugging Face folders: plain transformers gives the logits of the frozen engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.sharded_checkpoint import write_run
from sparseforge_ds.checkpoint.reader import Checkpoint
from sparseforge_ds.checkpoint.tensors import TensorFolder
from sparseforge_ds.cli.main import main
from sparseforge_ds.evaluate.finished_model import load_model
from sparseforge_ds.export import verification
from sparseforge_ds.export.formats import export
from sparseforge_ds.export.open import open_source
from sparseforge_ds.export.reference import filled_model
from sparseforge_ds.mask.kernels.codes import decode, encode
from sparseforge_ds.model.families import BRANCH
from tests import tiny_models
from tests.distributed import ROOT, run_distributed
from tests.forked_interpreter import run_script
from tests.zero.case import Case, batch_at, build, probe_of, published, republish, short, states, train_step
from tests.zero.test_families import Family

CASES: dict[str, tuple[str, Case]] = {
    "stage0-fp32": ("llama", Case(stage=0)),
    "stage0-bf16": ("llama", Case(stage=0, dtype="bf16")),
    "stage1-tied-bf16": ("qwen3", Case(stage=1, dtype="bf16")),
    "stage2-conv1d": ("gpt2", Case(stage=2)),
    "stage3-tied": ("qwen3", Case(stage=3)),
    "stage3-bf16": ("llama", Case(stage=3, dtype="bf16")),
    "stage3-tied-bf16": ("qwen3", Case(stage=3, dtype="bf16")),
    "stage3-fp16": ("llama", Case(stage=3, dtype="fp16", more={"fp16": {"loss_scale": 16}})),
    "stage2-block": ("llama", Case(stage=2, config={"pattern": "block16"})),
    "stage3-low-rank": ("llama", Case(stage=3, config={"low_rank": {"k": 8}})),
    "stage2-low-rank-conv1d": ("gpt2", Case(stage=2, config={"low_rank": {"k": 12}})),  # of 32 and 128 inputs
    "stage3-low-rank-learned": ("llama", Case(stage=3, config={"low_rank": {"k": 8, "learned": True}})),
    "stage1-low-rank-learned-conv1d": ("gpt2", Case(stage=1, config={"low_rank": {"k": 12, "learned": True}})),
    "stage3-excluded": ("llama", Case(stage=3, config={"exclude": ["*.down_proj.weight"]})),
    "stage2-unfinished": ("llama", Case(stage=2, steps=5)),
    "stage3-unfinished-bf16": ("llama", Case(stage=3, steps=6, dtype="bf16")),
    "stage1-unfinished-conv1d": ("gpt2", Case(stage=1, steps=4)),
    "stage3-unfinished-block": ("llama", Case(stage=3, steps=5, config={"pattern": "block16"})),
    "stage3-qwen3_moe": ("qwen3_moe", Case(stage=3)),
    "stage3-mixtral-bf16": ("mixtral", Case(stage=3, dtype="bf16")),
    "stage2-deepseek_v2": ("deepseek_v2", Case(stage=2)),
    "stage3-deepseek": ("deepseek", Case(stage=3)),
    "stage2-listed": ("olmoe", Case(stage=2)),
    "stage3-one-step": ("llama", Case(stage=3, steps=1)),
    "stage3-quantized": ("llama", Case(stage=3, config={"quantize": {"group_size": 8}})),
    "stage2-quantized-conv1d-bf16": ("gpt2", Case(stage=2, dtype="bf16", config={"quantize": {"group_size": None}})),
    "stage1-unfinished-quantized": ("llama", Case(stage=1, steps=5, config={"quantize": {"group_size": 16}})),
}
WEIGHTS = {
    "llama": 14,
    "qwen3": 14,
    "gpt2": 8,
    "qwen3_moe": 23,
    "mixtral": 32,
    "olmoe": 32,
    "deepseek_v2": 28,
    "deepseek": 26,
}
"""Tensors of an export, in which every expert has three of its own."""
MORE_FAMILIES = {
    **dict.fromkeys(("cohere2", "gemma2", "gemma3_text", "granite", "internlm3", "olmo2", "olmo3", "smollm3"), 14),
    **{"falcon": 8, "glm4": 12, "gpt_neo": 12, "gpt_neox": 8, "phi3": 8, "starcoder2": 12},
    **{"glm4_moe": 26, "gpt_oss": 12, "llama4_text": 16, "qwen3_next": 24},
    **{"qwen3_5_text": 13, "qwen3_5_moe_text": 37},
}
"""The same of families of which nothing but this is tried; GPT-OSS and Llama 4 are published with fused experts."""
WEIGHTS |= MORE_FAMILIES
UNFINISHED = {name for name in CASES if "unfinished" in name} | {"stage3-one-step"}
CASES |= {name: (family, short(case)) for name, (family, case) in CASES.items() if name not in UNFINISHED}
FIXED = {"method": "naive_retrain", "importance": "magnitude", "max_steps": 1}
"""One step under a mask that is frozen before it, which is saved as any other that is frozen."""
CASES |= {
    f"stage{2 + i % 2}-{name}": (name, Case(stage=2 + i % 2, config=FIXED, steps=1))
    for i, name in enumerate(MORE_FAMILIES)
}
MODELS = tiny_models.BUILDERS


@dataclass(frozen=True)
class Run:
    """A saved run and what its engine computed at the end."""

    folder: Path
    logits: Tensor
    mask: dict[str, Tensor]
    dense: dict[str, Tensor]
    hard: dict[str, Tensor]
    """Weights that the network would see if its mask were hardened now; only of unfinished runs."""


def save_runs(folder: str) -> dict[str, Any]:
    """Train every case, save it as the trainer does, and return logits, masks and dense weights of the engine."""
    results = {}
    for name, (family, case) in CASES.items():
        run = Path(folder) / name
        model = MODELS[family]()
        if "listed" in name:
            model = Family(family, listed=True).model()
        # The folder of a run, as far as tools read it.
        if torch.distributed.get_rank() == 0:
            model.config.save_pretrained(run / "model")
            model.generation_config.save_pretrained(run / "model")
            (run / "sparseforge.json").write_text(json.dumps({"coverage": {"masked": 1}}))
        engine, forge = build(case, model)
        forge.start(probe_of(engine, case, 0))
        for step in range(case.steps):
            train_step(engine, case, step)
            forge.step(probe_of(engine, case, step))
        engine.save_checkpoint(str(run / "checkpoints"), tag="step")
        # What an export of it must compute.
        engine.eval()
        with torch.no_grad():
            logits = engine(batch_at(0)["input_ids"]).logits
        saved = states(forge, "mask", "dense")
        hard = {}
        # An unfinished run is exported with hard masks.
        if name in UNFINISHED:
            republish(forge, hard=True)
            hard = published(engine)
        results[name] = (logits, saved["mask"], saved["dense"], hard)
    return results


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    results = run_distributed(save_runs, 2, str(folder))[0]
    return {name: Run(folder / name, *result) for name, result in results.items()}


@pytest.fixture(scope="module")
def exported(runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Export every run in the dtype in which it was trained."""
    folder = tmp_path_factory.mktemp("exported")
    for name, run in runs.items():
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[CASES[name][1].dtype]
        assert main(["consolidate", "--skip_proof", str(run.folder), str(folder / name), "--dtype", dtype]) == 0
    return {name: folder / name for name in runs}


@pytest.mark.parametrize("name", CASES)
def test_every_group_verifies(exported: dict[str, Path], name: str) -> None:
    report = verification.check_folder(exported[name])
    family, case = CASES[name]
    assert report.ok and report.pattern == str(case.sparseforge.parsed_pattern)
    expected = WEIGHTS[family] - (2 if "excluded" in name else 0)
    assert len(report.rows) == expected
    sparsity = json.loads((exported[name] / "sparsity.json").read_text())
    assert sparsity["finished"] == (name not in UNFINISHED)
    assert sparsity["step"] == case.steps and sparsity["coverage"] == {"masked": 1}
    assert sparsity["config"] == case.sparseforge.to_dict()


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNFINISHED and "low-rank" not in name])
def test_logits_are_those_of_the_frozen_engine(runs: dict[str, Run], exported: dict[str, Path], name: str) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(exported[name], output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert model.dtype == runs[name].logits.dtype
    with torch.no_grad():
        logits = model.eval()(batch_at(0)["input_ids"]).logits
    if "listed" in name:  # a list sums the experts of a token in another order
        torch.testing.assert_close(logits, runs[name].logits, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(logits, runs[name].logits)


def test_experts_of_a_list_fill_the_model_that_fuses_them(runs: dict[str, Run], exported: dict[str, Path]) -> None:
    """Fill the model as the proof of an export does."""
    name = "stage2-listed"
    source = open_source(runs[name].folder)
    assert not source.fused_name  # the run had the saved names
    expected = AutoModelForCausalLM.from_pretrained(exported[name]).state_dict()
    result = filled_model(source).state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in result
    assert result.keys() == expected.keys() and all(torch.equal(result[key], expected[key]) for key in result)


@pytest.mark.parametrize("name", [name for name in CASES if "low-rank" in name])
def test_a_branch_is_exported_as_a_peft_adapter(runs: dict[str, Run], exported: dict[str, Path], name: str) -> None:
    peft = pytest.importorskip("peft")
    base = load_model(str(exported[name]))
    with torch.no_grad():
        bare = base(batch_at(0)["input_ids"]).logits
        tuned = peft.PeftModel.from_pretrained(base, exported[name]).eval()
        logits = tuned(batch_at(0)["input_ids"]).logits
        at_once = AutoModelForCausalLM.from_pretrained(exported[name])(batch_at(0)["input_ids"]).logits
    assert (bare - runs[name].logits).abs().max() > 1e-3
    torch.testing.assert_close(logits, runs[name].logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(at_once, runs[name].logits, rtol=1e-4, atol=1e-5)
    names = list(TensorFolder(exported[name]).specs)
    assert not any(key.endswith(BRANCH) for key in names)


@pytest.mark.parametrize("name", [name for name in CASES if "low-rank" in name])
def test_an_export_with_branches_is_a_source_too(
    runs: dict[str, Run], exported: dict[str, Path], tmp_path: Path, name: str
) -> None:
    run = open_source(runs[name].folder, dtype="float32")
    folder = open_source(exported[name])
    assert run.branch_specs == folder.branch_specs and len(run.branches) == len(run.prunable)
    assert len(run.branch_specs) == len(run.branches) * (2 if "learned" in name else 1)
    assert all(torch.equal(run.read_branch(key), folder.read_branch(key)) for key in run.branch_specs)
    export(folder, tmp_path / "again", skip_proof=True)
    for file in ("model.safetensors", "adapter_model.safetensors", "adapter_config.json", "README.md"):
        assert (tmp_path / "again" / file).read_bytes() == (exported[name] / file).read_bytes()
    record, record_again = (
        json.loads((out / "sparsity.json").read_text()) for out in (exported[name], tmp_path / "again")
    )
    assert record == {**record_again, "proof": None}
    adapter = tmp_path / "again" / "adapter_model.safetensors"
    content = bytearray(adapter.read_bytes())
    content[-1] ^= 1
    adapter.write_bytes(content)
    with pytest.raises(ValueError, match="adapter_model.safetensors: has not the sha256"):
        export(open_source(tmp_path / "again"), tmp_path / "third", skip_proof=True)


@pytest.mark.parametrize("name", ["stage2-quantized-conv1d-bf16", "stage1-unfinished-quantized"])
def test_codes_and_scales_of_a_run_are_packed_as_they_are(
    runs: dict[str, Run], tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[CASES[name][1].dtype]
    rounded = ["--format", "packed24", "--dtype", dtype, "--values"]
    assert main(["export", str(runs[name].folder), str(tmp_path / "out"), *rounded, "int4"]) == 0
    stdout = capsys.readouterr().out
    assert "values: codes and scales of the run, unchanged" in stdout and "logits bit-equal" in stdout
    run, packed = open_source(runs[name].folder, dtype=dtype), open_source(tmp_path / "out")
    stored = TensorFolder(tmp_path / "out")
    for key, weight in run.prunable.items():
        assert torch.equal(packed.read(key), run.read(key))
        scale = run.codes(key)[1]
        assert torch.equal(stored.read(f"{key}_scale"), scale)
        assert stored.specs[key].shape[weight.input_axis] == weight.shape[weight.input_axis] // 4
    for flags, message in (
        (["int8"], "were trained in 4 bits, and would be rounded twice; give int4"),
        (["int4", "--group_size", "32"], "--group_size 32: the run was trained with"),
    ):
        assert main(["export", str(runs[name].folder), str(tmp_path / "no"), *rounded, *flags]) == 2
        assert message in capsys.readouterr().err
    # The dequantized export has lost codes and scales, which rounding would not find again.
    assert main(["export", str(runs[name].folder), str(tmp_path / "plain")]) == 0
    assert main(["export", str(tmp_path / "plain"), str(tmp_path / "again"), *rounded, "int4"]) == 2
    assert "were trained in 4 bits, and would be rounded again; give the run" in capsys.readouterr().err
    assert main(["export", str(runs["stage3-quantized"].folder), str(tmp_path / "no"), *rounded, "int4"]) == 2
    assert "was trained in groups of 8, and packed24 stores scales of a multiple of 16 kept" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stage3-bf16", "stage2-conv1d", "stage2-unfinished", "stage3-one-step"])
def test_weights_are_hard_mask_times_dense(runs: dict[str, Run], tmp_path: Path, name: str) -> None:
    out = tmp_path / "out"
    assert main(["consolidate", "--skip_proof", str(runs[name].folder), str(out), "--dtype", "float32"]) == 0
    state = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()
    checked = 0
    for key, mask in runs[name].mask.items():
        shape = tuple(state[key].shape)
        matrix = mask.view(shape) if CASES[name][0] != "gpt2" else mask.view(shape).T
        dense = runs[name].dense[key].view(shape) if CASES[name][0] != "gpt2" else runs[name].dense[key].view(shape).T
        weight = state[key] if CASES[name][0] != "gpt2" else state[key].T
        for m, d, w in zip(
            matrix.reshape(-1, 4).tolist(), dense.reshape(-1, 4).tolist(), weight.reshape(-1, 4).tolist(), strict=True
        ):
            # Before the first mask update all masks are 1, and the dense weight decides.
            value = [abs(x) for x in d] if name == "stage3-one-step" else m
            kept = sorted(range(4), key=lambda i: (-value[i], i))[:2]
            assert w == [d[i] if i in kept else 0.0 for i in range(4)]
            checked += 1
    assert checked > 1000


@pytest.mark.parametrize("name", [name for name in CASES if "unfinished" in name])
def test_a_soft_run_exports_what_hardening_would_give(runs: dict[str, Run], tmp_path: Path, name: str) -> None:
    trained = {"fp32": "float32", "bf16": "bfloat16"}[CASES[name][1].dtype]
    assert main(["consolidate", "--skip_proof", str(runs[name].folder), str(tmp_path / "out"), "--dtype", trained]) == 0
    source = open_source(tmp_path / "out")
    assert len(source.prunable) == len(runs[name].mask)
    for key, expected in runs[name].hard.items():
        value = source.read(key)
        assert value.dtype == expected.dtype and torch.equal(value, expected), key


def test_ties_of_a_soft_mask_go_to_the_lower_index(runs: dict[str, Run], tmp_path: Path) -> None:
    """Break ties as in training, also where the dense weight of the other is larger."""
    run = tmp_path / "run"
    shutil.copytree(runs["stage2-unfinished"].folder, run)
    for file in sorted((run / "checkpoints" / "step").glob("*_optim_states.pt")):
        content = torch.load(file, weights_only=False)
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["mask"].copy_(encode(torch.randint(1, 4, state["mask"].shape) / 4))
        torch.save(content, file)
    source = open_source(run)
    name = "model.layers.0.self_attn.q_proj.weight"
    mask, dense = (source.checkpoint.state(name, key).view(-1, 4) for key in ("mask", "dense"))
    ties = 0
    for m, d, w in zip(mask.tolist(), dense.tolist(), source.read(name).view(-1, 4).tolist(), strict=True):
        kept = sorted(range(4), key=lambda i: (-m[i], i))[:2]
        ties += m[kept[1]] in [m[i] for i in range(4) if i not in kept]
        assert w == [d[i] if i in kept else 0.0 for i in range(4)]
    assert ties > 100


def test_an_unfinished_run_is_reported_as_unfinished(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["consolidate", "--skip_proof", str(runs["stage2-unfinished"].folder), str(tmp_path / "out")]) == 0
    assert "note: the run was not finished at step 5" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["stage3-tied", "stage1-tied-bf16"])
def test_tied_head_is_stored_once(exported: dict[str, Path], name: str) -> None:
    sparsity = json.loads((exported[name] / "sparsity.json").read_text())
    assert "model.embed_tokens.weight" in sparsity["dense"] and "lm_head.weight" not in sparsity["dense"]


def test_shards_hold_the_same_tensors(runs: dict[str, Run], exported: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [str(runs["stage3-bf16"].folder), str(out), "--dtype", "bfloat16", "--max_shard_size", "20KB"]
    assert main(["consolidate", "--skip_proof", *command]) == 0
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 2 and not (out / "model.safetensors").exists()
    assert all(file.stat().st_size < 24_000 for file in files)
    assert verification.check_folder(out).ok
    full = AutoModelForCausalLM.from_pretrained(exported["stage3-bf16"]).state_dict()
    for key, value in AutoModelForCausalLM.from_pretrained(out).state_dict().items():
        assert torch.equal(value, full[key])


def test_the_reader_returns_the_states_of_the_forge(runs: dict[str, Run]) -> None:
    for name in ("stage0-fp32", "stage0-bf16", "stage1-tied-bf16", "stage3-bf16", "stage2-low-rank-conv1d"):
        checkpoint = Checkpoint(runs[name].folder)
        for key, mask in runs[name].mask.items():
            assert torch.equal(checkpoint.state(key, "kept").flatten().float(), mask)
            assert torch.equal(checkpoint.weight(key).flatten(), runs[name].dense[key])
            assert set(checkpoint.states(key)) == {"exp_avg", "exp_avg_sq", "kept"}
    for name in ("stage2-unfinished", "stage3-unfinished-bf16"):
        checkpoint = Checkpoint(runs[name].folder)
        for key, mask in runs[name].mask.items():
            assert torch.equal(decode(checkpoint.state(key, "mask")).flatten(), mask)
            assert torch.equal(checkpoint.state(key, "dense").flatten(), runs[name].dense[key])
            assert set(checkpoint.states(key)) == {"dense", "exp_avg", "exp_avg_sq", "mask"}


def test_exports_that_cannot_work_are_refused(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs["stage2-conv1d"].folder)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("mine")
    cases = {
        (run, str(tmp_path / "used")): "is not an empty folder",
        (run, str(tmp_path / "file")): "is not an empty folder",
        (run, str(tmp_path / "x"), "--max_shard_size", "big"): "--max_shard_size big: write a number",
        (run, str(tmp_path / "x"), "--model", str(tmp_path)): "config.json: no such file",
        (run, str(tmp_path / "file" / "x")): "cannot be written",
        (str(tmp_path / "none"), str(tmp_path / "x")): "none: no such folder",
        (str(tmp_path / "empty"), str(tmp_path / "x")): "holds no checkpoint",
    }
    for command, message in cases.items():
        assert main(["consolidate", "--skip_proof", *command]) == 2, command
        assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "used"]
    assert main(["consolidate", "--skip_proof", run, str(tmp_path / "empty")]) == 0
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_full_disk_leaves_nothing_behind(runs: dict[str, Run], tmp_path: Path) -> None:
    """Limit the size of files in place of a full disk: the same OSError at the same place."""
    code = f"""
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
from sparseforge_ds.cli.main import main
sys.exit(main(["consolidate", "--skip_proof", {str(runs["stage3-bf16"].folder)!r}, {str(tmp_path / "out")!r}]))
"""
    done = run_script(code, cwd=ROOT)
    assert done.returncode == 2, done.stderr
    assert f"error: {tmp_path / 'out'}: cannot be written" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["weight", "bit", "mask", "no forge", "list"])
def test_inconsistent_checkpoints_are_refused(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    # Change one thing in one file of a sound checkpoint.
    run = tmp_path / "run"
    shutil.copytree(runs["stage3-unfinished-bf16" if damage == "mask" else "stage3-bf16"].folder, run)
    kind = "optim" if damage in ("weight", "bit", "mask") else "model"
    file = sorted((run / "checkpoints" / "step").glob(f"*_{kind}_states.pt"))[0]
    content = torch.load(file, weights_only=False)
    if damage == "weight":
        master = content["optimizer_state_dict"]["fp32_flat_groups"][0].data
        master[(master == 0).nonzero()[0]] = 1.0
        message = "the master of model.layers.0.self_attn.q_proj.weight is not mask * dense"
    elif damage == "bit":
        content["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["kept"][0] ^= 1
        message = "model.layers.0.self_attn.q_proj.weight is not 2:4 although its mask was frozen"
    elif damage == "mask":
        for state in content["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
            state.pop("mask", None)
        message = "q_proj.weight has no mask yet"
    elif damage == "no forge":
        del content["sparseforge"]
        message = "was not saved by SparseForge"
    else:
        content["sparseforge"]["weights"][0] = ["q_proj"]
        message = "lists a damaged weight"
    # The message names it, and nothing is written.
    torch.save(content, file)
    assert main(["consolidate", "--skip_proof", str(run), str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def structure(value: Any) -> Any:
    """Keys, types, dtypes and sizes, without values; of our own client state and DeepSpeed's settings only that they
    are there."""
    if isinstance(value, Tensor):
        return (type(value), value.dtype, tuple(value.shape))
    if isinstance(value, dict):
        return {key: "" if key in ("sparseforge", "ds_config") else structure(inner) for key, inner in value.items()}
    return [structure(inner) for inner in value] if isinstance(value, (list, tuple)) else type(value)


@pytest.mark.parametrize("name", ["stage3-bf16", "stage3-tied-bf16"])
def test_generated_checkpoints_are_built_like_real_ones(runs: dict[str, Run], tmp_path: Path, name: str) -> None:
    """benchmarks/consolidation.py measures on the former."""
    config = MODELS[CASES[name][0]]().config
    generated = write_run(tmp_path / "run", config, ranks=2)
    real = runs[name].folder / "checkpoints" / "step"
    names = sorted(file.name for file in real.iterdir())
    assert names == sorted(file.name for file in generated.iterdir()) and len(names) == 4
    for file in names:
        ours, reference = (torch.load(folder / file, weights_only=False) for folder in (generated, real))
        assert structure(ours) == structure(reference), file
        assert (
            ours["ds_version"] == reference["ds_version"] and ours["ds_config"].keys() == reference["ds_config"].keys()
        )
        if "sparseforge" in reference:
            assert reference["sparseforge"]["config"]["curvature"].pop("source") == "probe"  # a choice of `Case`
            assert ours["sparseforge"]["config"]["curvature"].pop("source") is None
            assert structure(ours["sparseforge"]) == structure(reference["sparseforge"])
            assert ours["sparseforge"]["weights"] == reference["sparseforge"]["weights"]
    assert verification.check_folder(exported_to(tmp_path / "out", tmp_path / "run")).ok


def exported_to(out: Path, run: Path) -> Path:
    assert main(["consolidate", "--skip_proof", str(run), str(out)]) == 0
    return out
