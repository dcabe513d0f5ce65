"""Small checkpoints in Megatron's torch_dist layouts, written from known tensors with torch's own DCP writer."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tests.megatron_torch import Setup as TorchSetup
from tests.megatron_torch import part_of

HIDDEN, FFN, VOCAB, LAYERS, EXPERTS = 8, 12, 16, 3, 4
Truth = dict[str, dict[str, Tensor]]  # by parameter: "weight" and its states
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def shapes(experts: bool = False) -> dict[str, tuple[int, ...]]:
    """A llama-like model in the order of Megatron's modules (local spec)."""
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
    mlp = {"linear_fc1.weight": (2 * FFN, HIDDEN), "linear_fc2.weight": (HIDDEN, FFN)}
    for layer in range(LAYERS):
        of_layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (HIDDEN,),
            "self_attention.linear_proj.weight": (HIDDEN, HIDDEN),
            "self_attention.linear_qkv.weight": (2 * HIDDEN, HIDDEN),
            "pre_mlp_layernorm.weight": (HIDDEN,),
        }
        if experts:
            of_layer["mlp.router.weight"] = (EXPERTS, HIDDEN)
            for expert in range(EXPERTS):
                of_layer |= {f"mlp.experts.local_experts.{expert}.{name}": shape for name, shape in mlp.items()}
        else:
            of_layer |= {f"mlp.{name}": shape for name, shape in mlp.items()}
        found |= {f"decoder.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return {**found, "decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (VOCAB, HIDDEN)}


def truth(muon: bool, experts: bool = False, tied: bool = False) -> Truth:
    generator = torch.Generator().manual_seed(0)
    found: Truth = {}
    for name, shape in shapes(experts).items():
        if tied and name == "output_layer.weight":
            continue
        is_muon = muon and len(shape) == 2 and name not in ("embedding.word_embeddings.weight", "output_layer.weight")
        keys = ["fp32", "momentum_buffer"] if is_muon else ["fp32", "exp_avg", "exp_avg_sq"]
        states = {key: torch.randn(shape, generator=generator) for key in keys}
        found[name] = {"weight": states["fp32"].bfloat16(), **states}
    return found


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


