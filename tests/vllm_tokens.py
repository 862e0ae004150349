"""Run by an interpreter that has vLLM: greedy tokens of a model folder, and what its layers hold, as a line of JSON.

python tests/vllm_tokens.py MODEL '{"enforce_eager": true}' [[1, 2, 3]]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

NEW_TOKENS = 24


def main(model: str, options: str, prompts: str) -> None:
    """Load MODEL with options of vllm.LLM, and print what it generates, and of each rank which methods its layers have
    and how many bytes its experts take."""
    from vllm import LLM, SamplingParams

    engine = LLM(model, seed=0, max_model_len=64, gpu_memory_utilization=0.1, **json.loads(options))
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in json.loads(prompts)], sampling, use_tqdm=False)
    from tests.vllm_tokens import bytes_of_experts, methods  # by names that vLLM's other processes can import

    answer = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "methods": engine.apply_model(methods),
        "bytes of experts": engine.apply_model(bytes_of_experts),
    }
    print(json.dumps(answer))


def methods(model: Any) -> dict[str, int]:
    """Count the layers of each method."""
    counts = Counter(
        type(module.quant_method).__name__ for module in model.modules() if hasattr(module, "quant_method")
    )
    return dict(counts)


def bytes_of_experts(model: Any) -> int:
    """Return the bytes of all parameters of all experts."""
    return sum(tensor.nbytes for name, tensor in model.named_parameters() if ".experts." in name)


if __name__ == "__main__":
    main(*sys.argv[1:])
