"""Plugin of vLLM, with which `vllm serve` takes a packed24 folder and keeps its weights packed.

vLLM finds `register` by the entry point group `vllm.general_plugins` of pyproject.toml, in each of its processes.
"""


def register() -> None:
    """Register the packed24 format with vLLM; a second call does nothing."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    from sparseforge_ds.extras.packed24.vllm.packed24 import Packed24VLLMConfig
    from sparseforge_ds.packed_format.packing import PACKED24

    if PACKED24 not in QUANTIZATION_METHODS:
        register_quantization_config(PACKED24)(Packed24VLLMConfig)
