"""A loop of accelerate's, as `accelerate launch` starts it with a DeepSpeed plugin; it goes on at another stage."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparseforge_ds.cli.main import main
from sparseforge_ds.train.launcher import free_port
from tests.distributed import PATIENCE, run_distributed
from tests.tiny_folders import BYTE_VOCABULARY, write_json, write_model, write_text
from tests.tiny_models import tiny_llama

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "accelerate_loop.py"


def losses(output: str) -> list[float]:
    return [float(result) for result in re.findall(r"^step \d+ loss (\S+)", output, flags=re.MULTILINE)]


def go_on(configuration: str, flags: list[str]) -> None:
    """Run the loop in this rank, which accelerate finds to be one of a launch."""
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": configuration}
    sys.argv = [str(SCRIPT), *flags]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_a_loop_of_accelerate_trains_exports_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model = write_model(tmp_path / "model", tiny_llama(vocab_size=BYTE_VOCABULARY))
    flags = ["--model", str(model), "--text", str(write_text(tmp_path / "text.jsonl", 20)), "--length", "64"]
    flags += ["--epochs", "2", "--output_dir"]
    # The example as its readers start it, on two ranks.
    content = json.loads((ROOT / "examples" / "zero2.json").read_text())
    configuration = write_json(tmp_path / "zero2.json", content)
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--use_deepspeed"]
    command += ["--num_processes", "2", "--main_process_port", str(free_port())]
    command += ["--deepspeed_config_file", str(configuration), str(SCRIPT)]
    process = subprocess.run(
        [*command, *flags, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
    )
    assert process.returncode == 0, process.stderr
    records = losses(process.stdout)
    # What it saved is a run that can be exported.
    checkpoint = str(tmp_path / "out" / "epoch_2" / "pytorch_model")
    assert main(["consolidate", checkpoint, str(tmp_path / "export"), "--skip_proof", "--model", str(model)]) == 0
    assert main(["verify", str(tmp_path / "export")]) == 0

    # From the first epoch on at another ZeRO stage, the losses are the same.
    other = write_json(tmp_path / "zero3.json", {**content, "zero_optimization": {"stage": 3}})
    resumed = [*flags, str(tmp_path / "again"), "--resume", str(tmp_path / "out" / "epoch_1")]
    capfd.readouterr()
    run_distributed(go_on, 2, str(other), resumed)
    losses_again = losses(capfd.readouterr().out)
    assert len(records) == 2 * len(losses_again) > 0
    assert losses_again == pytest.approx(records[len(losses_again) :], abs=2e-4)  # printed to four places
