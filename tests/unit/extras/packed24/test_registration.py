"""The packed format is known to transformers once the package is imported, before or after transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.forked_interpreter import run_script

PACKED = "import sparseforge_ds.extras.packed24\n"
KNOWN = """
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
assert AUTO_QUANTIZER_MAPPING["sparseforge_packed24"].__name__ == "Packed24Quantizer"
assert AUTO_QUANTIZATION_CONFIG_MAPPING["sparseforge_packed24"].__name__ == "Packed24Config"
import importlib, sys
importlib.reload(sys.modules["sparseforge_ds.extras.packed24.quantizer"])
assert "deepspeed" not in sys.modules
"""


@pytest.mark.parametrize("other", ["from transformers import AutoModel\n", "import transformers.quantizers\n"])
def test_both_orders_of_import_and_a_reload(other: str) -> None:
    anew = [sys.executable, "-c", PACKED + other + KNOWN]
    for process in (
        subprocess.run(anew, capture_output=True, text=True, cwd=ROOT),
        run_script(other + PACKED + KNOWN, cwd=ROOT),  # which has imported transformers already
    ):
        assert process.returncode == 0, process.stderr
