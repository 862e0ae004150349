"""Run by an interpreter that has llm-compressor and torchao: a 2:4 folder, quantized by each of their ways.

    python tests/quantize_folder.py MODEL OUT [WAY ...]

Writes OUT/<way> for llm-compressor. torchao's weights are looked at in memory: the last line is a JSON object with the
number of weights that were zero before and are not after, and the number of groups of four with more than two.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

GROUP = 32
"""Inputs that share a scale, where a way has groups: a divisor of all inputs of the test's model."""


def by_llm_compressor(model: str, out: Path, only: list[str]) -> None:
    """Round to nearest in int8, fp8 and int4, and GPTQ in int8 and int4."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    w4 = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=GROUP, symmetric=True)
    )
    rows = torch.randint(3, 500, (16, 64), generator=torch.Generator().manual_seed(0)).tolist()
    # oneshot wants a tokenizer, for a text that is made of tokens too
    unused = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), pad_token="a")
    text = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * 64] * 16})
    calibration: dict[str, Any] = {"dataset": text, "processor": unused}
    calibration |= {"num_calibration_samples": 16, "max_seq_length": 64}
    ways: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
        "rtn-int8": (QuantizationModifier, {"targets": "Linear", "scheme": "W8A8"}, {}),
        "rtn-fp8": (QuantizationModifier, {"targets": "Linear", "scheme": "FP8_DYNAMIC"}, {}),
        "rtn-int4": (QuantizationModifier, {"config_groups": {"group_0": w4}}, {}),
        "gptq-int8": (GPTQModifier, {"targets": "Linear", "scheme": "W8A8"}, calibration),
        "gptq-int4": (GPTQModifier, {"config_groups": {"group_0": w4}}, calibration),
    }
    for name, (modifier, how, data) in ways.items():
        if only and name not in only:
            continue
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        oneshot(model=loaded, recipe=[modifier(ignore=["lm_head"], **how)], **data)
        loaded.save_pretrained(out / name)


def by_torchao(model: str) -> dict[str, tuple[int, int]]:
    """Quantize a model weight-only, to int8, fp8, and int4 in groups; return what became of its zeros."""
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
    from transformers import AutoModelForCausalLM

    result = {}
    configs = {
        "torchao-int8": Int8WeightOnlyConfig(),
        "torchao-fp8": Float8WeightOnlyConfig(),
        "torchao-int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(GROUP)),
    }
    for name, config in configs.items():
        layers = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).model.layers
        names = [key for key, module in layers.named_modules() if isinstance(module, torch.nn.Linear)]
        before = {key: layers.get_submodule(key).weight == 0 for key in names}
        quantize_(layers, config)
        # Count zeros that are none any more, and groups with more than two entries.
        entries = groups = 0
        for key in names:
            target = layers.get_submodule(key).weight.dequantize() != 0
            entries += int((target & before[key]).sum())
            groups += int((target.view(-1, 4).sum(-1) > 2).sum())
        result[name] = (entries, groups)
    return result


if __name__ == "__main__":
    by_llm_compressor(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    if not sys.argv[3:]:
        print(json.dumps(by_torchao(sys.argv[1])))
