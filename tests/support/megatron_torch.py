"""Writes checkpoints in Megatron's ``torch`` format, with their truth, by walking through what each rank would do.
Follows the measured facts on the format and shares no code with the reader."""

import argparse
import itertools
import random
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HIDDEN, FFN, VOCAB, POSITIONS, EXPERTS = 8, 12, 16, 8, 4
EMBEDDING, OUTPUT, NORM = "embedding.word_embeddings.weight", "output_layer.weight", "decoder.final_layernorm.weight"
IN_BUCKETS = {"fp32": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
SCHEDULE = {  # its scheduler's state after 28 samples
    **{"max_lr": 0.01, "min_lr": 0.001, "lr_warmup_steps": 8, "lr_decay_steps": 80, "lr_decay_style": "cosine"},
    **{"start_wd": 0.1, "end_wd": 0.1, "wd_incr_style": "constant", "wd_incr_steps": 80, "num_steps": 28},
}
Truth = dict[str, dict[str, Tensor]]  # by parameter: "weight" and its states
Kind = tuple[int, bool, bool]  # of a param group: its optimizer's number, whether it has experts, whether no decay


@dataclass
class Setup:
    """What was trained, on which ranks. ``stages``: layers of each (virtual stage, pipeline rank), in layers' order."""

    family: str = "llama"  # gpt2, moe
    optimizer: str = "plain"  # distributed, layer_wise
    tp: int = 1
    dp: int = 1
    ep: int = 1
    stages: tuple[tuple[int, ...], ...] = ((2,),)
    tied: bool = False
    fused_adam: bool = False  # keeps its step in the group
    dtype: torch.dtype = torch.bfloat16
    arguments: dict[str, Any] = field(default_factory=dict)
    iteration: int = 7
    seed: int = 0

    @property
    def pp(self) -> int:
        return len(self.stages[0])

    @property
    def layers(self) -> int:
        return sum(map(sum, self.stages))

    @property
    def has_masters(self) -> bool:
        return self.dtype != torch.float32 or self.optimizer == "distributed"


def shapes_of_layer(family: str) -> dict[str, tuple[int, ...]]:
    """In the order of Megatron's modules (local spec)."""
    modules: dict[str, tuple[int, ...]] = {"input_layernorm": (HIDDEN,), "self_attention.linear_proj": (HIDDEN, HIDDEN)}
    modules |= {"self_attention.linear_qkv": (2 * HIDDEN, HIDDEN), "pre_mlp_layernorm": (HIDDEN,)}
    places = [""]
    if family == "moe":
        modules["mlp.router"] = (EXPERTS, HIDDEN)
        places = [f"experts.local_experts.{expert}." for expert in range(EXPERTS)]
    for place in places:
        modules[f"mlp.{place}linear_fc1"] = (FFN if family == "gpt2" else 2 * FFN, HIDDEN)
        modules[f"mlp.{place}linear_fc2"] = (HIDDEN, FFN)
    return with_biases(family, modules)


def with_biases(family: str, modules: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    found = {}
    for module, shape in modules.items():
        found[f"{module}.weight"] = shape
        if family == "gpt2" or ".experts." in module:
            found[f"{module}.bias"] = shape[:1]
    return found


def whole_shapes(setup: Setup) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (VOCAB, HIDDEN)}
    if setup.family == "gpt2":
        found["embedding.position_embeddings.weight"] = (POSITIONS, HIDDEN)
    for layer in range(setup.layers):
        found |= {f"decoder.layers.{layer}.{name}": shape for name, shape in shapes_of_layer(setup.family).items()}
    found |= with_biases(setup.family, {"decoder.final_layernorm": (HIDDEN,)})
    return found if setup.tied else {**found, OUTPUT: (VOCAB, HIDDEN)}


def goes_to_muon(setup: Setup, name: str, shape: tuple[int, ...]) -> bool:
    return setup.optimizer == "layer_wise" and len(shape) == 2 and name not in (EMBEDDING, OUTPUT)


def make_truth(setup: Setup, shapes: Mapping[str, tuple[int, ...]]) -> Truth:
    """Whole tensors; many are of one shape, so that a wrong order shows in values only."""
    generator = torch.Generator().manual_seed(setup.seed)
    found = {}
    for name, shape in shapes.items():
        keys = ["momentum_buffer"] if goes_to_muon(setup, name, shape) else ["exp_avg", "exp_avg_sq"]
        states = {key: torch.randn(shape, generator=generator) for key in ("fp32", *keys)}
        if "exp_avg_sq" in states:
            states["exp_avg_sq"].abs_()  # the next step has its root
        found[name] = {"weight": states["fp32"].to(setup.dtype), **states}
        if not setup.has_masters:
            del found[name]["fp32"]
    return found


def part_of(setup: Setup, name: str, tensor: Tensor, t: int) -> Tensor:
    if "linear_fc1" in name and setup.family != "gpt2":
        return torch.cat([half.chunk(setup.tp)[t] for half in tensor.chunk(2)])
    if name in (EMBEDDING, OUTPUT) or "linear_qkv" in name or "linear_fc1" in name:
        return tensor.chunk(setup.tp)[t].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return tensor.chunk(setup.tp, 1)[t].clone()
    return tensor.clone()


def modules_of(setup: Setup, p: int, e: int) -> list[list[tuple[str, str]]]:
    """(name in the file, name in the whole model) in module order, for each virtual stage of a rank."""
    found = []
    mine = EXPERTS // setup.ep
    ends = [name for name in whole_shapes(setup) if ".layers." not in name]
    for v, counts in enumerate(setup.stages):
        before = sum(map(sum, setup.stages[:v])) + sum(counts[:p])
        names = [(name, name) for name in ends if name.startswith("embedding.") and p == v == 0]
        for layer, name in itertools.product(range(counts[p]), shapes_of_layer(setup.family)):
            expert = int(name.split(".")[3]) if "local_experts" in name else e * mine
            if e * mine <= expert < (e + 1) * mine:
                local = name.replace(f"local_experts.{expert}", f"local_experts.{expert - e * mine}")
                names.append((f"decoder.layers.{layer}.{local}", f"decoder.layers.{before + layer}.{name}"))
        if p == setup.pp - 1 and v == len(setup.stages) - 1:
            names += [(name, name) for name in ends if not name.startswith("embedding.")]
            names += [(OUTPUT, EMBEDDING)] * (setup.tied and setup.pp > 1)
        found.append(names)
    return found


def is_sharded_expert(setup: Setup, name: str) -> bool:
    return "local_experts" in name and setup.ep > 1


def in_buckets(parts: Truth, closed_at: int | None, alone: Collection[str]) -> list[dict[str, Tensor]]:
    """The flat buckets of one buffer, without the padding at a bucket's end. Parameters are in reversed order and start
    at multiples of 64 elements; what is between them is not set. A bucket is closed when it has ``closed_at`` elements,
    and before and after those that are ``alone``."""
    found: list[dict[str, Tensor]] = []
    pieces: list[Mapping[str, Tensor]] = []

    def numel() -> int:
        return sum(piece["fp32"].numel() for piece in pieces)

    def close() -> None:
        flat = {saved: [p[key].flatten() for p in pieces] for key, saved in IN_BUCKETS.items() if key in pieces[-1]}
        found.append({saved: torch.cat(tensors) for saved, tensors in flat.items()})
        pieces.clear()

    for name, states in reversed(parts.items()):
        pieces.append(dict.fromkeys(states, torch.full((-numel() % 64,), torch.nan)))
        if name in alone and numel():
            close()
        pieces.append(states)
        if name in alone or closed_at and numel() >= closed_at:
            close()
    if pieces:
        close()
    return found


def arguments_of(setup: Setup) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": setup.tp,
        "pipeline_model_parallel_size": setup.pp,
        "expert_model_parallel_size": setup.ep,
        "expert_tensor_parallel_size": setup.tp,
        "context_parallel_size": 1,
        "data_parallel_size": setup.dp,
        "num_layers": setup.layers,
        "num_experts": EXPERTS if setup.family == "moe" else None,
        "swiglu": setup.family != "gpt2",
        "untie_embeddings_and_output_weights": not setup.tied,
        "optimizer": "dist_muon" if setup.optimizer == "layer_wise" else "adam",
        "consumed_train_samples": 4 * setup.iteration,
    }


