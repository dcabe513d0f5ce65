"""Writes checkpoints in Megatron's ``torch`` format, with their truth, by walking through what each rank would do.

Follows the measured facts on the format and shares no code with the reader.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch

HIDDEN, GROUPS, HEAD, FFN, VOCAB, POSITIONS = 32, 4, 4, 24, 48, 8
QKV = 2 * HIDDEN
FINAL = {"gpt2": ("weight", "bias"), "llama": ("weight",), "moe": ("weight",)}


@dataclass
class Setup:
    """What was trained, on which ranks. ``stages``: layers of each (virtual stage, pipeline rank), in layers' order."""

    family: str = "llama"
    optimizer: str = "plain"  # plain, distributed, layer_wise
    tp: int = 1
    dp: int = 1
    ep: int = 1
    stages: tuple[tuple[int, ...], ...] = ((2,),)
    experts: int = 4
    tied: bool = False
    fused_adam: bool = False  # keeps its step in the group
    dtype: torch.dtype = torch.bfloat16
    arguments: dict = field(default_factory=dict)
    iteration: int = 7
    seed: int = 0

    @property
    def pp(self) -> int:
        return len(self.stages[0])

    @property
    def layers(self) -> int:
        return sum(map(sum, self.stages))


def shapes_of_layer(setup: Setup) -> dict[str, tuple[int, ...]]:
    biased = setup.family == "gpt2"
    fc1 = FFN if biased else 2 * FFN
    found: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (HIDDEN,)}

    def linear(name: str, rows: int, columns: int) -> None:
        found[f"{name}.weight"] = (rows, columns)
        if biased or setup.family == "moe" and "experts" in name:
            found[f"{name}.bias"] = (rows,)

    if biased:
        found["input_layernorm.bias"] = (HIDDEN,)
    linear("self_attention.linear_proj", HIDDEN, HIDDEN)
    linear("self_attention.linear_qkv", QKV, HIDDEN)
    found["pre_mlp_layernorm.weight"] = (HIDDEN,)
    if biased:
        found["pre_mlp_layernorm.bias"] = (HIDDEN,)
    if setup.family != "moe":
        linear("mlp.linear_fc1", fc1, HIDDEN)
        linear("mlp.linear_fc2", HIDDEN, FFN)
        return found
    found["mlp.router.weight"] = (setup.experts, HIDDEN)
    for expert in range(setup.experts):
        linear(f"mlp.experts.local_experts.{expert}.linear_fc1", fc1, HIDDEN)
        linear(f"mlp.experts.local_experts.{expert}.linear_fc2", HIDDEN, FFN)
    return found


def whole_shapes(setup: Setup) -> OrderedDict[str, tuple[int, ...]]:
    """Of the whole model, in its order."""
    found = OrderedDict({"embedding.word_embeddings.weight": (VOCAB, HIDDEN)})
    if setup.family == "gpt2":
        found["embedding.position_embeddings.weight"] = (POSITIONS, HIDDEN)
    for layer in range(setup.layers):
        found.update({f"decoder.layers.{layer}.{name}": shape for name, shape in shapes_of_layer(setup).items()})
    found.update({f"decoder.final_layernorm.{last}": (HIDDEN,) for last in FINAL[setup.family]})
    if not setup.tied:
        found["output_layer.weight"] = (VOCAB, HIDDEN)
    return found


def goes_to_muon(setup: Setup, name: str, shape: tuple[int, ...]) -> bool:
    embeddings = ("embedding.word_embeddings.weight", "output_layer.weight")
    return setup.optimizer == "layer_wise" and len(shape) == 2 and name not in embeddings


def make_truth(setup: Setup) -> dict[str, dict[str, torch.Tensor]]:
    """``{name: {"weight", "fp32", states}}``, whole; many are of one shape, so a wrong order shows in values only."""
    generator = torch.Generator().manual_seed(setup.seed)
    found = {}
    for name, shape in whole_shapes(setup).items():
        master = torch.randn(shape, generator=generator)
        keys = ["momentum_buffer"] if goes_to_muon(setup, name, shape) else ["exp_avg", "exp_avg_sq"]
        states = {key: torch.randn(shape, generator=generator) for key in keys}
        found[name] = {"weight": master.to(setup.dtype), "fp32": master, **states}
        if setup.dtype == torch.float32 and setup.optimizer != "distributed":
            del found[name]["fp32"]
    return found


