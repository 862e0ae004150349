"""Facts about a run: the arithmetic of masks and phases, and refused folders. Real runs are in tests/end_to_end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparseforge_ds.checkpoint.damage import suggest_intact_checkpoint
from sparseforge_ds.config import SparseForgeConfig
from sparseforge_ds.export.inspection import MaskReport, inspect, mask_report, phase, summarize_masks
from sparseforge_ds.mask.pattern import NM


def test_mask_report_counts() -> None:
    mask_GM = torch.tensor([[1.0, 0.0, 1.0, 0.0], [0.5, 0.05, 0.96, 0.0]])
    dense_GM = torch.tensor([[-3.0, 0.1, 2.0, 0.2], [0.1, -5.0, 4.0, 0.2]])
    report = mask_report("w", mask_GM, dense_GM, NM(2, 4))
    assert report == MaskReport("w", 8, 5 / 8, 1 / 8, 4 / 8, 3 / 4, 0)


def test_density_counts_what_the_mask_lets_through() -> None:
    report = mask_report("w", torch.tensor([[1.0, 0.0, 0.0, 0.0]]), torch.ones(1, 4), NM(2, 4))
    assert report.density == 1 / 4


@pytest.mark.parametrize("value", [float("nan"), -0.1, 1.5, float("inf")])
def test_values_outside_of_0_and_1_are_counted(value: float) -> None:
    report = mask_report("w", torch.tensor([[1.0, 0.0, value, 0.0]]), torch.ones(1, 4), NM(2, 4))
    assert report.strange == 1


def test_the_summary_is_weighted_by_elements() -> None:
    parts = [MaskReport("a", 30, 1.0, 0.0, 0.5, 1.0, 0), MaskReport("b", 10, 0.0, 1.0, 0.5, 0.0, 2)]
    assert summarize_masks(parts) == MaskReport("all", 40, 0.75, 0.25, 0.5, 0.75, 2)


def test_the_whole_agrees_with_nothing_once_masks_are_frozen() -> None:
    assert summarize_masks([MaskReport("a", 30, 1.0, 0.0, 0.5, None, 0)] * 2) == MaskReport(
        "all", 60, 1.0, 0.0, 0.5, None, 0
    )


def test_a_run_goes_through_four_phases() -> None:
    config = SparseForgeConfig.from_dict({"max_steps": 10, "method": {"hardening": [0.2, 0.5], "update_every": 1}})
    names = [phase(config, step, 10) for step in (0, 1, 2, 4, 5, 9, 10)]
    assert names == [
        "heating",
        "heating",
        "hardening",
        "hardening",
        "frozen finetune",
        "frozen finetune",
        "finished",
    ]


def test_a_fixed_mask_is_frozen_from_the_start() -> None:
    assert phase(SparseForgeConfig.from_dict({"method": "naive_retrain", "max_steps": 10}), 0, 10) == "frozen finetune"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    for name in ("an export", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "an export" / "model.safetensors").write_bytes(b"")
    (tmp_path / "an export" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"none: no such folder"):
        inspect(tmp_path / "none")
    with pytest.raises(ValueError, match=r"export: is an exported model.*sparseforge verify '.*an export'$"):
        inspect(tmp_path / "an export")
    with pytest.raises(ValueError, match=r"empty: holds neither a run nor a checkpoint"):
        inspect(tmp_path / "empty")


def test_a_run_that_has_just_started_has_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "sparseforge.json").write_text('{"versions": {}}')
    report = inspect(tmp_path)
    assert not report.ok and report.problems == [f"{tmp_path / 'checkpoints'}: no checkpoint yet"]


def test_a_start_that_failed_before_training_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / ".lock").write_text("process 7 on here\n")
    with pytest.raises(ValueError, match=r"a run began here and has no checkpoint yet; .* start it again"):
        inspect(tmp_path)


def test_a_damaged_description_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "sparseforge.json").write_text('{"versions": ')
    with pytest.raises(ValueError, match=r"sparseforge\.json: not a readable JSON"):
        inspect(tmp_path)


def test_an_export_says_that_its_checkpoint_was_removed(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="was removed while it was read, .* repeat the command"),
        suggest_intact_checkpoint(tmp_path / "step_000001"),
    ):
        raise FileNotFoundError("a file of it")
