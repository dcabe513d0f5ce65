"""Small checkpoints in Megatron's torch_dist layouts, written from known tensors with torch's own DCP writer."""

import argparse
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.support import megatron_torch
from tests.support.megatron_torch import EMBEDDING, OUTPUT, Truth, is_sharded_expert, part_of

HIDDEN, FFN, VOCAB, LAYERS = megatron_torch.HIDDEN, megatron_torch.FFN, megatron_torch.VOCAB, 3
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


@dataclass
class Setup:
    """``style``: "stacked", "layers" (a key per layer) or "single" (per layer and expert, gate and up apart)."""

    layout: str | None = None  # as content_metadata says it
    muon: bool = True
    experts: bool = False
    tied: bool = False
    style: str = "stacked"
    fused_norms: bool = True
    chained: bool = False
    common_file: bool = True
    step_in: str = "group"  # or "common_step", "nowhere"
    tp: int = 1
    ep: int = 1
    stages: tuple[int, ...] = (LAYERS,)
    buckets: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> megatron_torch.Setup:
        family, optimizer = "moe" if self.experts else "llama", "layer_wise" if self.muon else "distributed"
        sizes = {"tp": self.tp, "dp": 2, "ep": self.ep, "stages": (self.stages,), "tied": self.tied}
        return megatron_torch.Setup(family, optimizer, **sizes)  # type: ignore[arg-type]


def shapes(experts: bool = False, tied: bool = False, layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """A llama-like model in the order of Megatron's modules (local spec)."""
    found = megatron_torch.whole_shapes(Setup(experts=experts, tied=tied, stages=(layers,)).model)
    return {name: shape for name, shape in found.items() if not name.endswith(".bias")}


def truth(muon: bool, experts: bool = False, tied: bool = False, layers: int = LAYERS) -> Truth:
    return megatron_torch.make_truth(Setup(muon=muon).model, shapes(experts, tied, layers))


def write(step: Path, setup: Setup, known: Truth) -> None:
    step.mkdir(parents=True)
    flat = {
        n: of_name
        for n, of_name in known.items()
        if setup.layout == "dp_reshardable" and "momentum_buffer" not in of_name
    }
    state: dict[str, Any] = keyed({name: of_name["weight"] for name, of_name in known.items()}, setup)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = [None]
    state["rng_state/shard_0.0_1.1"] = [[{"random_rng_state": (3, (1, 2))}]]
    state |= by_name({name: of_name for name, of_name in known.items() if name not in flat}, setup)
    in_groups = {"step": 7} if setup.step_in == "group" else {}
    adam = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "is_expert_parallel": False, **in_groups}
    lion = {key: value for key, value in adam.items() if key not in ("eps", "step")}
    lion_of_matrices = setup.muon and setup.arguments.get("optimizer") == "lion"
    if "lion" in setup.arguments.values() and not lion_of_matrices:
        del adam["eps"]
    groups = [{**adam, "weight_decay": 0.1, "wd_mult": 1.0}, {**adam, "weight_decay": 0.0, "wd_mult": 0.0}]
    optimizer: dict[Any, Any] = {"optimizer": {"param_groups": groups}}
    if setup.step_in == "common_step":
        optimizer["optimizer"]["state"] = {"common_step": torch.tensor(7.0)}
    if flat:
        optimizer = {"param_state_sharding_type": "dp_reshardable"}
        first = f"chained_{int(setup.muon)}." if setup.chained else ""
        state |= in_buckets(first, flat, setup, groups)
        if any(is_sharded_expert(setup.model, name) for name in flat):
            state |= in_buckets("chained_1.", flat, setup, [{**groups[0], "is_expert_parallel": True}])
            optimizer = {0: optimizer, 1: dict(optimizer)}
    if setup.muon:
        muon = {"lr": 0.02, "momentum_beta": 0.9, "weight_decay": 0.1, "wd_mult": 1.0, "is_expert_parallel": False}
        of_matrices = {**lion, "weight_decay": 0.1, "wd_mult": 1.0} if lion_of_matrices else muon
        optimizer = {0: {"optimizer": {"param_groups": [of_matrices]}}, 1: optimizer}
    arguments = {**megatron_torch.arguments_of(setup.model), "transformer_impl": "local", **setup.arguments}
    common = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 7}
    common |= {"optimizer": optimizer, "opt_param_scheduler": megatron_torch.SCHEDULE}
    common |= {"content_metadata": {} if setup.layout is None else {"distrib_optim_sharding_type": setup.layout}}
    if setup.common_file:
        torch.save(common, step / "common.pt")
    else:
        state["common_state/shard_0_1"] = [common]
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    save(state, step)