class Writer:
    """Writes the files of all ranks of a setup into a folder."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.truth = make_truth(setup, whole_shapes(setup))
        self.arguments = {
            **arguments_of(setup),
            **{"group_query_attention": True, "num_query_groups": 4, "decoupled_lr": None, "save": Path("somewhere")},
            **{"use_distributed_optimizer": setup.optimizer == "distributed", "params_dtype": setup.dtype},
            **{"overlap_grad_reduce": False, "ddp_num_buckets": None, "ddp_bucket_size": None},
            **{"overlap_param_gather_with_optimizer_step": False, **setup.arguments},
        }

    def write(self, root: Path) -> Path:
        setup = self.setup
        step = root / f"iter_{setup.iteration:07d}"
        step.mkdir(parents=True)
        (root / "latest_checkpointed_iteration.txt").write_text(str(setup.iteration))
        for t, p, d in itertools.product(range(setup.tp), range(setup.pp), range(setup.dp)):
            self._write_rank(step, t, p, d)
        return step

    def _write_rank(self, step: Path, t: int, p: int, d: int) -> None:
        setup, e = self.setup, d % self.setup.ep
        name = f"mp_rank_{t:02d}" + f"_{p:03d}" * (setup.pp > 1) + f"_{e:03d}" * (setup.ep > 1)
        (step / name).mkdir(exist_ok=True)
        chunks = modules_of(setup, p, e)
        optimizers = self._optimizers(chunks, t, d)
        kept = optimizers if len(optimizers) > 1 else optimizers[0]
        if setup.optimizer == "layer_wise":
            torch.save(kept, step / name / f"layer_wise_optimizer_{d}.pt")
        if d // setup.ep != 0:
            return
        if setup.optimizer == "distributed":
            torch.save(self._buffers(chunks, t, p, d), step / name / "distrib_optim.pt")
            for optimizer in optimizers:
                self._keep_groups_alone(optimizer)
        saved = {
            "args": argparse.Namespace(**self.arguments),
            "checkpoint_version": 3.0,
            "iteration": setup.iteration,
            "optimizer": kept,
            "opt_param_scheduler": {**SCHEDULE, "num_steps": 4 * setup.iteration},
            "rng_state": [{"random_rng_state": random.Random(0).getstate(), "torch": torch.get_rng_state()}],
            "num_floating_point_operations_so_far": 5.0,
        }
        for number, names in enumerate(chunks):
            model = {local: self._part(whole, t)["weight"] for local, whole in names}
            saved["model" if len(chunks) == 1 else f"model{number}"] = model
        torch.save(saved, step / name / "model_optim_rng.pt")

    def _part(self, name: str, t: int) -> dict[str, Tensor]:
        return {key: part_of(self.setup, name, tensor, t) for key, tensor in self.truth[name].items()}

    # The optimizers with numbered states, Muon's, Adam's and Adam's of experts, as 0.16 makes them

    def _optimizers(self, chunks: list[list[tuple[str, str]]], t: int, d: int) -> list[dict[str, Any]]:
        """Every rank has the param groups of all, so that some are empty."""
        groups: dict[Kind, list[str]] = {kind: [] for kind in sorted({self._kind(name) for name in self.truth})}
        for _, name in itertools.chain(*chunks):
            groups[self._kind(name)].append(name)
        if self.setup.optimizer == "layer_wise" and self.setup.dp > 1:
            groups = self._dealt(groups, t, d)
        numbers = sorted({kind[0] for kind in groups})
        return [self._state_dict({kind: groups[kind] for kind in groups if kind[0] == n}, t) for n in numbers]

    def _kind(self, name: str) -> Kind:
        expert, shape = is_sharded_expert(self.setup, name), tuple(self.truth[name]["weight"].shape)
        return 0 if goes_to_muon(self.setup, name, shape) else 1 + expert, expert, len(shape) == 1

    def _dealt(self, groups: dict[Kind, list[str]], t: int, d: int) -> dict[Kind, list[str]]:
        """Names by size, back and forth; those of sharded experts to the ranks that hold the same ones."""
        setup = self.setup
        mine: dict[Kind, list[str]] = {kind: [] for kind in groups}
        turns: Counter[bool] = Counter()
        everyone = [(kind, name) for kind, names in groups.items() for name in names]
        for kind, name in sorted(everyone, key=lambda entry: self._part(entry[1], t)["weight"].numel()):
            expert = kind[1]
            ranks, rank = (setup.dp // setup.ep, d // setup.ep) if expert else (setup.dp, d)
            ring = [*range(ranks), *reversed(range(ranks))]
            if ring[turns[expert] % len(ring)] == rank:
                mine[kind].append(name)
            turns[expert] += 1
        return mine

    def _state_dict(self, groups: dict[Kind, list[str]], t: int) -> dict[str, Any]:
        setup, masters = self.setup, []
        inner: dict[str, Any] = {"state": {}, "param_groups": []}
        for (optimizer, expert, no_decay), names in groups.items():
            first = len(inner["state"])
            numbers = [*range(first, first + len(names))]
            group = {"params": numbers, "is_expert_parallel": expert, "default_config": True, "is_decoupled_lr": False}
            group |= {"lr": 0.004, "lr_mult": 1.0, "max_lr": 0.01}
            group |= {"weight_decay": 0.1 * (not no_decay), "wd_mult": float(not no_decay)}
            group |= {"momentum_beta": 0.9} if optimizer == 0 else {"betas": (0.9, 0.99), "eps": 1e-8}
            if optimizer != 0 and setup.fused_adam and names:
                group["step"] = setup.iteration
            parts = [self._part(name, t) for name in names]
            step = {} if optimizer == 0 or setup.fused_adam else {"step": torch.tensor(float(setup.iteration))}
            for number, part in zip(numbers, parts):
                inner["state"][number] = {**step, **{k: v for k, v in part.items() if k not in ("weight", "fp32")}}
            inner["param_groups"].append(group)
            masters.append([part["fp32"] for part in parts if "fp32" in part])
        return {"optimizer": inner, "fp32_from_fp16_params": masters} if setup.has_masters else inner

    # The distributed optimizer

    def _keep_groups_alone(self, optimizer: dict[str, Any]) -> None:
        del optimizer["fp32_from_fp16_params"], optimizer["optimizer"]["state"]
        for group in optimizer["optimizer"]["param_groups"]:
            del group["params"]
            group["step"] = float(self.setup.iteration)

    def _buffers(self, chunks: list[list[tuple[str, str]]], t: int, p: int, d: int) -> Any:
        dense = self._buffers_of(chunks, t, p, experts=False) if d == 0 else None
        return dense if self.setup.ep == 1 else [dense, self._buffers_of(chunks, t, p, experts=True)]

    def _buffers_of(self, chunks: list[list[tuple[str, str]]], t: int, p: int, *, experts: bool) -> dict[Any, Any]:
        setup = self.setup
        found: dict[Any, Any] = {"buckets_coalesced": True}
        total = sum(self._part(name, t)["weight"].numel() for _, name in itertools.chain(*chunks))
        alone = (EMBEDDING, OUTPUT) if setup.tied and setup.pp > 1 else ()
        for v, chunk in enumerate(chunks):
            parts = {n: self._part(name, t) for n, name in chunk if is_sharded_expert(setup, name) == experts}
            buckets = in_buckets(parts, self._bucket_size(total) if p == v == 0 else None, alone)
            if buckets:
                buffer: dict[str, Any] = {key: torch.cat([b[key] for b in buckets]) for key in buckets[0]}
                found[v] = {(setup.dtype, torch.float32): buffer | {"numel_unpadded": buffer["param"].numel()}}
        return found

    def _bucket_size(self, total: int) -> int | None:
        if not self.arguments["overlap_grad_reduce"]:
            return None
        if self.arguments["ddp_num_buckets"] is not None:
            return total // self.arguments["ddp_num_buckets"]
        return self.arguments["ddp_bucket_size"] or max(40_000_000, 1_000_000 * self.setup.dp)
