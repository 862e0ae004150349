"""What a source checks before anything is read from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparseforge_ds.export.source import check_config, config_sha256

CONFIG = {"model_type": "llama", "rope_theta": 10000.0, "dtype": "float32"}


def test_how_weights_are_stored_does_not_count() -> None:
    packed = {**CONFIG, "dtype": "bfloat16", "quantization_config": {"quant_method": "x"}}
    assert config_sha256(dict(reversed(packed.items()))) == config_sha256(CONFIG)


@pytest.mark.parametrize("change", [{"rope_theta": 1e6}, {"rope_theta": None}, {"more": 1}])
def test_a_config_of_another_model_is_refused(change: dict[str, object]) -> None:
    expected = config_sha256(CONFIG)
    check_config(Path("m"), CONFIG, expected)
    check_config(Path("m"), {**CONFIG, **change}, None)
    with pytest.raises(ValueError, match=r"m/config\.json: was changed or damaged"):
        check_config(Path("m"), {**CONFIG, **change}, expected)


def test_it_survives_the_file() -> None:
    assert config_sha256(json.loads(json.dumps(CONFIG))) == config_sha256(CONFIG)
