"""What tests on FSDP2 share: the shardings and modes of the support table, and a twin on one process."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from tests.support.models import MATRICES, UnevenLM, batch, largest_difference, rounding
from tests.support.ranks import gathered
from tests.support.references import ADAMW, MUON, torchs
from tests.support.zero import ROWS

EVEN = (64, 40)  # hidden sizes that divide by 2 and 4
MATRIX_NAMES = set(MATRICES)
IGNORED = ("layers.2.weight", "gate.bias")


@dataclass
class Sharded:
    """A sharded model and how its ranks share a batch: this rank computes part ``part`` of ``parts``. ``options`` are
    those that its optimizer needs."""

    model: nn.Module
    parts: int
    part: int
    plain: tuple[str, ...] = ()  # names of parameters that FSDP2 ignores, whose gradients the test averages itself
    options: Mapping[str, Any] = field(default_factory=dict)


def by_rank(model: nn.Module, plain: tuple[str, ...] = ()) -> Sharded:
    return Sharded(model, dist.get_world_size(), dist.get_rank(), plain)


def shard_later(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """``fully_shard``, whose parameters take the places of those in the param groups, as Accelerate does it."""
    names = {id(param): name for name, param in model.named_parameters()}
    held = [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    fully_shard(model, mesh=mesh_of())
    sharded = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, held):
        group["params"] = [sharded[name] for name in of_group]


@functools.cache  # a mesh makes process groups, and ranks live as long as their file's tests
def mesh_of(*shape: int, names: tuple[str, ...] = ("dp",)) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),), mesh_dim_names=names)


def two_dims() -> tuple[int, int]:
    """The world as a square, or twice as long as high."""
    first = 2 ** (int(math.log2(dist.get_world_size())) // 2)
    return first, dist.get_world_size() // first


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.layers if any(True for _ in layer.parameters())]


def fsdp(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> None:
    for part in (*layers_of(model), model):
        fully_shard(part, mesh=mesh, **kwargs)


def shard_rows(model: nn.Module, **kwargs: Any) -> Sharded:
    """Shard(0): uneven rows, [1, N] on one rank, empty shards elsewhere."""
    fsdp(model, mesh_of(), **kwargs)
    return by_rank(model)


def shard_hybrid(model: nn.Module, **kwargs: Any) -> Sharded:
    """HSDP: 2 copies of shards over 2 ranks; on 32 ranks 4 over 8."""
    fsdp(model, mesh_of(*two_dims(), names=("replicate", "shard")), **kwargs)
    return by_rank(model)


def columns(param: Tensor) -> Shard | None:
    return Shard(1) if param.ndim > 1 and param.shape[1] % dist.get_world_size() == 0 else None


def shard_columns(model: nn.Module, **kwargs: Any) -> Sharded:
    """``shard_placement_fn`` with Shard(1) wherever columns divide, Shard(0) elsewhere."""
    return shard_rows(model, shard_placement_fn=columns, **kwargs)


def shard_tensor_parallel(model: nn.Module, **kwargs: Any) -> Sharded:
    """Tensor parallel 2 x FSDP: rectangles on a mesh of all ranks, and copies of other parameters on meshes of 2."""
    mesh = mesh_of(dist.get_world_size() // 2, 2, names=("dp", "tp"))
    first, second, *_ = (getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers_of(model))
    parallelize_module(first, mesh["tp"], ColwiseParallel())
    parallelize_module(second, mesh["tp"], RowwiseParallel())
    fsdp(model, mesh["dp"], **kwargs)
    return Sharded(model, mesh["dp"].size(), mesh.get_local_rank("dp"), options={"copies": "*"})


def shard_experts(model: nn.Module, **kwargs: Any) -> Sharded:
    """Expert parallel 2 on 4 ranks, or 4 on 16: layers.2 is another expert on every second, or fourth, rank, sharded
    over its own mesh."""
    mesh, expert = mesh_of(*two_dims(), names=("expert_dp", "expert")), model.layers[2]
    with torch.no_grad():
        for param in expert.parameters():
            param.add_(0.01 * mesh.get_local_rank("expert"))
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
    except ImportError:  # torch before 2.13: a mesh per module, not per parameter
        fully_shard(expert, mesh=mesh["expert_dp"], **kwargs)
    else:
        placement = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["expert_dp"], shard_mesh_dim=0))
        fully_shard(expert, mesh=mesh_of(), shard_placement_fn=lambda param: placement, **kwargs)
    for part in (*layers_of(model), model):
        if part is not expert:
            fully_shard(part, mesh=mesh_of(), **kwargs)
    return by_rank(model)


def shard_roots(model: nn.Module, **kwargs: Any) -> Sharded:
    """Four roots side by side and nothing around them; FSDP2 unties weights that two of them share."""
    for part in (model.embedding, model.layers, model.gate, model.lm_head):
        fully_shard(part, mesh=mesh_of(), **kwargs)
    return by_rank(model)


def shard_ignoring(model: nn.Module, **kwargs: Any) -> Sharded:
    """``ignored_params``: a matrix and a bias stay plain tensors."""
    ignored = {param for name, param in named(model) if name in IGNORED}
    if "mp_policy" in kwargs:  # FSDP2 casts what it holds only
        for param in ignored:
            param.data = param.data.to(kwargs["mp_policy"].param_dtype)
    fully_shard(model, mesh=mesh_of(), ignored_params=ignored, **kwargs)
    return by_rank(model, IGNORED)


def shard_full_mesh(model: nn.Module, **kwargs: Any) -> Sharded:
    """``dp_mesh_dims``: every parameter is a DTensor on the full mesh, 2 x TP 2, and so are the activations."""
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = mesh_of(2, 2, names=("dp", "tp"))
    first, second, *_ = (getattr(layer, "_checkpoint_wrapped_module", layer) for layer in layers_of(model))
    cuts = {first.weight: Shard(0), first.bias: Shard(0), second.weight: Shard(1)}
    placed = {
        param: nn.Parameter(
            distribute_tensor(param.detach(), mesh, [Replicate(), cuts.get(param, Replicate())], src_data_rank=None),
            param.requires_grad,
        )
        for param in model.parameters()
    }
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, placed[param])
    rows = (Shard(0), Replicate())
    model.register_forward_pre_hook(lambda _, inputs: tuple(DTensor.from_local(x, mesh, rows) for x in inputs))
    model.register_forward_hook(lambda _, inputs, loss: 2 * loss.full_tensor())  # FSDP2 takes the mean of both
    fsdp(model, mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"), **kwargs)
    return Sharded(model, 2, mesh.get_local_rank("dp"))


SHARDINGS: dict[str, Callable[..., Sharded]] = {
    "rows": shard_rows,
    "hybrid": shard_hybrid,
    "columns": shard_columns,
    "tensor parallel": shard_tensor_parallel,
    "expert parallel": shard_experts,
    "several roots": shard_roots,
    "ignored_params": shard_ignoring,
}
if "dp_mesh_dims" in inspect.signature(fully_shard).parameters:  # torch 2.13 has it
    SHARDINGS["full mesh"] = shard_full_mesh
EVEN_ONLY = ("columns", "tensor parallel", "full mesh")
MODES = (
    "fp32",
    "mixed precision",
    "bf16 parameters",
    "CPU offload",
    "accumulation",
    "activation checkpointing",
    "meta device",
    "frozen",
    "tied",
    "no gradient",
    "clipping",
)


def new_model(sharding: str, mode: str) -> UnevenLM:
    model = UnevenLM(hidden=EVEN if sharding in EVEN_ONLY else (63, 41), tied=mode == "tied")
    if mode == "frozen":
        model.layers[5].weight.requires_grad_(False)
        model.layers[0].bias.requires_grad_(False)
    if mode == "bf16 parameters":
        model.to(torch.bfloat16)
    return model


def shard(sharding: str, mode: str) -> Sharded:
    """The model of ``new_model``, sharded and in the mode's policies."""
    kwargs: dict[str, Any] = {}
    if mode == "mixed precision":
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if mode == "CPU offload":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = new_model(sharding, mode)
    if mode == "activation checkpointing":
        for index in (0, 2, 5):
            model.layers[index] = checkpoint_wrapper(model.layers[index])
    if mode != "meta device":
        return SHARDINGS[sharding](model, **kwargs)
    weights = weights_of(model)
    sharded = SHARDINGS[sharding](model.to("meta"))
    sharded.model.to_empty(device="cpu")
    set_weights(sharded.model, weights)
    return sharded


