"""Fine-tuning of a 2:4 folder by transformers' Trainer and by PEFT, as the guide has it, without DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from sparseforge_ds.cli.main import main
from sparseforge_ds.export.run_source import RunSource
from sparseforge_ds.integrations.mask_callback import MaskKeeperCallback
from tests.distributed import run_distributed
from tests.end_to_end.test_train import flags_of, train
from tests.sparse_folders import sparse_model, write_dense, write_sparse
from tests.tiny_folders import BYTE_VOCABULARY, deepspeed_json, write_model, write_text
from tests.tiny_models import tiny_llama

_SCRIPT = """
import json, sys
sys.modules["deepspeed"] = None  # as where it is not installed

import torch
from pathlib import Path
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from sparseforge_ds import keep_mask
from sparseforge_ds.integrations.mask_callback import MaskKeeperCallback

folder, out = map(Path, sys.argv[1:])
torch.manual_seed(0)
token_NS = torch.randint(3, 64, (32, 8))
data = [{"input_ids": row, "labels": row} for row in token_NS]
report = {}


def trainer(name, model=None, **more):
    settings = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, save_steps=2, seed=0,
                    learning_rate=1e-2, weight_decay=0.1, use_cpu=True, report_to=[], disable_tqdm=True)
    args = TrainingArguments(str(out / name), **settings | more)
    model = AutoModelForCausalLM.from_pretrained(folder) if model is None else model
    keeper = MaskKeeperCallback()
    return Trainer(model=model, args=args, train_dataset=data, callbacks=[keeper]), keeper


# A run, and the same one resumed at its second step.
whole, keeper = trainer("whole")
whole.train()
whole.save_model()
report["kept"] = str(keeper.keeper)
resumed, _ = trainer("resumed")
resumed.train(resume_from_checkpoint=str(out / "whole" / "checkpoint-2"))
pairs = zip(whole.model.state_dict().items(), resumed.model.state_dict().values())
report["unequal"] = [name for (name, value), other in pairs if not torch.equal(value, other)]

# A zero that is lost to somebody else's code stops the run at its next save; a dense model does not begin.
lost, keeper = trainer("lost")
name, weight = next((n, p) for n, p in lost.model.named_parameters() if n.endswith("q_proj.weight"))


class Vandal(MaskKeeperCallback):
    def on_step_end(self, args, state, control, **_):
        weight.data += 1


lost.add_callback(Vandal())
for label, run in {"lost": lost.train, "dense": lambda: trainer("dense", type(lost.model)(lost.model.config))}.items():
    try:
        run()
    except ValueError as error:
        report[label] = str(error)

# The loop that the guide shows, around a compiled model and with loss scaling.
model = AutoModelForCausalLM.from_pretrained(folder)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
keeper = keep_mask(torch.compile(model, backend="eager"), optimizer)
scaler = torch.amp.GradScaler("cpu")
with torch.autocast("cpu", torch.bfloat16):
    loss = torch.compile(model, backend="eager")(input_ids=token_NS[:2], labels=token_NS[:2]).loss
scaler.scale(loss).backward()
scaler.unscale_(optimizer)
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
scaler.step(optimizer)
keeper.check()
model.save_pretrained(out / "loop")

# LoRA on the frozen base by a trainer, merged and projected.
try:
    import peft
except ImportError:
    report["peft"] = None
else:
    model = AutoModelForCausalLM.from_pretrained(folder)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(model, lora)
    adapters = {name: value.detach().clone() for name, value in tuned.named_parameters() if "lora_B" in name}
    run, keeper = trainer("lora", tuned)
    run.train()
    report["peft"] = str(keeper.keeper)
    report["still"] = [name for name, value in tuned.named_parameters() if name in adapters and not value.any()]
    frozen = {n.replace("base_model.model.", "").replace("base_layer.", ""): v for n, v in tuned.state_dict().items()}
    report["moved"] = [name for name, value in base.items() if not torch.equal(value, frozen[name])]
    tuned.save_pretrained(out / "adapter")
    merged = tuned.merge_and_unload()
    expected = {n: p.detach().clone() for n, p in merged.named_parameters()}
    errors = keeper.keeper.project()
    merged.save_pretrained(out / "merged")
    report["errors"] = errors
    report["expected"] = {}
    for name, value in merged.named_parameters():
        if name in base and "_proj" in name:
            assert torch.equal(value, expected[name] * (base[name] != 0)), name
            lost_norm = (expected[name] - value).norm() / expected[name].norm()
            report["expected"][name] = float(lost_norm)
