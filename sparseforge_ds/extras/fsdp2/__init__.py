"""Masks on a model that PyTorch's FSDP2 shards, without DeepSpeed's engine. Experimental: runs cannot be resumed.

fsdp2_engine    `Fsdp2Engine`: the part of a DeepSpeed engine that a forge calls, over `fully_shard`
layout          `Fsdp2Layout`: rows of DTensors as flat shards
"""

from sparseforge_ds.extras.fsdp2.fsdp2_engine import Fsdp2Engine
from sparseforge_ds.extras.fsdp2.layout import Fsdp2Layout
from sparseforge_ds.zero.shard import OTHER_ENGINES

OTHER_ENGINES[Fsdp2Engine] = Fsdp2Layout

__all__ = ["Fsdp2Engine", "Fsdp2Layout"]
