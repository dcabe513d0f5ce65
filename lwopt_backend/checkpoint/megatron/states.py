"""The optimizer's states that are known, by the keys under which Megatron's files have them."""

from __future__ import annotations

from lwopt_backend.checkpoint.contents import MASTER

STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq")
BY_NAME = {"fp32_param": MASTER, "param": MASTER, **{key: key for key in STATES}}  # in torch_dist, of each parameter
FLAT = {"param": MASTER, "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # in the DistributedOptimizer's buffers
SAVED_WHOLE = (  # up to 0.19.1 several gradient buckets make it write masters and moments of other parameters
    "load it in Megatron and save with --dist-ckpt-optim-fully-reshardable (up to 0.19.1 without "
    "--overlap-grad-reduce, with which that option writes wrong state)"
)
