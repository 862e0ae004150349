"""The logits of an exported folder, as whoever gets it computes them: from_pretrained and nothing else.

Not imported: `proof` hands this text to a fresh interpreter, so that nothing of ours is there, unless it puts an import
of ours before the first line. Tokens are those of tokens.safetensors in the working folder, arguments the exported
folder and the name of the class that loads it.
"""

import json
import os
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

model, report = getattr(transformers, sys.argv[2]).from_pretrained(
    sys.argv[1], output_loading_info=True, local_files_only=True, use_safetensors=True, trust_remote_code=False
)
if getattr(model, "hf_quantizer", None) is not None:
    model.hf_quantizer.make_dense(model)  # packed: their own product sums in another order
for parameter in model.parameters():
    parameter.data = parameter.data.clone()  # kernels may sum in another order where a mapped file is not aligned
ids = load_file("tokens.safetensors")["ids"]
inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
answers = {}
with torch.no_grad():
    adapter = bool(getattr(model, "_hf_peft_config_loaded", False))  # which transformers found in the folder
    if adapter:
        model.disable_adapters()
    output = model.eval()(**inputs)
    answers["logits"] = (output.logits if "logits" in output else output[0]).contiguous()
    if adapter:
        model.enable_adapters()
        answers["adapted"] = model.float()(**inputs).logits.contiguous()
save_file(answers, "loaded.safetensors")
with open("loaded.json", "w") as file:
    found = {key: sorted(map(str, names)) for key, names in report.items()}
    imported = [name for name in ("sparseforge_ds", "deepspeed") if name in sys.modules]
    json.dump({"report": found, "imported": imported, "class": type(model).__name__}, file)
os._exit(0)  # at once (see cli/main.py)
