"""The packed 2:4 format at work: its kernels on CPUs and GPUs, and what loads it into transformers and vLLM.

`import sparseforge_ds.extras.packed24` makes `from_pretrained` of transformers know the format.
"""

from sparseforge_ds.extras.packed24.quantizer import register_format

register_format()
