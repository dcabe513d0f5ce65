"""Writes Megatron's ``torch_dist`` format, of 0.16 and of 0.19 and later; what is where is told in ``dist_reader``.

0.16   common.pt; states as ``optimizer.state.<state>.<name>``, master weights as ``fp32_param``. This is what its
       LayerWise optimizer loads (--optimizer dist_muon).
0.19   common state among the tensors; the fully reshardable layout (--dist-ckpt-optim-fully-reshardable), in which
       Adam's master weights are ``param``, Muon's ``fp32_param``.

Checkpoints of Adam alone are the DistributedOptimizer's, fully reshardable, unless their arguments say that there was
none. Megatron loads both at any tensor, pipeline and data parallel size. Random states are not written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.dcp import saving as dcp_saving
from lwopt_backend.checkpoint.files.torch_saving import save_as_it_lies
from lwopt_backend.checkpoint.inferred import weight_of
from lwopt_backend.checkpoint.lazy import LazyTensor
from lwopt_backend.checkpoint.megatron.dist_writer_common import (
    NEW,
    OLD,
    arguments_of,
    common,
    is_distributed,
    is_muon,
)
from lwopt_backend.checkpoint.megatron.dist_writer_names import Keys
from lwopt_backend.checkpoint.megatron.names import local_spec
from lwopt_backend.checkpoint.megatron.states import STATES


def write(checkpoint: Checkpoint, folder: Path, version: str = OLD, workers: int = 1) -> None:
    """Fill ``folder``, an ``iter_%07d``, which is empty. ``workers`` parameters of one layer are in memory at a time.

    ``version``: "0.16" or "0.19". Raises CheckpointError for names that are not Megatron-core's, and for what this
    format has no place for.
    """
    if version not in (OLD, NEW):
        raise CheckpointError(f"version {version!r} of Megatron is not written, only {OLD} and {NEW} (and later)")
    if checkpoint.names != "megatron-core":
        raise CheckpointError(
            f"{checkpoint.format}: expected parameters named as in Megatron-core, found names of {checkpoint.names!r}; "
            "choose the table of names that leads to megatron-core"
        )
    for name in checkpoint.params:
        if local_spec(name) != name:
            raise CheckpointError(f"{name}: expected the local spec's name, {local_spec(name)}; rename it")
    arguments = arguments_of(checkpoint, version)
    keys = Keys({name: param.shape for name, param in checkpoint.params.items()}, arguments)
    weights = {name: weight_of(checkpoint, param) for name, param in checkpoint.params.items()}
    tensors = keys.stacks({**weights, **checkpoint.buffers})
    distributed = is_distributed(checkpoint, arguments, version)
    states: dict[str, dict[str, LazyTensor]] = {}
    for name, param in checkpoint.params.items():
        for state, tensor in _states(name, param, weights[name], distributed).items():
            states.setdefault(state, {})[name] = tensor
    for state, of_state in states.items():
        tensors.update(keys.stacks(of_state, f"optimizer.state.{state}."))
    objects = keys.extra_states(weights)
    metadata: dict[str, Any] = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    rest = common(checkpoint, arguments, version)
    if version == OLD:
        metadata.update(common_backend="torch", common_backend_version=1)
        with (folder / "common.pt").open("wb") as file:
            save_as_it_lies(rest, file)
    else:
        objects["common_state/shard_0_1"] = [rest]
    (folder / "metadata.json").write_text(json.dumps(metadata))
    dcp_saving.save(folder, tensors, objects, workers=workers)


def _states(name: str, param: Param, weight: LazyTensor, distributed: bool) -> dict[str, LazyTensor]:
    """By the format's own keys. Weights in fp32 are their own masters, but the DistributedOptimizer has both."""
    if param.owner_states:
        raise CheckpointError(
            f"{name}: Megatron has no place for what the rule's owner keeps of it; convert to universal or dcp"
        )
    unknown = sorted(set(param.states) - {MASTER, *STATES})
    if unknown:
        raise CheckpointError(
            f"{param.states[unknown[0]].where}: Megatron has no place for {', '.join(unknown)} of {name}; its "
            f"optimizers keep {', '.join(STATES)}"
        )
    if not param.states:
        return {}
    master = "param" if distributed and not is_muon(param) else "fp32_param"
    found = {state: param.states[state] for state in STATES if state in param.states}
    if master == "fp32_param" and weight.dtype == torch.float32:
        return found
    return {master: param.best.to(torch.float32), **found}
