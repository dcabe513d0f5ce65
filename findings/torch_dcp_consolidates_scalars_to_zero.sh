#!/bin/sh
# torch 2.13.0 with safetensors 0.8.0: HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True).
#
# Guess: the consolidated file has each tensor with its value.
#
# Seen: a tensor without dimensions is 0.0 there, such as logit_scale of CLIP and SigLIP. The sharded files have its
# value. Nothing is said, and the file loads. With a scale of exp(0) the model is another one.
# A model with a buffer of integers, such as BatchNorm's num_batches_tracked, cannot be consolidated at all:
#   TypeError: torch.finfo() requires a floating point input type.

set -- torch==2.13.0 safetensors==0.8.0
. "$(dirname "$0")/environment"
python -W ignore - 2> errors <<'PY' || { cat errors; exit 1; }
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
seen = {}


def save(folder: str, state: dict[str, torch.Tensor]) -> None:
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)


save("scalar", {"weight": torch.ones(2, 2), "logit_scale": torch.tensor(4.5)})
for name, file in (
    ("sharded", "scalar/sharded/shard-00001-model-00001-of-00001.safetensors"),
    ("consolidated", "scalar/model-00001-of-00001.safetensors"),
):
    seen[name] = {key: value.max().item() for key, value in load_file(file).items()}
try:
    save("integers", {"weight": torch.ones(2, 2), "num_batches_tracked": torch.tensor([3])})
    seen["integers"] = "saved"
except dcp.CheckpointException as error:
    seen["integers"] = str(error.failures[0][0])
print(seen)
assert seen["sharded"] == {"weight": 1.0, "logit_scale": 4.5}
assert seen["consolidated"] == {"weight": 1.0, "logit_scale": 0.0}
assert seen["integers"].startswith("torch.finfo() requires a floating point input type")
PY