@torch.no_grad()
def set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    for name, param in named(model):
        if name in weights and isinstance(param, DTensor):
            param.to_local().copy_(distribute_like(weights[name], param))
        elif name in weights:
            param.copy_(weights[name])


def distribute_like(full: Tensor, param: DTensor) -> Tensor:
    """This rank's part of a whole tensor, cut as ``param`` is; by torch's own function, not by this package's."""
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return full[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape))]


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor().clone() if isinstance(tensor, DTensor) else tensor.clone()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in named(model)}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param.grad) for name, param in named(model) if param.grad is not None}


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names as they were before activation checkpointing wrapped the layers."""
    return [(name.replace("_checkpoint_wrapped_module.", ""), param) for name, param in model.named_parameters()]


class Twin:
    """The same parameters whole on this process, stepped by torch.optim.Muon and torch.optim.AdamW."""

    def __init__(self, model: nn.Module) -> None:
        self.params = {name: nn.Parameter(whole(param)) for name, param in named(model) if param.requires_grad}
        self.optimizers = torchs(self.params, MATRIX_NAMES)

    def step_with_gradients_of(self, model: nn.Module) -> None:
        """One step from the reduced gradients of the sharded model."""
        grads = gradients_of(model)
        for name, param in self.params.items():
            param.grad = grads.get(name)
        for optimizer in self.optimizers:
            optimizer.step()

    def difference(self, model: nn.Module) -> float:
        return largest_difference(weights_of(model), self.params)


def layer_wise(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    """Our optimizer with the hyperparameters of ``Twin``."""
    settings = {"matrix": "muon", **MUON, "elementwise": {"name": "adamw", **ADAMW}, "report": False, **options}
    return LayerWiseOptimizer(model, **settings)


class BesideTwin:
    """A sharded model under our optimizer, with ``options``, and its twin, given the same reduced gradients."""

    def __init__(
        self,
        sharding: str = "rows",
        mode: str = "fp32",
        *,
        sharded: Sharded | None = None,
        **options: Any,
    ) -> None:
        self.sharding, self.mode = sharding, mode
        self.sharded = sharded or shard(sharding, mode)
        self.model = self.sharded.model
        self.optimizer, self.twin = layer_wise(self.model, **{**self.sharded.options, **options}), Twin(self.model)

    def param(self, name: str) -> nn.Parameter:
        return dict(named(self.model))[name]

    def backward(self, step: int) -> None:
        backward(self.sharded, step, self.mode)

    def check_gradients(self, step: int) -> None:
        """What ``backward`` has left is the mean of what each rank's rows give a plain model with the twin's weights,
        within rounding, in parts of the norm of what a gradient is the sum of. In fp32 tensor parallelism adds up the
        widest layer in another order; 16-bit gradients are rounded as ranks add them up. An expert's is the mean over
        the ranks that have it."""
        in_16_bits = self.mode in ("mixed precision", "bf16 parameters")
        limit = rounding(dist.get_world_size(), torch.bfloat16) if in_16_bits else rounding(max(EVEN))
        untied = (self.sharding, self.mode) == ("several roots", "tied")  # by FSDP2
        plain = new_model(self.sharding, "fp32" if untied else self.mode)
        if self.mode == "mixed precision":
            plain.to(torch.bfloat16)
        set_weights(plain, self.twin.params)
        alike = Sharded(plain, self.sharded.parts, self.sharded.part)
        backward(alike, step, self.mode)
        everyone, found = gathered((gradients_of(plain), summands(alike, step))), gradients_of(self.model)
        assert found.keys() == everyone[0][0].keys()
        along = whole = 0.0  # of all gradients together the rounding averages out, a wrong factor does not
        for name, grad in found.items():
            of_expert = self.sharding == "expert parallel" and name.startswith("layers.2.")
            of_ranks = everyone[dist.get_rank() % 2 :: 2] if of_expert else everyone
            expected = torch.stack([grads[name] for grads, _ in of_ranks]).mean(0).double()
            magnitude = torch.stack([summed[name] for _, summed in of_ranks]).mean(0)
            difference = (grad - expected).norm() / magnitude.norm()
            assert difference <= limit, name
            along += float((grad * expected).sum())
            whole += float(expected.square().sum())
        assert abs(along / whole - 1) <= limit / 4, along / whole

    def update(self) -> None:
        self.twin.step_with_gradients_of(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.backward(step)
            self.update()

    def check(self, limit: float = 0.0) -> None:
        self.optimizer.synchronize()
        assert (difference := self.twin.difference(self.model)) <= limit, difference

    def check_momentum(self) -> None:
        """Also of copies that other ranks step."""
        for name, param in named(self.model):
            if theirs := self.twin.optimizers[0].state.get(self.twin.params.get(name)):
                ours = whole(self.optimizer.state[param]["momentum_buffer"])
                assert torch.equal(ours, theirs["momentum_buffer"]), name


def rows_of(sharded: Sharded, step: int) -> list[Tensor]:
    """This rank's part of a global batch."""
    return [tensor[sharded.part :: sharded.parts] for tensor in batch(step, max(ROWS, sharded.parts))]


