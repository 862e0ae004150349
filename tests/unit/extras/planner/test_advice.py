"""`sparseforge advise`: its table is that of the results, and its speed-ups are near those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import FalconConfig, Gemma3Config, Gemma3TextConfig, Qwen3MoeConfig, StableLmConfig

from sparseforge_ds.cli.main import main
from sparseforge_ds.extras.planner.advice import (
    FORMATS,
    MEASURED,
    MEASURED_GAINS,
    MEASURED_SHARES,
    advise,
    cache_of_sequence,
    model_bytes,
    share_of_bandwidth,
)
from sparseforge_ds.extras.planner.machine import GPUS
from sparseforge_ds.model.architecture import with_layers
from sparseforge_ds.model.model_config import read_model_config
from sparseforge_ds.packed_format.packed_values import Grid, round_values
from sparseforge_ds.packed_format.packing import pack24
from tests.conftest import ROOT
from tests.tiny_models import BUILDERS
from tests.unit.extras.planner.hub_configs import qwen3_14b

RESULTS = (ROOT / "studies" / "gpu.md").read_text()
LLAMA = "meta-llama/Llama-2-7b-hf"
EIGHT_LAYERS = [LLAMA, "--layers", "8", "--gpu", "h200", "--context", "256"]


def _advice(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["advise", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_measured_products_are_those_of_the_results() -> None:
    table = RESULTS.partition("## The packed product")[2].partition("On the H100")[0]
    cells = re.findall(r"^\| (\d+) \|(.*)\|$", table, flags=re.MULTILINE)
    sums = {
        int(rows): tuple(
            sum(map(float, times)) for times in zip(*re.findall(r"([\d.]+) / ([\d.]+),", row), strict=True)
        )
        for rows, row in cells
    }
    assert {rows: pytest.approx(sums[rows]) for rows in MEASURED} == MEASURED


@pytest.mark.parametrize("batch", [1, 8])
def test_a_whole_model_gains_what_is_predicted(batch: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Compare a model that was measured in full with products that were measured by themselves."""
    ((dense, packed, gain),) = re.findall(
        rf"^\| decode, tokens/s \| {batch} \| ([\d,]+) \| ([\d,]+) \| \*\*([\d.]+)\*\* \|", RESULTS, flags=re.MULTILINE
    )
    advice = _advice(capsys, *EIGHT_LAYERS, "--batch", str(batch))
    rows = {(row["kind"], row["bits"]): row for row in advice["formats"]}
    predicted = rows["2:4", 16]["over_16_bits"]
    assert predicted == pytest.approx(float(gain), rel=0.05)
    # The page on hardware has both, and the error.
    page = (ROOT / "docs" / "hardware.md").read_text()
    error = predicted / float(gain) - 1
    assert f"| {batch} | {predicted:.2f}x | {gain}x | {error:+.1%} |" in page
    # So has the command.
    assert MEASURED_GAINS[batch] == (round(predicted, 2), float(gain))
    for row, measured in ((rows["dense", 16], dense), (rows["2:4", 16], packed)):
        tokens = row["tokens_per_second"]
        share = float(measured.replace(",", "")) / tokens
        assert MEASURED_SHARES[0] <= round(share, 2) <= MEASURED_SHARES[1]
        assert f"{tokens:,.0f} | {measured} | {share:.2f} |" in page


def test_memory_is_what_was_resident(capsys: pytest.CaptureFixture[str]) -> None:
    ((dense, packed),) = re.findall(r"MB resident \| \| ([\d,]+) \| ([\d,]+) \| 0.62", RESULTS)
    advice = _advice(capsys, *EIGHT_LAYERS)
    weights = {
        (row["kind"], row["bits"]): row["resident_bytes"] - advice["model"]["cache"] for row in advice["formats"]
    }
    assert weights["dense", 16] / 1e6 == pytest.approx(float(dense.replace(",", "")), abs=1)
    assert weights["2:4", 16] / 1e6 == pytest.approx(float(packed.replace(",", "")), abs=1)


def test_a_mixture_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64}
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, num_attention_heads=4, head_dim=16)
    first = model_bytes(config, 1, 8)
    many = model_bytes(config, 64, 8)
    experts = 2 * 8 * 3 * 64 * 32
    assert first.pruned - first.pruned_read == pytest.approx(experts * 6 / 8)
    assert many.pruned_read == pytest.approx(many.pruned)
    assert many.cache == 64 * first.cache