def write(step: Path, setup: Setup, known: Truth) -> None:
    """A checkpoint of ``known`` in the folder of one step."""
    step.mkdir(parents=True)
    state: dict[str, Any] = keyed({name: of_name["weight"] for name, of_name in known.items()}, setup)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = [None]
    state["rng_state/shard_0.0_1.1"] = [[{"random_rng_state": (3, (1, 2))}]]
    in_buckets = {}
    if setup.layout == "dp_reshardable":
        in_buckets = {name: of_name for name, of_name in known.items() if "exp_avg" in of_name}
    by_state: dict[tuple[str, bool], dict[str, Tensor]] = {}
    for name, of_name in known.items():
        for key, tensor in of_name.items():
            if key != "weight" and name not in in_buckets:
                by_state.setdefault((key, "exp_avg" in of_name), {})[name] = tensor
    for (key, is_adam), tensors in by_state.items():
        chain = f"chained_{int(is_adam and setup.muon)}." if setup.chained else ""
        saved = key
        if key == "fp32":
            saved = "param" if setup.layout == "fully_reshardable" and is_adam else "fp32_param"
        state |= {f"{chain}optimizer.state.{saved}.{name}": value for name, value in keyed(tensors, setup).items()}
    adam = groups(setup)
    optimizer: Any = {"optimizer": {"param_groups": adam}}
    if setup.step_in == "common_step":
        optimizer["optimizer"]["state"] = {"common_step": torch.tensor(7.0)}
    if in_buckets:
        optimizer = {"param_state_sharding_type": "dp_reshardable"}
        prefix = f"chained_{int(setup.muon)}." if setup.chained else ""
        flat = bucketed({n: t for n, t in in_buckets.items() if not sharded_expert(n, setup)}, setup, setup.tp, 1)
        state |= {f"{prefix}optimizer.distributed.{key}": value for key, value in flat.items()}
        state[f"{prefix}optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"] = [{"param_groups": adam}]
        experts = {n: t for n, t in in_buckets.items() if sharded_expert(n, setup)}
        if experts:
            flat = bucketed(experts, setup, setup.tp, setup.ep)
            of_experts = [{**adam[0], "is_expert_parallel": True}]
            state |= {f"chained_1.optimizer.distributed.{key}": value for key, value in flat.items()}
            state["chained_1.optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"] = [{"param_groups": of_experts}]
            optimizer = {0: optimizer, 1: dict(optimizer)}
    if setup.muon:
        muon = {"lr": 0.02, "momentum_beta": 0.9, "weight_decay": 0.1, "wd_mult": 1.0, "is_expert_parallel": False}
        optimizer = {0: {"optimizer": {"param_groups": [muon]}}, 1: optimizer}
    common = {
        "args": argparse.Namespace(**arguments(setup)),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "optimizer": optimizer,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": 28},
        "content_metadata": {} if setup.layout is None else {"distrib_optim_sharding_type": setup.layout},
    }
    if setup.common_file:
        torch.save(common, step / "common.pt")
    else:
        state["common_state/shard_0_1"] = [common]
    (step / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    save(state, step)


def save(state: dict[str, Any], step: Path) -> None:
    """With torch's own writer, as Megatron does."""
    dcp.save(state, checkpoint_id=step, planner=DefaultSavePlanner(flatten_state_dict=False), no_dist=True)


def fsdp_state(known: Truth) -> dict[str, Any]:
    """As Megatron-FSDP writes it: gate and up apart, options by parameter, random states, torch's count of steps."""
    state: dict[str, Any] = {"args": argparse.Namespace(untie_embeddings_and_output_weights=False), "iteration": 7}
    state["rng_state.(0, 0).0.torch_rng_state"] = torch.zeros(5000, dtype=torch.uint8)
    state["rng_state.(0, 0).0.random_rng_state"] = (3, (1, 2), None)
    for name, of_name in known.items():
        halves = {"": slice(None)}
        if name.endswith("linear_fc1.weight"):
            halves = {"_w": slice(FFN), "_v": slice(FFN, None)}
        for end, part in halves.items():
            prefix = f"module.module.module.{name}{end}"
            state[f"model.module.{name}{end}"] = of_name["fp32"][part].clone()
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"optimizer.state.{prefix}.{key}"] = of_name[key][part].clone()
            state[f"optimizer.state.{prefix}.step"] = torch.tensor(7.0)
            state[f"optimizer.param_to_group_meta.{prefix}.betas"] = (0.9, 0.99)
            state[f"optimizer.param_to_group_meta.{prefix}.lr"] = torch.tensor(0.5)
    return state


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit, and of one dtype."""
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


def arguments(setup: Setup) -> dict[str, Any]:
    return {
        "num_layers": LAYERS,
        "tensor_model_parallel_size": setup.tp,
        "pipeline_model_parallel_size": len(setup.stages),
        "expert_model_parallel_size": setup.ep,
        "expert_tensor_parallel_size": setup.tp,
        "context_parallel_size": 1,
        "data_parallel_size": 2,
        "num_experts": EXPERTS if setup.experts else None,
        "swiglu": True,
        "transformer_impl": "local",
        "untie_embeddings_and_output_weights": not setup.tied,
        "consumed_train_samples": 28,
        "optimizer": "dist_muon" if setup.muon else "adam",
        **setup.arguments,
    }


def groups(setup: Setup) -> list[dict[str, Any]]:
    step = {"step": 7} if setup.step_in == "group" else {}
    adam = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "is_expert_parallel": False, **step}
    return [{**adam, "weight_decay": 0.1, "wd_mult": 1.0}, {**adam, "weight_decay": 0.0, "wd_mult": 0.0}]


def keyed(tensors: dict[str, Tensor], setup: Setup) -> dict[str, Tensor]:
    """The same under torch_dist's keys, in the setup's style."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
        if layer is None:
            found[name] = tensor
            continue
        number, rest = int(layer[1]), layer[2]
        if setup.fused_norms:
            rest = FUSED.get(rest, rest)
        expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(.+)", rest)
        if setup.style == "single":
            if expert:
                rest = f"mlp.experts.experts.{expert[1]}.{expert[2]}"
            key = f"decoder.layers.{number}.{rest}"
            if rest.endswith("linear_fc1.weight"):
                found[f"{key}_w"], found[f"{key}_v"] = tensor[:FFN].clone(), tensor[FFN:].clone()
            else:
                found[key] = tensor
            continue
        if expert:
            rest = f"mlp.experts.experts.{expert[2]}"
        key = f"decoder.layers.{rest}" if setup.style == "stacked" else f"decoder.layers.{number}.{rest}"
        place = (number,) * (setup.style == "stacked") + ((int(expert[1]),) if expert else ())
        if place:
            found.setdefault(key, {})[place] = tensor
        else:
            found[key] = tensor
    return {key: _stacked(value) if isinstance(value, dict) else value for key, value in found.items()}


