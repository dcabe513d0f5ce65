"""What can be read and written, by name. The command's help shows these, so nothing here imports torch."""

from __future__ import annotations

AUTO = "auto"

# In the order in which a folder is asked about: what Megatron writes also looks like any checkpoint of torch's, and
# weights may lie beside any optimizer's state. ``formats`` has the readers.
FORMATS = {
    "megatron-torch": "Megatron's --ckpt-format torch",
    "megatron-dist": "Megatron's torch_dist",
    "megatron-fsdp": "Megatron's fsdp_dtensor",
    "universal": "DeepSpeed's universal format",
    "deepspeed": "DeepSpeed's own files, stages 0 to 3",
    "owned": "the optimizer state of owned storage",
    "dcp": "torch.distributed.checkpoint, of FSDP2",
    "safetensors": "weights as safetensors",
}

WRITERS = {  # imported when they are needed: torch.distributed.checkpoint is half a second
    "universal": "lwopt_backend.checkpoint.deepspeed.universal_writer",
    "megatron": "lwopt_backend.checkpoint.megatron.dist_writer",
    "dcp": "lwopt_backend.checkpoint.dcp.writer",
    "owned": "lwopt_backend.checkpoint.owned.writer",
    "safetensors": "lwopt_backend.checkpoint.safetensors.writer",
}

# Families of parameter names; ``names`` has their maps.
FAMILIES = (
    *("megatron-core", "megatron-deepspeed"),
    *("hf-llama", "hf-mixtral", "hf-qwen-moe", "hf-moe-stacked", "hf-gpt2"),
)