def write_mimo(step: Path, known: dict[str, Truth], setup: Setup, more: dict[str, Any] | None = None) -> None:
    """A MimoModel under DDP, each module with its LayerWise Muon, as megatron-core 0.19.2 writes it. Only the first
    rank's count of Adam's steps is saved: that of the first module."""
    state: dict[str, Any] = {"rng_state/shard_0.0_1.1": [[{"random_rng_state": (3, (1, 2))}]], **(more or {})}
    options = {"lr": 0.01, "weight_decay": 0.1, "wd_mult": 1.0}
    adam = {**options, "betas": (0.9, 0.99), "eps": 1e-8}
    groups = {"": [{**options, "momentum": 0.9}], ".1": [adam, {**adam, "weight_decay": 0.0, "wd_mult": 0.0}]}
    for module, of_module in known.items():
        own = f"{'language_model' if module == 'language' else f'modality_submodules.{module}'}.module."
        weights = keyed({name: of_name["weight"] for name, of_name in of_module.items()}, setup)
        state |= {own + key: weight for key, weight in weights.items()}
        state[f"{own}decoder.layers.mlp.linear_fc1._extra_state/shard_0_1"] = [None]
        for key, tensor in by_name(of_module, setup).items():
            start, kind = re.findall(r"(.*optimizer\.state)\.(\w+)", key)[0]
            state[f"mimo.{module}.{start}.{kind}.{own}{key.removeprefix(f'{start}.{kind}.')}"] = tensor
        for chain, of_chain in groups.items():
            state[f"mimo.{module}.optimizer.mimo.{module}{chain}.param_groups/shard_0_1"] = [of_chain]
    counted = {1: {"optimizer": {"state": {"common_step": torch.tensor(7.0)}}}}
    arguments = {**megatron_torch.arguments_of(setup.model), "muon_nesterov": False, "muon_num_ns_steps": 5}
    arguments |= {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0}
    common = {"args": argparse.Namespace(**arguments), "iteration": 7, "content_metadata": {}}
    common["optimizer"] = {module: counted if module == next(iter(known)) else {} for module in known}
    state["common_state/shard_0_1"] = [common]
    step.mkdir(parents=True)
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    save(state, step)


def save(state: dict[str, Any], step: Path) -> None:
    """With torch's own writer, as Megatron does."""
    dcp.save(state, checkpoint_id=step, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)


def by_name(known: Truth, setup: Setup) -> dict[str, Any]:
    """The optimizers' state under torch_dist's keys."""
    found: dict[str, Any] = {}
    keys = ("fp32", "momentum_buffer", "moment2_buffer", "exp_avg", "exp_avg_sq")
    for is_adam, key in itertools.product((False, True), keys):
        tensors = {n: s[key] for n, s in known.items() if key in s and ("momentum_buffer" in s) != is_adam}
        chain = f"chained_{int(is_adam and setup.muon)}." if setup.chained else ""
        master = "param" if setup.layout == "fully_reshardable" and is_adam else "fp32_param"
        prefix = f"{chain}optimizer.state.{master if key == 'fp32' else key}."
        found |= {prefix + name: value for name, value in keyed(tensors, setup).items()}
    return found