def test_a_step_reads_all_experts_of_llama4_and_no_model_that_sees() -> None:
    llama4 = model_bytes(BUILDERS["llama4_text"]().config, 1, 8)
    assert llama4.pruned_read == llama4.pruned
    layer = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = {**layer, "head_dim": 8, "vocab_size": 64}
    vision = {**layer, "image_size": 8, "patch_size": 4}
    seeing = model_bytes(Gemma3Config(text_config=text, vision_config=vision), 1, 8, unknown=True)
    blind = model_bytes(Gemma3TextConfig(**text), 1, 8)
    assert (seeing.pruned_read, seeing.other_read) == (blind.pruned_read, blind.other_read)
    assert seeing.pruned > blind.pruned and seeing.other > blind.other


def test_sliding_windows_and_shared_embeddings_save_bytes() -> None:
    full = model_bytes(qwen3_14b(num_hidden_layers=4), 1, 4096)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    windows = model_bytes(qwen3_14b(num_hidden_layers=4, layer_types=kinds, sliding_window=1024), 1, 4096)
    assert windows.cache == full.cache * (1 + 3 / 4) / 4
    tied = model_bytes(qwen3_14b(num_hidden_layers=1, tie_word_embeddings=True), 1, 1)
    assert tied.other_read == tied.other
    assert with_layers(qwen3_14b(), 3).num_hidden_layers == 3


def test_bits_of_a_packed_weight_are_those_of_the_format() -> None:
    import torch

    weight = torch.tensor([[1.0, 2.0, 0.0, 0.0] * 4] * 2, dtype=torch.bfloat16)
    values, positions = pack24(weight, -1)
    assert (values.nbytes + positions.nbytes) * 8 / weight.numel() == FORMATS["2:4", 16]
    wide, wide_positions = values.repeat(1, 8), positions.repeat(1, 8)  # 64 values a row
    parts = (*round_values(wide, -1, Grid("int4", 64)), wide_positions)
    assert sum(part.nbytes for part in parts) * 8 / (2 * wide.numel()) == FORMATS["2:4", 4] == 3.125


def test_every_card_has_a_bandwidth_and_2_4_gains_nothing_in_large_batches() -> None:
    model = model_bytes(with_layers(read_model_config(LLAMA), 1), 64, 1)
    for gpu in GPUS.values():
        (dense, sparse, *_) = advise(model, gpu, 64)
        assert sparse.over_16_bits < 0.7 and dense.seconds > 0
    assert share_of_bandwidth("2:4", 17) == share_of_bandwidth("2:4", 32), "the next rows that were measured"


def test_the_table_is_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    qwen3_14b().save_pretrained(tmp_path)
    assert main(["advise", str(tmp_path / "config.json"), "--gpu", "L40S", "--context", "32768", "--batch", "8"]) == 0
    text = capsys.readouterr().out
    for part in (
        "on l40s, batch 8, 32,768 tokens",
        "| 2:4, 16 bits | 9 |",
        "| 2:4, 8 bits | 5 |",
        "| assumed",
        "2:4 in 16 bits:",
        "read from: bf16 products of 8 rows (14336 x 4096, ",
        "on h200, together 113.1 us dense and 80.5 us 2:4, which is ",
        "of its bandwidth; and 864 GB/s of this card",
        "predicted and measured: 8 layers of Llama-2-7B in 16 bits on h200: batch 1 1.42x for 1.38x measured (+3%)",
    ):
        assert part in text
    assert "measured on h200, does not fit |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu h10", "--gpu h10: did you mean h100? known are a100, h100, h200, b200, l40s"),
        ("--gpu v100", "--gpu v100: it has no sparse tensor cores; use one of a100"),
        ("--batch 0", "--batch 0 is not valid: products were measured with 1 to 256 rows"),
        ("--batch 512", "--batch 512 is not valid: products were measured with 1 to 256 rows"),
        ("--context 0", "--context 0 is not valid: use an integer >= 1"),
        ("--context 4097", "--context 4097: the model has 4096 positions; use at most 4096"),
        ("--layers 33", "--layers 33 is not valid: the model has 32; use 1 to that many"),
        ("--gpus 3", "--gpus: unknown flag; did you mean --gpu?"),
    ],
)
def test_wrong_input_is_one_line(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", LLAMA, *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_a_family_without_rows_needs_the_flag_that_the_error_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    StableLmConfig(**sizes, num_key_value_heads=4, vocab_size=64).save_pretrained(tmp_path)
    assert main(["advise", str(tmp_path)]) == 2
    assert "Give --any_family" in capsys.readouterr().err
    advice = _advice(capsys, str(tmp_path), "--any_family")
    assert advice["model"]["pruned"] == 2 * (4 * 32 * 32 + 3 * 32 * 64)


def test_falcon_caches_one_head_for_all_queries() -> None:
    first, later = (
        FalconConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, new_decoder_architecture=new)
        for new in (False, True)
    )
    assert cache_of_sequence(first, 8) == 8 * 2 * 2 * 16 * 2 == cache_of_sequence(later, 8) // 4
