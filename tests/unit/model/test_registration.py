"""Classes of transformers and of ours for a config; `import sparseforge_ds` imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from sparseforge_ds.model.registration import load_config
from tests.conftest import ROOT
from tests.forked_interpreter import run_script


def run(code: str) -> None:
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    run(
        "import sys, sparseforge_ds.cli.main\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_our_families_are_known_when_asked_for() -> None:
    done = run_script(
        "import transformers.models.auto\n"
        "import sparseforge_ds\n"
        "sparseforge_ds.register_model_classes()\n"
        "sparseforge_ds.register_model_classes()\n"
        "from transformers import AutoConfig, AutoModelForCausalLM\n"
        "from sparseforge_ds.model.registration import OWN_FAMILIES\n"
        "for family in OWN_FAMILIES:\n"
        "    config = AutoConfig.for_model(family)\n"
        "    assert type(config).__module__.startswith('sparseforge_ds'), config\n"
        "    assert AutoModelForCausalLM._model_mapping[type(config)].__module__.startswith('sparseforge_ds')\n",
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "taken", "architecture"),
    [
        ("llama4", "llama4_text", "Llama4ForCausalLM"),
        ("qwen3_5", "qwen3_5_text", "Qwen3_5ForCausalLM"),
        ("gemma3", "gemma3", "as it was"),  # whose causal class sees, too
        ("llama", "llama", "as it was"),
    ],
)
def test_a_config_is_that_of_what_the_causal_class_takes(
    kind: str, taken: str, architecture: str, tmp_path: Path
) -> None:
    written = CONFIG_MAPPING[kind]()
    written.architectures = ["as it was"]
    written.dtype = "bfloat16"
    written.save_pretrained(tmp_path)
    config = load_config(tmp_path, "it")
    assert (config.model_type, config.architectures) == (taken, [architecture])
    assert str(config.dtype).endswith("bfloat16") and config.name_or_path == str(tmp_path)


def test_a_path_of_nothing_is_told_with_the_hubs_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        ValueError, match="^--model m: no such folder or file; give a Hugging Face model folder or a hub"
    ):
        load_config(tmp_path / "nowhere", "--model m")
    with pytest.raises(
        ValueError, match=r"^--model m: no such folder, .* hub \(it is not in the cache, and HF_HUB_OFF"
    ):
        load_config("owner/name", "--model m")