def part_of(setup: Setup, name: str, tensor: torch.Tensor, t: int) -> torch.Tensor:
    """What tensor parallel rank ``t`` has of it."""

    def rows(matrix: torch.Tensor) -> torch.Tensor:
        size = matrix.shape[0] // setup.tp
        return matrix[t * size : (t + 1) * size]

    if "word_embeddings" in name or name.startswith("output_layer") or "linear_qkv" in name:
        return rows(tensor).clone()
    if "linear_fc1" in name:
        if setup.family == "gpt2":
            return rows(tensor).clone()
        return torch.cat([rows(tensor[: tensor.shape[0] // 2]), rows(tensor[tensor.shape[0] // 2 :])])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        size = tensor.shape[1] // setup.tp
        return tensor[:, t * size : (t + 1) * size].clone()
    return tensor.clone()


def modules_of(setup: Setup, p: int, e: int) -> list[list[tuple[str, str]]]:
    """(name in the file, name in the whole model) in module order, for each virtual stage of a rank."""
    found = []
    for v, counts in enumerate(setup.stages):
        before = sum(map(sum, setup.stages[:v])) + sum(counts[:p])
        names = []
        if p == 0 and v == 0:
            names += [(name, name) for name in whole_shapes(setup) if name.startswith("embedding.")]
        mine = setup.experts // setup.ep
        for layer in range(counts[p]):
            for name in shapes_of_layer(setup):
                local = name
                if "local_experts" in name:
                    expert = int(name.split(".")[3])
                    if not e * mine <= expert < (e + 1) * mine:
                        continue
                    local = name.replace(f"local_experts.{expert}", f"local_experts.{expert - e * mine}")
                names.append((f"decoder.layers.{layer}.{local}", f"decoder.layers.{before + layer}.{name}"))
        if p == setup.pp - 1 and v == len(setup.stages) - 1:
            names += [(f"decoder.final_layernorm.{last}",) * 2 for last in FINAL[setup.family]]
            if not setup.tied:
                names.append(("output_layer.weight",) * 2)
            elif setup.pp > 1:
                names.append(("output_layer.weight", "embedding.word_embeddings.weight"))
        found.append(names)
    return found


def is_sharded_expert(setup: Setup, name: str) -> bool:
    return "local_experts" in name and setup.ep > 1


class Writer:
    """Writes the files of all ranks of a setup into a folder."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.truth = make_truth(setup)

    def write(self, root: Path) -> Path:
        step = root / f"iter_{self.setup.iteration:07d}"
        (root / "latest_checkpointed_iteration.txt").parent.mkdir(parents=True, exist_ok=True)
        (root / "latest_checkpointed_iteration.txt").write_text(str(self.setup.iteration))
        for t in range(self.setup.tp):
            for p in range(self.setup.pp):
                for d in range(self.setup.dp):
                    self._write_rank(step, t, p, d)
        return step

    def _write_rank(self, step: Path, t: int, p: int, d: int) -> None:
        setup = self.setup
        e, expert_d = d % setup.ep, d // setup.ep
        name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if setup.pp > 1 else "") + (f"_{e:03d}" if setup.ep > 1 else "")
        folder = step / name
        folder.mkdir(parents=True, exist_ok=True)
        chunks = modules_of(setup, p, e)
        if setup.optimizer == "layer_wise":
            optimizers = self._optimizers(chunks, t, d, expert_d, sharded=True)
            torch.save(optimizers if len(optimizers) > 1 else optimizers[0], folder / f"layer_wise_optimizer_{d}.pt")
        if setup.optimizer == "distributed" and (d == 0 or (setup.ep > 1 and expert_d == 0)):
            torch.save(self._buffers(chunks, t, p, d), folder / "distrib_optim.pt")
        if expert_d != 0:
            return
        optimizers = self._optimizers(chunks, t, d, expert_d, sharded=setup.optimizer == "layer_wise")
        if setup.optimizer == "distributed":
            for optimizer in optimizers:
                optimizer.pop("fp32_from_fp16_params", None)
                optimizer["optimizer"].pop("state")
                for group in optimizer["optimizer"]["param_groups"]:
                    group.pop("params")
                    group["step"] = float(setup.iteration)
        saved = {
            "args": argparse.Namespace(**self.arguments()),
            "checkpoint_version": 3.0,
            "iteration": setup.iteration,
            "optimizer": optimizers if len(optimizers) > 1 else optimizers[0],
            "opt_param_scheduler": {"num_steps": 4 * setup.iteration, "max_lr": 0.01},
            "rng_state": [{"random_rng_state": random.Random(0).getstate(), "torch": torch.get_rng_state()}],
            "num_floating_point_operations_so_far": 5.0,
        }
        for number, names in enumerate(chunks):
            model = OrderedDict()
            for local, whole in names:
                model[local] = part_of(setup, whole, self.truth[whole]["weight"], t)
                if "linear" in local and local.endswith("weight"):
                    model[local.replace("weight", "_extra_state")] = None
            saved["model" if len(chunks) == 1 else f"model{number}"] = self._as_views(model)
        torch.save(saved, folder / "model_optim_rng.pt")

    def _as_views(self, model: OrderedDict) -> OrderedDict:
        """With the distributed optimizer all weights lie in one storage."""
        if self.setup.optimizer != "distributed":
            return model
        tensors = {name: tensor for name, tensor in model.items() if tensor is not None}
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
        for name, piece in zip(tensors, flat.split([tensor.numel() for tensor in tensors.values()])):
            model[name] = piece.view(tensors[name].shape)
        return model

    def arguments(self) -> dict:
        setup = self.setup
        return {
            "tensor_model_parallel_size": setup.tp,
            "pipeline_model_parallel_size": setup.pp,
            "expert_model_parallel_size": setup.ep,
            "context_parallel_size": 1,
            "data_parallel_size": setup.dp,
            "num_layers": setup.layers,
            "num_experts": setup.experts if setup.family == "moe" else None,
            "expert_tensor_parallel_size": setup.tp,
            "group_query_attention": True,
            "num_query_groups": GROUPS,
            "swiglu": setup.family != "gpt2",
            "untie_embeddings_and_output_weights": not setup.tied,
            "optimizer": "dist_muon" if setup.optimizer == "layer_wise" else "adam",
            "use_distributed_optimizer": setup.optimizer == "distributed",
            "overlap_grad_reduce": False,
            "ddp_num_buckets": None,
            "ddp_bucket_size": None,
            "overlap_param_gather_with_optimizer_step": False,
            "decoupled_lr": None,
            "params_dtype": setup.dtype,
            "save": Path("somewhere"),
            "consumed_train_samples": 4 * setup.iteration,
        } | setup.arguments

    # The optimizers with numbered states: one list of groups, [Muon's, Adam's, Adam's of experts], as 0.16 makes them.

    def _optimizers(self, chunks: list, t: int, d: int, expert_d: int, *, sharded: bool) -> list[dict]:
        setup = self.setup
        names = [whole if local != "output_layer.weight" else local for chunk in chunks for local, whole in chunk]
        flat: list[tuple[int, dict, list[str]]] = []
        kinds: list[tuple[int, bool, bool]] = []
        if setup.optimizer == "layer_wise":
            kinds += [(0, expert, True) for expert in (False, True)]
        kinds += [(1 + expert, expert, decay) for expert in (False, True) for decay in (True, False)]
        everything = [
            name for e in range(setup.ep) for p in range(setup.pp) for c in modules_of(setup, p, e) for _, name in c
        ]
        for optimizer, expert, decay in kinds:
            if any(
                self._belongs(n, optimizer, expert, decay) for n in everything
            ):  # same on all ranks, so some are empty
                mine = [n for n in names if self._belongs(n, optimizer, expert, decay)]
                flat.append((optimizer, self._group(optimizer, expert, decay), mine))
        if sharded and setup.dp > 1:
            self._ping_pong(flat, t, d, expert_d)
        return [
            self._state_dict([entry for entry in flat if entry[0] == optimizer], t)
            for optimizer in sorted({entry[0] for entry in flat})
        ]

    def _belongs(self, name: str, optimizer: int, expert: bool, decay: bool) -> bool:
        shape = self._truth_of(name)["weight"].shape
        to_muon = goes_to_muon(self.setup, name, shape)
        return (
            is_sharded_expert(self.setup, name) == expert and to_muon == (optimizer == 0) and (len(shape) > 1) == decay
        )

    def _group(self, optimizer: int, expert: bool, decay: bool) -> dict:
        group = {"is_expert_parallel": expert, "default_config": True, "wd_mult": float(decay), "lr_mult": 1.0}
        group |= {"is_decoupled_lr": False, "max_lr": 0.01, "lr": 0.004, "weight_decay": 0.1 * decay}
        return group | ({"momentum_beta": 0.9} if optimizer == 0 else {"betas": (0.9, 0.99), "eps": 1e-8})

    def _ping_pong(self, flat: list, t: int, d: int, expert_d: int) -> None:
        """Deal names by size, back and forth; those of sharded experts to the ranks that hold the same ones."""

        def numel(name: str) -> int:
            return part_of(self.setup, name, self._truth_of(name)["weight"], t).numel()

        rings = {False: list(range(self.setup.dp)), True: list(range(self.setup.dp // self.setup.ep))}
        turns = {False: 0, True: 0}
        everyone = [(name, number) for number, (_, _, names) in enumerate(flat) for name in names]
        mine: list[list[str]] = [[] for _ in flat]
        for name, number in sorted(everyone, key=lambda entry: numel(entry[0])):
            expert = flat[number][1]["is_expert_parallel"]
            ring = [*rings[expert], *reversed(rings[expert])]
            if ring[turns[expert] % len(ring)] == (expert_d if expert else d):
                mine[number].append(name)
            turns[expert] += 1
        for number, names in enumerate(mine):
            flat[number][2][:] = names

    def _state_dict(self, entries: list, t: int) -> dict:
        setup, state, groups, masters, count = self.setup, {}, [], [], 0
        for optimizer, group, names in entries:
            groups.append(group | {"params": list(range(count, count + len(names)))})
            if optimizer != 0 and setup.fused_adam and names:
                groups[-1]["step"] = setup.iteration
            masters.append([])
            for name in names:
                parts = {k: part_of(setup, name, v, t) for k, v in self._truth_of(name).items() if k != "weight"}
                if "fp32" in parts:
                    masters[-1].append(parts.pop("fp32"))
                if optimizer != 0 and not setup.fused_adam:
                    parts = {"step": torch.tensor(float(setup.iteration)), **parts}
                state[count] = parts
                count += 1
        inner = {"state": state, "param_groups": groups}
        if setup.dtype == torch.float32 and setup.optimizer != "distributed":
            return inner
        return {"optimizer": inner, "fp32_from_fp16_params": masters}

    def _truth_of(self, name: str) -> dict[str, torch.Tensor]:
        if name == "output_layer.weight" and self.setup.tied:
            name = "embedding.word_embeddings.weight"
        return self.truth[name]

    # The distributed optimizer: the whole padded buffer is filled, then each bucket's end is cut off.

    def _buffers(self, chunks: list, t: int, p: int, d: int) -> dict | list:
        dense = self._buffers_of(chunks, t, p, experts=False) if d == 0 else None
        if self.setup.ep == 1:
            assert dense is not None
            return dense
        return [dense, self._buffers_of(chunks, t, p, experts=True)]

    def _buffers_of(self, chunks: list, t: int, p: int, *, experts: bool) -> dict:
        found: dict = {"buckets_coalesced": True}
        total = sum(part_of(self.setup, n, self.truth[n]["weight"], t).numel() for c in chunks for _, n in c)
        for v, chunk in enumerate(chunks):
            names = [(local, whole) for local, whole in chunk if is_sharded_expert(self.setup, whole) == experts]
            if names:
                buffer = self._buffer(names, t, self._bucket_size(total) if p == 0 and v == 0 else None, experts)
                found[v] = {(self.setup.dtype, torch.float32): buffer}
        return found

    def _bucket_size(self, total: int) -> int | None:
        arguments = self.arguments()
        if not arguments["overlap_grad_reduce"]:
            return None
        if arguments["ddp_num_buckets"] is not None:
            return total // arguments["ddp_num_buckets"]
        return arguments["ddp_bucket_size"] or max(40000000, 1000000 * self.setup.dp)

    def _buffer(self, names: list, t: int, bucket_size: int | None, experts: bool) -> dict:
        setup = self.setup
        divisor = math.lcm(setup.dp // setup.ep if experts else setup.dp, 128)
        shared = {"embedding.word_embeddings.weight", "output_layer.weight"} if setup.tied and setup.pp > 1 else set()
        where: list[tuple[str, int, int]] = []
        ends: list[tuple[int, int, int]] = []  # start, end without padding, end
        start = bucket = 0
        has = False

        def finish(end: int) -> int:
            nonlocal bucket, has
            padded = math.ceil(end / divisor) * divisor
            ends.append((bucket, end, padded))
            bucket, has = padded, False
            return padded

        end = 0
        for local, whole in reversed(names):
            start = math.ceil(start / 64) * 64
            if local in shared and has:
                start = finish(start)
            end = start + part_of(setup, whole, self.truth[whole]["weight"], t).numel()
            where.append((whole, start, end))
            has = True
            start = finish(end) if local in shared or (bucket_size and end - bucket >= bucket_size) else end
        if has:
            finish(end)
        found = {}
        for key, state in (("param", "fp32"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            flat = torch.full((ends[-1][2],), torch.nan)
            for whole, first, last in where:
                flat[first:last] = part_of(setup, whole, self.truth[whole][state], t).reshape(-1)
            found[key] = torch.cat([flat[first:last] for first, last, _ in ends])
        return found | {"numel_unpadded": sum(last - first for first, last, _ in ends)}