def keyed(tensors: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
    """The same under torch_dist's keys, in the setup's style."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"(.*decoder\.layers)\.(\d+)\.(.+)", name)
        if layer is None:
            found[name] = tensor
            continue
        rest = FUSED.get(layer[3], layer[3]) if setup.fused_norms else layer[3]
        expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest)
        if setup.style == "single":
            key = name if rest == layer[3] else f"{layer[1]}.{layer[2]}.{rest}"
            found |= in_halves(key.replace("local_experts", "experts"), tensor)
            continue
        if expert:
            rest = f"mlp.experts.experts.{expert[2]}"
        stacked = setup.style == "stacked"
        key = f"{layer[1]}.{rest}" if stacked else f"{layer[1]}.{layer[2]}.{rest}"
        place = (int(layer[2]),) * stacked + ((int(expert[1]),) if expert else ())
        stacks.setdefault(key, {})[place] = tensor
    for key, parts in stacks.items():
        sizes = [1 + max(indices) for indices in zip(*parts)]
        found[key] = torch.stack([parts[p] for p in sorted(parts)]).view(*sizes, *next(iter(parts.values())).shape)
    return found


def in_halves(key: str, tensor: Tensor) -> dict[str, Tensor]:
    halves = {"_w": slice(FFN), "_v": slice(FFN, None)} if key.endswith("linear_fc1.weight") else {"": slice(None)}
    return {key + end: tensor[part].clone() for end, part in halves.items()}


def in_buckets(chain: str, known: Truth, setup: Setup, groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Every model-parallel rank's flat buckets, of sharded experts or of the others, and their param groups."""
    model, experts = setup.model, groups[0]["is_expert_parallel"]
    start = f"{chain}optimizer.distributed.dp_group_idx_"
    found: dict[str, Any] = {f"{start}0.optimizer/shard_0_1": [{"param_groups": groups}]}
    alone = (EMBEDDING, OUTPUT) if setup.tied and model.pp > 1 else ()
    ranks = itertools.product(range(model.pp), range(setup.ep if experts else 1), range(setup.tp))
    for rank, (p, e, t) in enumerate(ranks):
        (names,) = megatron_torch.modules_of(model, p, e)
        mine = [(local, name) for local, name in names if name in known and is_sharded_expert(model, name) == experts]
        parts = {local: {k: part_of(model, name, v, t) for k, v in known[name].items()} for local, name in mine}
        numel = sum(of_name["fp32"].numel() for of_name in parts.values())
        size = numel // setup.buckets if setup.buckets > 1 else None
        for number, bucket in enumerate(megatron_torch.in_buckets(parts, size, alone)):
            dtypes = "(torch.bfloat16, torch.float32)"
            key = f"{start}{rank}.gbuf_idx_0.dtype_{dtypes}.bucket_idx_{number}"
            found |= {f"{key}.{saved}": tensor for saved, tensor in bucket.items()}
    return found


def fsdp_state(known: Truth) -> dict[str, Any]:
    """As Megatron-FSDP writes it: gate and up apart, options by parameter, random states, torch's count of steps."""
    state: dict[str, Any] = {"args": argparse.Namespace(untie_embeddings_and_output_weights=False), "iteration": 7}
    state["rng_state.(0, 0).0.torch_rng_state"] = torch.zeros(5000, dtype=torch.uint8)
    state["rng_state.(0, 0).0.random_rng_state"] = (3, (1, 2), None)
    for name, of_name in known.items():
        for part, weight in in_halves(name, of_name["fp32"]).items():
            state[f"model.module.{part}"] = weight
            prefix = f"module.module.module.{part}"
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"optimizer.state.{prefix}.{key}"] = in_halves(name, of_name[key])[part]
            state[f"optimizer.state.{prefix}.step"] = torch.tensor(7.0)
            state[f"optimizer.param_to_group_meta.{prefix}.betas"] = (0.9, 0.99)
            state[f"optimizer.param_to_group_meta.{prefix}.lr"] = torch.tensor(0.5)
    return state
