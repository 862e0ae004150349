"""Imported once by the fork server of `tests/distributed.py`: whatever is slow to import and safe to fork.

Importing touches no GPU and starts no thread but that of pyarrow's allocator, which handles forks: process groups and
engines exist in the forked ranks only.
"""

import functools
import importlib
import logging
import os
import types
import warnings

from sparseforge_ds.cli.imports import large_imports

with large_imports():  # a collection in a rank need not walk, and thereby copy, what all ranks share
    import cpuinfo
    import deepspeed
    import deepspeed.module_inject.auto_ep_layer  # which every engine imports
    import deepspeed.runtime.bf16_optimizer
    import deepspeed.runtime.superoffload.superoffload_stage3
    import deepspeed.runtime.zero.muon.muon_optimizer  # imports torch.compile's backend: seconds
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2
    import torch
    import torch.utils.tensorboard
    import transformers
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.utils import logger

    # Modules that ranks import by themselves.
    for name in (
        "datasets",
        "pytest",
        "scipy.io",  # which every builder of datasets imports
        *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama", "mistral", "qwen2", "qwen3")),
        "sparseforge_ds.train.trainer",
        "tests.zero.case",
    ):
        importlib.import_module(name)

torch.set_num_threads(1)

# DeepSpeed names the range of every hooked call for NVIDIA's profiler: 2 % of a small model's step.
deepspeed.utils.nvtx.enable_nvtx = False
# ZeRO-3 collects garbage for each master partition, against the fragmentation of a GPU's memory: a tenth of short runs.
deepspeed.runtime.zero.utils.gc = types.SimpleNamespace(collect=lambda: 0)
# On a CPU, DeepSpeed would compile and load its shared-memory op in every rank. Only inference_all_reduce uses it, and
# training never calls that, so these tests do without (the commands that users run do load it: tests/end_to_end).
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed asks twice for each of its Adams what processor this is, and each time that is a process of a second.
cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
# DeepSpeed refuses fp16 on processors without its instructions. torch computes it there all the same, more slowly.
CPU_Accelerator.is_fp16_supported = lambda _: True


def quiet() -> None:
    """Warnings and errors only."""
    torch.set_printoptions(threshold=1, edgeitems=1)  # DeepSpeed formats all its arguments, also where it prints none
    logger.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    # DeepSpeed 0.19 calls collectives that torch 2.13 has renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


quiet()
os.fsync = lambda _: None  # as in tests/conftest.py
