"""The sha256 by which a source knows its config.json again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparseforge_ds.checkpoint.tensors import TensorSpec
from sparseforge_ds.export.source import check_config
from sparseforge_ds.export.stored import reads_as
from sparseforge_ds.model.stored_config import config_sha256

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


def test_the_hash_survives_the_file() -> None:
    assert config_sha256(json.loads(json.dumps(CONFIG))) == config_sha256(CONFIG)


def test_the_same_bytes_in_another_dtype_or_shape_are_another_weight() -> None:
    entry = {"shape": [4, 8], "dtype": "float16"}
    assert reads_as(TensorSpec((4, 8), torch.float16), entry)
    assert not reads_as(TensorSpec((4, 8), torch.bfloat16), entry)
    assert not reads_as(TensorSpec((8, 4), torch.float16), entry)
