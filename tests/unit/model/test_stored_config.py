"""Facts of a config.json."""

from __future__ import annotations

from typing import Any

import pytest

from sparseforge_ds.model.stored_config import configured_dtype


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, None),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"text_config": {"torch_dtype": "float16"}}, "float16"),
        ({"text_config": "damaged"}, None),
    ],
)
def test_the_dtype_of_a_config_may_have_an_old_name_or_be_of_the_text_model(
    config: dict[str, Any], dtype: str | None
) -> None:
    assert configured_dtype(config) == dtype
