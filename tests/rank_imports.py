"""What ranks of tests/ranks.py import, in the process that all are forked from: once, in memory that they share."""

from __future__ import annotations

import os

os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")

import deepspeed  # noqa: E402
import pytorch_optimizer  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401 - which DTensor imports at its first use
import torch.distributed.checkpoint  # noqa: E402, F401
import transformers.trainer  # noqa: E402, F401

from lwopt_backend.integrations import deepspeed_zero, fsdp2  # noqa: E402, F401

deepspeed_zero.register()
deepspeed.utils.logger.setLevel("WARNING")
