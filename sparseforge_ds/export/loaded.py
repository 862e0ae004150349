"""The logits of an exported folder, as whoever gets it computes them: from_pretrained and nothing else.

Not imported: `proof` hands this text to a fresh interpreter, so that nothing of ours is there, unless the format needs
`import sparseforge_ds`, which then is the first line that `proof` puts before it.
"""

import json
import sys

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

folder, answer, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, report = AutoModelForCausalLM.from_pretrained(
    folder, output_loading_info=True, local_files_only=True, use_safetensors=True, trust_remote_code=False
)
for parameter in model.parameters():
    parameter.data = parameter.data.clone()  # kernels may sum in another order where a mapped file is not aligned
tokens = min(tokens, getattr(model.config, "max_position_embeddings", tokens))
ids = (torch.arange(tokens)[None] * 7919 + 3) % model.get_input_embeddings().weight.shape[0]
answers = {}
with torch.no_grad():
    adapter = bool(getattr(model, "_hf_peft_config_loaded", False))  # which transformers found in the folder
    if adapter:
        model.disable_adapters()
    answers["logits"] = model.eval()(ids).logits.contiguous()
    if adapter:
        model.enable_adapters()
        answers["adapted"] = model.float()(ids).logits.contiguous()
save_file(answers, f"{answer}.safetensors")
with open(f"{answer}.json", "w") as file:
    found = {key: sorted(map(str, names)) for key, names in report.items()}
    imported = [name for name in ("sparseforge_ds", "deepspeed") if name in sys.modules]
    json.dump({"report": found, "imported": imported, "class": type(model).__name__}, file)