def _stacked(parts: dict[tuple[int, ...], Tensor]) -> Tensor:
    sizes = [1 + max(place[axis] for place in parts) for axis in range(len(next(iter(parts))))]
    found = torch.stack([parts[place] for place in sorted(parts)])
    return found.view(*sizes, *found.shape[1:])


def sharded_expert(name: str, setup: Setup) -> bool:
    return ".local_experts." in name and setup.ep > 1


def bucketed(known: Truth, setup: Setup, tp: int, ep: int) -> dict[str, Tensor]:
    """Every model-parallel rank's flat buckets: reversed module order, starts padded to 64 elements with garbage."""
    found: dict[str, Tensor] = {}
    first = 0
    for stage, count in enumerate(setup.stages):
        layers = range(first, first + count)
        first += count
        for expert_rank in range(ep):
            for tensor_rank in range(tp):
                names = [n for n in known if _is_on(n, stage, layers, setup) and _is_of(n, expert_rank, ep)]
                if setup.tied and stage == len(setup.stages) - 1 > 0:
                    names.append("output_layer.weight")
                parts = {}
                for name in names:  # of a tied output layer those of the embedding
                    states = known[name if name in known else "embedding.word_embeddings.weight"]
                    parts[name] = {s: part_of(TorchSetup(tp=tp), name, t, tensor_rank) for s, t in states.items()}
                rank = tensor_rank + tp * (expert_rank + ep * stage)
                buckets = _flat(list(reversed(parts.items())), setup.buckets)
                for number, bucket in enumerate(buckets):
                    start = f"dp_group_idx_{rank}.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}"
                    found |= {f"{start}.{'param' if s == 'fp32' else s}": flat for s, flat in bucket.items()}
    return found


def _flat(parts: list[tuple[str, dict[str, Tensor]]], count: int) -> list[dict[str, Tensor]]:
    size = -(-len(parts) // count)
    found = []
    for start in range(0, len(parts), size):
        bucket: dict[str, Tensor] = {}
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            pieces: list[Tensor] = []
            for _, tensors in parts[start : start + size]:
                length = sum(map(len, pieces))
                pieces += [torch.full((-length % 64,), float("nan")), tensors[state].reshape(-1)]
            bucket[state] = torch.cat(pieces)
        found.append(bucket)
    return found


def _is_on(name: str, stage: int, layers: range, setup: Setup) -> bool:
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) in layers
    return stage == (0 if name.startswith("embedding") else len(setup.stages) - 1)


def _is_of(name: str, rank: int, ranks: int) -> bool:
    expert = re.search(r"\.local_experts\.(\d+)\.", name)
    return ranks == 1 or (expert is not None and int(expert[1]) // (EXPERTS // ranks) == rank)
