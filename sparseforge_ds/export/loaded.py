"""Script that computes the logits of an exported folder as its users do: by from_pretrained alone.

It is not imported: `proof` hands this text to a fresh interpreter, into which it imports our package only on purpose.
Arguments are the exported folder and the name of the class that loads it. Tokens are read from tokens.safetensors in
the working folder.
"""

import json
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file

model, report = getattr(transformers, sys.argv[2]).from_pretrained(
    sys.argv[1], output_loading_info=True, local_files_only=True, use_safetensors=True, trust_remote_code=False
)
if hasattr(getattr(model, "hf_quantizer", None), "make_dense"):
    model.hf_quantizer.make_dense(model)  # the product with packed weights sums in another order
for parameter in model.parameters():
    parameter.data = parameter.data.clone()  # kernels may sum in another order where a mapped file is not aligned
ids = load_file("tokens.safetensors")["ids"]
inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}
answers = {}
with torch.no_grad():
    adapter = bool(getattr(model, "_hf_peft_config_loaded", False))  # transformers loads an adapter by itself
    if adapter:
        model.disable_adapters()
    output = model.eval()(**inputs)
    answers["logits"] = (output.logits if "logits" in output else output[0]).contiguous()
    if adapter:
        model.enable_adapters()
        answers["adapted"] = model.float()(**inputs).logits.contiguous()
save_file(answers, "loaded.safetensors")
with open("loaded.json", "w") as file:
    names_of = {key: sorted(map(str, names)) for key, names in report.items()}
    imported = [name for name in ("sparseforge_ds", "deepspeed") if name in sys.modules]
    json.dump({"report": names_of, "imported": imported, "class": type(model).__name__}, file)
