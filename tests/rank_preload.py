"""Imported once by the fork server of `tests/distributed.py`: whatever is slow to import and safe to fork.

Importing starts no threads and touches no GPU: process groups and engines exist in the forked ranks only.
"""

import logging

import datasets  # noqa: F401
import deepspeed
import pytest  # noqa: F401
import torch
import torch.utils.tensorboard  # noqa: F401
import transformers
from deepspeed.utils import logger
from transformers import (  # noqa: F401
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

torch.set_num_threads(1)

# On a CPU, DeepSpeed would compile and load its shared-memory op in every rank. Only inference_all_reduce uses it, which
# training never calls, so the tests do without (the commands that users run do load it: tests/end_to_end).
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def quiet() -> None:
    """Warnings and errors only."""
    logger.setLevel(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()


quiet()
