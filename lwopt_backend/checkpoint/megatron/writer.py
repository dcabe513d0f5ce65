"""Writes Megatron's torch_dist format, of 0.16 and of 0.19."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.choices import SCHEDULER, VERSIONS
from lwopt_backend.checkpoint.contents import MASTER, Checkpoint, CheckpointError, LazyTensor, Param
from lwopt_backend.checkpoint.dcp.saving import Boxes, Place, Shards, save, stacked
from lwopt_backend.checkpoint.files.manifest import Files
from lwopt_backend.checkpoint.files.torch_files import save_as_it_lies
from lwopt_backend.checkpoint.megatron import names as naming

_LINEAR = re.compile(r"(.*\.linear_\w+)\.weight")
_OF_EXPERTS = ".pre_mlp_layernorm."


class Keys:
    """The key and place of each parameter of a model.

    Layers are stacked if they are all alike, experts always. Norms have the names of Transformer Engine's fused
    modules, also for the local spec; but in a layer with experts, Transformer Engine has a separate norm before them.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], arguments: Mapping[str, Any]) -> None:
        layers: dict[int, dict[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            if (layer := naming.layer_of(name)) is not None:
                layers.setdefault(layer, {})[naming.LAYER.sub("", name)] = shape
        alike = sorted(layers) == list(range(len(layers)))
        self._stacked = alike and all(of_layer == layers[0] for of_layer in layers.values())
        local = arguments.get("transformer_impl") == "local"
        with_experts = {naming.layer_of(name) for name in shapes if naming.expert_of(name) is not None}
        self._own_norm = set() if local else with_experts

    def place(self, name: str) -> tuple[str, Place]:
        """The key, and the parameter's place along its first axes."""
        layer, expert = naming.layer_of(name), naming.expert_of(name)
        key = name
        for fused, separate in naming.FUSED:
            if not (separate == _OF_EXPERTS and layer is not None and layer in self._own_norm):
                key = key.replace(separate, fused)
        place: list[int] = []
        if layer is not None and self._stacked:
            key = naming.LAYER.sub("decoder.layers.", key)
            place.append(layer)
        if expert is not None:
            key = naming.EXPERT.sub(".mlp.experts.experts.", key)
            place.append(expert)
        return key, tuple(place)

    def stacks(self, tensors: Mapping[str, LazyTensor], prefix: str = "") -> dict[str, Boxes]:
        """Stacks of tensors, by torch_dist's keys. Raises CheckpointError if a layer lacks a tensor."""
        found: dict[str, dict[Place, LazyTensor]] = {}
        for name, tensor in tensors.items():
            key, place = self.place(name)
            found.setdefault(prefix + key, {})[place] = tensor
        return {key: stacked(parts, key) for key, parts in found.items()}

    def extra_states(self, names: Iterable[str]) -> dict[str, Any]:
        """The extra state of layers' linear modules, by key: a list with None."""
        found: dict[str, list[Place]] = {}
        for name in names:
            key, place = self.place(name)
            if naming.layer_of(name) is not None and (linear := _LINEAR.fullmatch(key)):
                found.setdefault(f"{linear[1]}._extra_state", []).append(place or (0,))
        states: dict[str, Any] = {}
        for key, places in found.items():
            counts = ".".join(str(max(numbers) + 1) for numbers in zip(*places))
            states.update({f"{key}/shard_{'.'.join(map(str, place))}_{counts}": [None] for place in places})
        return states


# What is no tensor in Megatron's torch_dist checkpoints: arguments, param groups, scheduler.

OLD, NEW, NO_LAYOUT = VERSIONS
_TORCH_ONLY = ("amsgrad", "foreach")  # options of torch's AdamW, which counts by parameter; Apex's and TE's by group


def common(checkpoint: Checkpoint, arguments: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The dictionary from which Megatron's ``load_checkpoint`` takes everything but tensors."""
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if is_distributed(checkpoint, arguments, version):
        metadata["distrib_optim_sharding_type"] = "fully_reshardable"
        metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    values = {**arguments, "no_save_rng": True}  # random states are not written, so that it must not look for them
    for key, value in arguments.items():
        if isinstance(value, str) and value.startswith("torch."):
            dtype = getattr(torch, value.removeprefix("torch."), None)
            values[key] = dtype if isinstance(dtype, torch.dtype) else value
    found = {
        "args": argparse.Namespace(**values),
        "checkpoint_version": 3.0,
        "iteration": checkpoint.iteration or 0,
        "num_floating_point_operations_so_far": arguments.get("num_floating_point_operations_so_far", 0),
        "content_metadata": metadata,
    }
    if any(param.states for param in checkpoint.params.values()):
        if not (checkpoint.scheduler or {}).keys() >= {"num_steps", *SCHEDULER}:
            raise CheckpointError(
                f"{checkpoint.format}: expected the state of Megatron's scheduler, which it compares when it loads, "
                f"found {sorted(checkpoint.scheduler or ())}; use convert.scheduled"
            )
        found["optimizer"] = _optimizers(checkpoint, arguments, version)
        found["opt_param_scheduler"] = checkpoint.scheduler
    return found


def arguments_of(checkpoint: Checkpoint, version: str) -> dict[str, Any]:
    """Megatron's ``args``: the checkpoint's, and missing ones that loading needs, as far as they can be inferred.
    Raises CheckpointError if the number of attention heads is unknown, because no tensor implies it."""
    given = dict(checkpoint.arguments)
    if given.get("num_attention_heads") is None:
        raise CheckpointError(
            f"{checkpoint.format}: expected num_attention_heads among its arguments, found {sorted(given)[:20]}; "
            "Megatron compares it when it loads: put Megatron's arguments into Checkpoint.arguments"
        )
    embedding, output = naming.EMBEDDINGS
    if embedding not in checkpoint.params:
        raise CheckpointError(f"{checkpoint.format}: {embedding} is missing; Megatron cannot load a model without it")
    rows, columns = checkpoint.params[embedding].shape
    world = {size: checkpoint.world.get(size, 1) for size in ("tp", "pp", "dp")}
    shown = {
        "num_layers": len({naming.layer_of(name) for name in checkpoint.params} - {None}),
        "hidden_size": columns,
        "padded_vocab_size": rows,
        "untie_embeddings_and_output_weights": output in checkpoint.params,
        "add_position_embedding": True,  # Megatron's own default, also of models with rotary positions
        "max_position_embeddings": None,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": None,
        "tensor_model_parallel_size": world["tp"],
        "pipeline_model_parallel_size": world["pp"],
        "data_parallel_size": world["dp"],
        "world_size": math.prod(world.values()),
        "consumed_train_samples": checkpoint.samples or 0,
        "optimizer": _optimizer_name(checkpoint, version),
        "ckpt_format": "torch_dist",
    }
    trained = {} if checkpoint.samples is None else {"consumed_train_samples": checkpoint.samples}
    known = {key: value for key, value in given.items() if value is not None or key not in shown}
    return {**shown, **known, **trained}


def _weight_of(checkpoint: Checkpoint, param: Param) -> LazyTensor:
    """The model's weight; from the master weight if only that is known, as DeepSpeed saves it at stage 3. It has 16
    bits if Megatron's arguments or DeepSpeed's configuration say that training did."""
    if param.weight is not None:
        return param.weight
    arguments = checkpoint.arguments
    config = arguments.get("ds_config") or {}
    for kind, dtype in (("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16), ("fp16", torch.float16)):
        if arguments.get(kind) is True or (config.get(kind) or {}).get("enabled") is True:
            return param.best.to(dtype)
    return param.best


def is_muon(param: Param) -> bool:
    return "momentum_buffer" in param.states


def is_lion(param: Param) -> bool:
    return "exp_avg" in param.states and "exp_avg_sq" not in param.states


def _optimizer_name(checkpoint: Checkpoint, version: str) -> str:
    """Raises CheckpointError for an optimizer that Megatron 0.16 does not have."""
    params = checkpoint.params.values()
    lion, adaptive = any(map(is_lion, params)), any(naming.SECOND in param.states for param in params)
    if version == OLD and (lion or adaptive):
        name = "Lion" if lion else "adaptive_muon"
        raise CheckpointError(f"{checkpoint.format}: Megatron {OLD} has no {name}; give --megatron-version {NEW}")
    if has_muon(checkpoint):
        return "dist_muon" if version == OLD else "adaptive_muon" if adaptive else "muon"
    return "lion" if lion else "adam"


def has_muon(checkpoint: Checkpoint) -> bool:
    return any(map(is_muon, checkpoint.params.values()))


def is_distributed(checkpoint: Checkpoint, arguments: Mapping[str, Any], version: str) -> bool:
    """Whether Adam's state is Megatron's DistributedOptimizer's, whose master weights have another key."""
    if has_muon(checkpoint):
        return version == NEW and arguments.get("use_layer_wise_param_layout") is not False
    return bool(arguments.get("use_distributed_optimizer", True))


def _optimizers(checkpoint: Checkpoint, arguments: Mapping[str, Any], version: str) -> dict[Any, Any]:
    """Groups of matrices first, then Adam's, those of sharded experts by themselves; one optimizer has no number."""
    if checkpoint.groups and all("wd_mult" in group for group in checkpoint.groups):  # Megatron made them
        steps: dict[int | None, set[float]] = {}
        for param in checkpoint.params.values():
            if param.step is not None:
                steps.setdefault(param.group, set()).add(param.step)
        groups = [_counted(dict(g), steps.get(n, set()), n) for n, g in enumerate(checkpoint.groups)]
    else:
        groups = _made_groups(checkpoint, arguments, checkpoint.scheduler or {})
    parts: dict[tuple[bool, bool], list[dict[str, Any]]] = {}
    for group, of_matrix in zip(groups, naming.of_matrices(groups)):
        adam = "betas" in group and not of_matrix
        parts.setdefault((adam, adam and bool(group.get("is_expert_parallel"))), []).append(group)
    distributed = is_distributed(checkpoint, arguments, version)
    muon = has_muon(checkpoint)
    found = [_optimizer(parts[kind], kind[0], distributed, version, muon) for kind in sorted(parts)]
    return found[0] if len(found) == 1 else dict(enumerate(found))


def _optimizer(
    groups: Sequence[dict[str, Any]], adam: bool, distributed: bool, version: str, beside_muon: bool
) -> dict[str, Any]:
    if not adam:
        wanted, other = ("momentum_beta", "momentum")[:: 1 if version == OLD else -1]
        renamed = [{wanted if key == other else key: v for key, v in g.items()} for g in groups]
        return {"optimizer": {"param_groups": renamed}}
    if version == NEW and beside_muon:
        groups = [{"optimizer": "adam" if "eps" in group else "lion", **group} for group in groups]
    steps = {group["step"] for group in groups if "step" in group}
    if not distributed and any(key in group for group in groups for key in _TORCH_ONLY):
        without = [{key: value for key, value in group.items() if key != "step"} for group in groups]
        state = {"state": {"common_step": torch.tensor(float(steps.pop()))}} if len(steps) == 1 else {}
        return {"optimizer": {**state, "param_groups": without}}
    counted = [{**group, "step": int(group["step"])} if "step" in group else group for group in groups]
    found: dict[str, Any] = {"optimizer": {"param_groups": counted}}
    return {**found, "param_state_sharding_type": "fully_reshardable"} if distributed else found


def _counted(group: dict[str, Any], steps: set[float], number: Any) -> dict[str, Any]:
    if "eps" not in group:  # Megatron's Muon and Lion count none
        return group
    if len(steps) > 1:
        raise CheckpointError(
            f"param group {number}: its parameters made {sorted(steps)} steps, but Megatron counts them by group; "
            "train parameters that began later in a group of their own"
        )
    return {**group, "step": steps.pop()} if steps else group


def _made_groups(
    checkpoint: Checkpoint, arguments: Mapping[str, Any], scheduler: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Groups as Megatron makes them, with the options of another optimizer's: Muon's, Adam's, Adam's without decay.
    All have the schedule's rates, by which Megatron 0.19 finds a group."""
    of_lion = [is_lion(p) for p in checkpoint.params.values() if not is_muon(p) and set(p.states) - {MASTER}]
    if any(of_lion) and not (all(of_lion) and has_muon(checkpoint)):
        raise CheckpointError(
            f"{checkpoint.format}: Lion trained what it does not in Megatron, where Muon has the matrices and Lion all "
            "else (--muon-scalar-optimizer lion), or Lion the matrices and Adam all else; convert to universal or dcp"
        )
    members: dict[tuple[bool, bool, bool], list[tuple[str, Param]]] = {}
    for name, param in checkpoint.params.items():
        if set(param.states) - {MASTER}:
            adam = not is_muon(param)
            no_decay = adam and (len(param.shape) == 1 or name.endswith(".bias"))
            members.setdefault((adam, naming.is_sharded_expert(name, arguments), no_decay), []).append((name, param))
    found = []
    for (adam, expert, no_decay), params in sorted(members.items()):
        given = [dict(checkpoint.groups[p.group]) for _, p in params if p.group is not None]
        options = {}
        for key in ("lr", "betas", "eps") if adam else ("lr", "momentum"):
            values = [tuple(g[key]) if isinstance(g[key], (list, tuple)) else g[key] for g in given if key in g]
            if any(value != values[0] for value in values):
                raise CheckpointError(
                    f"{params[0][0]} and others that Megatron trains in one param group have different {key}: "
                    f"{values[:5]}; make their groups' options equal"
                )
            options.update({key: values[0]} if values else {})
        decay = max((g.get("weight_decay", 0.0) for g in given), default=0.0)
        group = {
            **{"is_expert_parallel": expert, "default_config": True, "wd_mult": float(not no_decay), "lr_mult": 1.0},
            **{"is_decoupled_lr": False, "max_lr": scheduler["max_lr"], "min_lr": scheduler["min_lr"]},
            **{"lr": options.get("lr", scheduler["max_lr"]), "weight_decay": 0.0 if no_decay else decay},
        }
        if adam:
            lion = any(is_lion(param) for _, param in params)
            group["betas"] = options.get("betas", (0.95, 0.98) if lion else (0.9, 0.999))
            group |= {} if lion else {"eps": options.get("eps", 1e-8), "bias_correction": True}
        else:
            group["momentum"] = options.get("momentum", 0.95)
        found.append(_counted(group, {p.step for _, p in params if p.step is not None}, params[0][0]))
    return found


# Writes Megatron's ``torch_dist`` format, of 0.16 and of 0.19 and later; ``megatron.dist`` tells what is where.
#
# 0.16   common.pt; states as ``optimizer.state.<state>.<name>``, master weights as ``fp32_param``. This is what its
#        LayerWise optimizer loads (--optimizer dist_muon).
# 0.19   common state among the tensors; the fully reshardable layout (--dist-ckpt-optim-fully-reshardable), in which
#        Adam's master weights are ``param``, Muon's ``fp32_param``. With --no-use-layer-wise-param-layout, all are
#        ``fp32_param``: written for runs that had that flag, and as version "0.19-no-layout".
# Checkpoints of Adam alone are the DistributedOptimizer's, fully reshardable, unless their arguments say that there was
# none. Megatron loads both at any tensor, pipeline and data parallel size. Random states are not written.


def write(checkpoint: Checkpoint, folder: Path, version: str = OLD, workers: int = 1) -> None:
    """Fill ``folder``, an ``iter_%07d``, which is empty. ``workers`` parameters of one layer are in memory at a time.

    ``version``: one of ``VERSIONS``. Raises CheckpointError for names that are not Megatron-core's, and for what this
    format has no place for.
    """
    if version not in VERSIONS:
        raise CheckpointError(f"version {version!r} of Megatron is not written, only {', '.join(VERSIONS)}")
    if version == NO_LAYOUT:
        version, told = NEW, {**checkpoint.arguments, "use_layer_wise_param_layout": False}
        checkpoint = replace(checkpoint, arguments=told)
    if checkpoint.names != "megatron-core":
        raise CheckpointError(
            f"{checkpoint.format}: expected parameters named as in Megatron-core, found names of {checkpoint.names!r}; "
            "choose the table of names that leads to megatron-core"
        )
    for name in checkpoint.params:
        if naming.local_spec(name) != name:
            raise CheckpointError(f"{name}: expected the local spec's name, {naming.local_spec(name)}; rename it")
    arguments = arguments_of(checkpoint, version)
    keys = Keys({name: param.shape for name, param in checkpoint.params.items()}, arguments)
    weights = {name: _weight_of(checkpoint, param) for name, param in checkpoint.params.items()}
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
    files = Files(folder)
    if version == OLD:
        metadata.update(common_backend="torch", common_backend_version=1)
        with files.open("common.pt") as file:
            save_as_it_lies(rest, file)
    else:
        objects["common_state/shard_0_1"] = [rest]
    with files.open("metadata.json") as file:
        file.write(json.dumps(metadata).encode())
    shards = Shards({(key,): boxes for key, boxes in tensors.items()}, {(key,): obj for key, obj in objects.items()})
    save(folder, shards, workers=workers, step=checkpoint.iteration, others=files.entries)


def _states(name: str, param: Param, weight: LazyTensor, distributed: bool) -> dict[str, LazyTensor]:
    """States by the format's keys. Weights in fp32 are their own masters, but the DistributedOptimizer has both."""
    if param.owner_states:
        raise CheckpointError(f"{name}: Megatron has no place for what the rule's owner keeps; use universal or dcp")
    unknown = sorted(set(param.states) - {MASTER, *naming.STATES})
    if unknown:
        raise CheckpointError(
            f"{param.states[unknown[0]].where}: Megatron has no place for {', '.join(unknown)} of {name}; its "
            f"optimizers keep {', '.join(naming.STATES)}"
        )
    if not param.states:
        return {}
    master = "param" if distributed and not is_muon(param) else "fp32_param"
    found = {state: param.states[state] for state in naming.STATES if state in param.states}
    if master == "fp32_param" and weight.dtype == torch.float32:
        return found
    return {master: param.best.to(torch.float32), **found}
