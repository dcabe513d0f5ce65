"""What ranks of tests/ranks.py import, in the process that all are forked from: once, in memory that they share."""

import gc
import os

os.environ.update(DS_ACCELERATOR=os.environ.get("LWOPT_TEST_DEVICE", "cpu"), OMP_NUM_THREADS="1")

from tests import assertions  # noqa: E402

assertions.rewrite()

import deepspeed  # noqa: E402
import pytorch_optimizer  # noqa: E402, F401
import torch  # noqa: E402
import torch._dynamo  # noqa: E402 - which DTensor imports at its first use
import torch.distributed.checkpoint  # noqa: E402, F401
import transformers.trainer  # noqa: E402, F401
from deepspeed.module_inject import auto_ep_layer  # noqa: E402, F401 - which stage 3 imports at the first engine
from deepspeed.runtime.superoffload import superoffload_stage3  # noqa: E402, F401
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: E402, F401 - which asks torch to compile, at the first engine

from lwopt_backend.integrations import deepspeed_zero, fsdp2  # noqa: E402, F401
from tests import checkpoint_engines, command_line, engines, fused, on_ranks, owned  # noqa: E402, F401

deepspeed_zero.register()
deepspeed.utils.logger.setLevel("WARNING")
# DeepSpeed's stage 3 collects garbage and makes text of its parameters in every engine, which would take half a second.
torch.set_printoptions(threshold=8, edgeitems=1)
gc.collect()
gc.freeze()