def summands(sharded: Sharded, step: int) -> dict[str, Tensor]:
    """The magnitude of what each gradient of this rank's rows is the sum of: the mean of what every token alone gives,
    without its sign. Rounding is in proportion to it, however much of it cancels."""
    wide = {name: param.detach().double() for name, param in sharded.model.named_parameters()}

    def loss(params: dict[str, Tensor], token: Tensor, target: Tensor) -> Any:
        return torch.func.functional_call(sharded.model, params, (token.view(1, 1), target.view(1, 1)))

    of_tokens = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
    tokens, targets = rows_of(sharded, step)
    return {name: grads.abs().mean(0) for name, grads in of_tokens(wide, tokens.flatten(), targets.flatten()).items()}


def backward(sharded: Sharded, step: int, mode: str = "fp32") -> float:
    """The gradients of one global batch, this rank computing its part; its loss."""
    model, rows = sharded.model, rows_of(sharded, step)
    half = len(rows[0]) // 2
    micro = [slice(half), slice(half, None)] if "accumulation" in mode else [slice(None)]
    total = 0.0
    for number, chosen in enumerate(micro):
        set_sync(model, number == len(micro) - 1)
        loss = model(*(tensor[chosen] for tensor in rows)) / len(micro)
        loss.backward()
        total += loss.item()
    set_sync(model, True)
    for name, param in named(model):
        if name in sharded.plain and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    return total


def set_sync(model: nn.Module, wanted: bool) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(wanted, recurse=False)