(out / "report.json").write_text(json.dumps(report))
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Run the script, and return its output folder and its report."""
    root = tmp_path_factory.mktemp("finetune")
    write_dense(root / "dense", "llama")
    write_sparse(root / "sparse", root / "dense", "llama")
    (root / "out").mkdir()
    (root / "script.py").write_text(_SCRIPT)
    command = [sys.executable, str(root / "script.py"), str(root / "sparse"), str(root / "out")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr[-4000:]
    return root / "out", json.loads((root / "out" / "report.json").read_text())


def test_a_trainer_keeps_the_pattern_and_resumes_to_the_bit(
    tuned: tuple[Path, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tuned
    assert report["kept"].startswith("2:4 kept in 14 weights, with ") and report["unequal"] == []
    for folder in ("whole", "whole/checkpoint-4", "resumed/checkpoint-4", "loop"):
        assert main(["verify", str(out / folder)]) == 0, capsys.readouterr().out


def test_a_trainer_stops_where_a_zero_is_lost_and_refuses_a_dense_model(tuned: tuple[Path, dict]) -> None:
    _, report = tuned
    assert "layers.0.self_attn.q_proj.weight: 512 pruned entries are not 0" in report["lost"]
    assert "no weight of LlamaForCausalLM is 2:4 or 4:8" in report["dense"]


def test_lora_leaves_its_base_alone_and_is_merged_with_the_error(
    tuned: tuple[Path, dict], capsys: pytest.CaptureFixture[str]
) -> None:
    out, report = tuned
    if report["peft"] is None:
        pytest.skip("peft is not installed")
    assert report["peft"].startswith("2:4 kept in 14 weights") and report["still"] == report["moved"] == []
    # Only the weights with an adapter lose anything, and what the handle says is what is lost.
    errors = {
        name.replace("base_model.model.", "").replace("base_layer.", ""): e for name, e in report["errors"].items()
    }
    assert errors == pytest.approx(report["expected"], rel=1e-3, abs=1e-9)
    assert {name for name, error in errors.items() if error} == {
        f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert main(["verify", str(out / "merged")]) == 0, capsys.readouterr().out


def _refusals(folder: str) -> list[str]:
    """Return the messages with which the callback refuses a trainer at ZeRO-2 and ZeRO-3."""
    messages = []
    for stage in (2, 3):
        settings = {key: value for key, value in deepspeed_json(stage).items() if key != "sparseforge"}
        settings["train_batch_size"] = "auto"
        args = TrainingArguments(
            f"{folder}/trainer", deepspeed=settings, max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        row = torch.arange(8)
        try:
            model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
            data = [{"input_ids": row, "labels": row}] * 8
            Trainer(model=model, args=args, train_dataset=data, callbacks=[MaskKeeperCallback()]).train()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_under_deepspeed_the_cure_of_the_refusal_keeps_the_zeros(tmp_path: Path) -> None:
    shape = {"vocab_size": BYTE_VOCABULARY, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}
    zeros: dict[str, torch.Tensor] = {}
    write_model(tmp_path / "model", sparse_model(tiny_llama(**shape), zeros))
    ((flat, full),) = run_distributed(_refusals, 1, str(tmp_path))
    cure = 'train it with SparseForge or SparseForgeTrainer and {"method": "naive_retrain", "importance": "magnitude"}'
    assert flat.startswith("optimizer is DeepSpeedZeroOptimizer") and cure in flat
    assert "is partitioned by ZeRO-3" in full and cure in full
    # Follow it.
    write_text(tmp_path / "text.jsonl", documents=200)
    content = deepspeed_json(2, method="naive_retrain", importance="magnitude", distillation=None)
    train(*flags_of(tmp_path, content))
    source = RunSource(tmp_path / "run" / "checkpoints" / "step_000008")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, zero in zeros.items():
        trained = source.read(name)
        assert torch.equal(trained == 0, zero) and not torch.equal(trained, dense.get_parameter(name)), name
