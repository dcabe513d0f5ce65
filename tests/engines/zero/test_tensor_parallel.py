"""Tensor parallelism: shards of a matrix are one matrix, stepped as torch.optim.Muon steps it on one process."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import groups
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

from lwopt_backend.checkpoint.contents import CheckpointError
from lwopt_backend.checkpoint.deepspeed import zero
from lwopt_backend.integrations.deepspeed import engine as deepspeed_engine
from tests.support.cells import cells
from tests.support.command_line import succeeds
from tests.support.models import VOCABULARY
from tests.support.on_ranks import on_ranks
from tests.support.references import layer_wise
from tests.support.zero import PRECISIONS, ROWS, Beside, Reference, engine_for, settings_for, train_step

pytestmark = pytest.mark.on_gloo  # followed forwards communicate
SHARDS, WIDTH = 2, 24
MATRICES = ("up.weight", "down.weight", "mix.weight", "gated.weight", "out.weight")
FUSED = {"*gated.weight": {"gate_up": "halves"}}


class ModelParallel:
    """An mpu as Megatron's: neighbours share every layer."""

    def __init__(self, shards: int) -> None:
        count, rank = dist.get_world_size(), dist.get_rank()
        of_model = [dist.new_group([*range(first, first + shards)]) for first in range(0, count, shards)]
        of_data = [dist.new_group([*range(first, count, shards)]) for first in range(shards)]
        self.get_model_parallel_group = lambda: of_model[rank // shards]
        self.get_model_parallel_world_size = lambda: shards
        self.get_model_parallel_rank = lambda: rank % shards
        self.get_data_parallel_group = lambda: of_data[rank % shards]
        self.get_data_parallel_world_size = lambda: count // shards
        self.get_data_parallel_rank = lambda: rank // shards


class Summed(torch.autograd.Function):
    """Summed over the ranks that share a matrix, ``ahead`` or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, ahead: bool) -> Tensor:
        ctx.group = None if ahead else group
        return summed(x, group) if ahead else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad if ctx.group is None else summed(grad, ctx.group), None, None


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class Linear(nn.Module):
    """This rank's shard of a linear, cut in dimension ``dim`` of its weight, ``parts`` by parts."""

    def __init__(self, inputs: int, outputs: int, mpu: ModelParallel | None, dim: int, parts: int = 1) -> None:
        super().__init__()
        whole, self.dim, self.parts = nn.Linear(inputs, outputs), dim, parts
        self.weight, self.bias, self.group = whole.weight, whole.bias, None
        if mpu is not None:
            self.group, shards = mpu.get_model_parallel_group(), mpu.get_model_parallel_world_size()
            for param in (self.weight, *([self.bias] if dim == 0 else [])):
                mine = [p.chunk(shards, dim)[mpu.get_model_parallel_rank()] for p in param.data.chunk(parts, dim)]
                param.data = torch.cat(mine, dim).contiguous()
                param.tensor_model_parallel, param.partition_dim = True, dim

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return nn.functional.linear(x, self.weight, self.bias)
        if self.dim == 0:
            return nn.functional.linear(Summed.apply(x, self.group, False), self.weight, self.bias)
        return Summed.apply(nn.functional.linear(x, self.weight), self.group, True) + self.bias


class ShardedLM(nn.Module):
    """Linears cut by rows and by columns, a fused one whose every shard has gate and up, and a matrix on every rank."""

    def __init__(self, mpu: ModelParallel | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = Linear(WIDTH, 68, mpu, 0), Linear(68, WIDTH, mpu, 1)
        self.mix, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.gated, self.out = Linear(WIDTH, 56, mpu, 0, parts=2), Linear(28, WIDTH, mpu, 1)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.mix(self.down(torch.tanh(self.up(x))))
        gate, up = self.gated(self.norm(x)).chunk(2, -1)
        x = x + self.out(torch.sigmoid(gate) * up)
        return nn.functional.cross_entropy(self.lm_head(x).float().flatten(0, 1), targets.flatten())


@contextlib.contextmanager
def sharded_engine(settings: dict[str, Any], shards: int = SHARDS, frozen: float | None = None) -> Iterator[Any]:
    """Parameters of which there are all kinds of cuts are multiplied by ``frozen``, and not trained."""
    groups.mpu = None  # DeepSpeed keeps that of an engine before
    mpu = ModelParallel(shards) if shards > 1 else None
    model = ShardedLM(mpu)
    if frozen is not None:
        model.register_buffer("passes", torch.full((2,), frozen))
        for name in FROZEN:
            model.get_parameter(name).requires_grad_(False).data.mul_(frozen)
    with engine_for(settings, model, mpu=mpu) as engine:
        yield engine


class WithLoss(nn.Module):
    def __init__(self, config: Any, vocabulary: int = 38) -> None:
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 62, "num_hidden_layers": 1, "vocab_size": vocabulary}
        super().__init__(config(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(super().forward(tokens).logits.float().flatten(0, 1), targets.flatten())


class Llama(WithLoss, LlamaForCausalLM):
    pass


class TiedLlama(Llama):
    """AutoTP cuts its output head with the embedding, and takes the loss of parts of the logits itself."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return LlamaForCausalLM.forward(self, tokens, labels=targets).loss


class Phi3(WithLoss, Phi3ForCausalLM):
    """Its q, k and v are one weight, on every rank whole; gate and up are one, of which every rank has halves."""


# DeepSpeed refuses the plan that transformers has for it.
OF_PHI3 = [
    {"patterns": [r".*gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1], "partition_dim": 0},
    {"patterns": [r".*down_proj\.weight$"], "partition_type": "row"},
]
PARTS = {"qkv_proj.weight": [24, 12, 12], "gate_up_proj.weight": [62, 62]}


def settings_of(
    stage: int, precision: str = "fp32", how: tuple[int, float] = (1, 0.0), shards: int = SHARDS, **options: Any
) -> dict[str, Any]:
    accumulation, clip = how
    rows = ROWS // (dist.get_world_size() // shards)
    return settings_for("zero", stage, precision, rows=rows, accumulation=accumulation, clip=clip, **options)


class Sharded(NamedTuple):
    """Cut by an mpu. The fused weight is trained by Muon alone, and excluded beside other rules."""

    rule: str

    def settings(self, *how: Any, shards: int = SHARDS) -> dict[str, Any]:
        atoms = FUSED if shards > 1 or self.rule == "muon" else {}  # also how an excluded weight is cut
        settings = settings_of(*how, shards=shards, atoms=atoms)
        if self.rule != "muon":
            settings["optimizer"] = layer_wise(self.rule, exclude=["gated.weight"], atoms=atoms)
        return settings

    def engine(self, settings: dict[str, Any], shards: int = SHARDS) -> Any:
        return sharded_engine(settings, shards)

    def beside_torch(self, settings: dict[str, Any]) -> Beside:
        """One process, with gate and up as separate parameters."""
        if self.rule != "muon":
            matrices = [name for name in MATRICES if "gated" not in name]
            return Beside(Reference(ShardedLM(), self.rule, matrices=matrices), settings)
        halves: list[Callable[[Tensor], Tensor]] = [lambda tensor: tensor[:28], lambda tensor: tensor[28:]]
        return Beside(Reference(ShardedLM(), matrices=MATRICES, blocks={"gated.weight": halves}), settings)


class Trained(NamedTuple):
    """An architecture of transformers as AutoTP cuts it, and what DeepSpeed is to be told of it."""

    model: type[WithLoss]
    config: Callable[..., Any]
    cut: dict[str, Any] = {}

    def settings(self, *how: Any, shards: int = SHARDS) -> dict[str, Any]:
        return settings_of(*how, shards=shards)

    @contextlib.contextmanager
    def engine(self, settings: dict[str, Any], shards: int = SHARDS) -> Iterator[Any]:
        groups.mpu = None
        tensor_parallel = {"tensor_parallel": {"autotp_size": shards, **self.cut}} if shards > 1 else {}
        with engine_for(settings | tensor_parallel, self.model(self.config)) as engine:
            yield engine

    def beside_torch(self, settings: dict[str, Any]) -> Beside:
        single = self.model(self.config)
        matrices, blocks = [name for name, _ in single.named_parameters() if "_proj" in name], {}
        for name in matrices:
            if sizes := PARTS.get(".".join(name.split(".")[-2:])):
                blocks[name] = [lambda tensor, n=n, sizes=sizes: tensor.split(sizes)[n] for n in range(len(sizes))]
            if "gate_up" in name:
                single.get_submodule(name.rpartition(".")[0]).parts = 2
        return Beside(Reference(single, matrices=matrices, blocks=blocks), settings)


LLAMA = Trained(Llama, LlamaConfig)
TIED = Trained(TiedLlama, functools.partial(LlamaConfig, tie_word_embeddings=True))
PHI3 = Trained(Phi3, Phi3Config, {"partition_config": {"use_default_specs": False, "layer_specs": OF_PHI3}})
MUON, *OTHERS = map(Sharded, ("muon", "normuon", "adamuon", "soap", "shampoo", "a class"))


def there_is(of: Any, stage: int, precision: str = "fp32", how: tuple[int, float] = (1, 0.0), ranks: int = 2) -> bool:
    """Rules that keep more than momentum are tried on two ranks, as are Llama and Phi 3 in two precisions."""
    if of in OTHERS:
        return stage < 2 and (precision, how, ranks) == ("fp32", (1, 0.0), 2)
    known = precision in (("fp32", "bf16") if of != MUON else PRECISIONS)
    return known and (stage > 0 or precision in ("fp32", "autocast")) and (precision == "fp32" or not how[1])


@on_ranks()
@cells(
    there_is,
    lambda of, ranks, **_: ranks == 2 or of == MUON,  # what AutoTP cuts does not hang on who has the data
    of=[MUON, *OTHERS, LLAMA, PHI3],
    stage=[0, 1, 2],
    precision=["fp32", "bf16", "bf16+fp32", "fp16", "autocast"],
    how=[(1, 0.0), (2, 0.5)],
    ranks=[2, 4],
)
def test_tensor_parallel_equals_one_process_and_resumes(
    tmp_path: Path, of: Any, stage: int, precision: str, how: tuple[int, float]
) -> None:
    """Tensor-parallel shards have the bits of one process."""
    settings = of.settings(stage, precision, how)
    both = of.beside_torch(settings)
    if precision != "fp16":
        both.train_and_resume(lambda: of.engine(settings), tmp_path)
        return
    with of.engine(settings) as engine:
        both.start(engine)
        both.train(engine, range(2))
        both.check(engine)


@on_ranks(2)
@cells(lambda stage, how: stage > 0 or how == "fp32", stage=[0, 1, 2], how=["fp32", "bf16+fp32", "offload"])
def test_nonfinite_gradient_in_one_copy_is_known_to_all(stage: int, how: str) -> None:
    """A gradient that is not finite in a copy of one rank is known to all. The gradient is that of a vector that every
    rank has whole, on the rank whose copy the norm does not count."""
    settings = settings_of(stage, how if how in PRECISIONS else "fp32", atoms=FUSED)
    if how == "offload":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    with sharded_engine(settings) as engine:
        train_step(engine, 0)
        before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        bad = float("inf") if dist.get_rank() == 1 else 1.0
        hook = engine.module.norm.weight.register_hook(lambda grad: grad * bad)
        train_step(engine, 1)
        hook.remove()
        if stage == 0:  # DeepSpeed takes the step
            assert not math.isfinite(engine.get_global_grad_norm())
            return
        assert engine.skipped_steps == 1
        assert all(torch.equal(param, before[name]) for name, param in engine.module.named_parameters())
        train_step(engine, 2)
        assert engine.skipped_steps == 1 and math.isfinite(engine.get_global_grad_norm())


UNIVERSAL = {"checkpoint": {"load_universal": True}}
CUT_IN_FOUR, SHAMPOO = (MUON, OTHERS[2]), OTHERS[3]
WAY = [(2, 1), (4, 2), (1, 0), (2, 2), (1, 1), (4, 0), (2, 0), (4, 1), (1, 2)]  # shards and ZeRO's stage


@on_ranks()
@cells(
    None,
    lambda of, ranks: (ranks == 4) == (of in CUT_IN_FOUR),
    of=[*CUT_IN_FOUR, SHAMPOO, LLAMA, TIED, PHI3],
    ranks=[2, 4],
)
def test_universal_checkpoints_go_to_other_numbers_of_shards(tmp_path: Path, of: Sharded | Trained) -> None:
    """Every engine goes a step on from what the one before has saved."""
    both: Beside | None = None
    most = dist.get_world_size() if isinstance(of, Sharded) else SHARDS
    for step, (shards, stage) in enumerate(leg for leg in WAY if leg[0] <= most):
        settings = of.settings(stage, shards=shards)
        with of.engine(settings | UNIVERSAL, shards) as engine:
            if both is None:
                both = of.beside_torch(settings)
                both.start(engine)
            else:
                train_step(engine, 70)  # what it had before must not matter
                engine.load_checkpoint(tmp_path / f"universal {step}")
            both.train(engine, range(step, step + 1))
            both.check(engine)
            engine.save_checkpoint(tmp_path / f"native {step}")
        if dist.get_rank() == 0:
            succeeds("convert", tmp_path / f"native {step}", tmp_path / f"universal {step + 1}", "--to", "universal")
        dist.barrier()


FROZEN = ("up.bias", "down.weight", "gated.weight", "gated.bias", "norm.weight")


@on_ranks(2)
@cells(stage=[0, 1, 2], way=[(1, 2), (2, 1), (2, 2)])
def test_frozen_parameters_and_buffers_go_along(tmp_path: Path, stage: int, way: tuple[int, int]) -> None:
    source, target = (settings_of(stage, shards=n, atoms=FUSED if n > 1 else {}) for n in way)
    with sharded_engine(source, way[0], frozen=1.0) as engine:
        train_step(engine, 0)
        engine.save_checkpoint(tmp_path / "native")
    if dist.get_rank() == 0:
        succeeds("convert", tmp_path / "native", tmp_path / "universal", "--to", "universal")
    dist.barrier()
    with sharded_engine(target | UNIVERSAL, way[1], frozen=2.0) as engine:
        engine.load_checkpoint(tmp_path / "universal")
        mine = {name: param.detach() for name, param in engine.module.named_parameters()}
        found = MUON.beside_torch(source).whole(mine)
        assert all(torch.equal(found[name], ShardedLM().get_parameter(name)) for name in FROZEN)
        assert torch.equal(engine.module.passes, torch.ones(2))


@on_ranks(2)
def test_native_checkpoint_of_another_size_is_refused(tmp_path: Path) -> None:
    """A checkpoint without a rank's files is refused, too."""
    with sharded_engine(settings_of(1)) as engine:
        train_step(engine, 0)
        engine.save_checkpoint(tmp_path)
    refused = "expected 1 tensor-parallel ranks, found 2; load it on 2. A different number of ranks needs"
    with sharded_engine(settings_of(1, shards=1), 1) as engine, pytest.raises(ValueError, match=refused):
        engine.load_checkpoint(tmp_path)
    if dist.get_rank() == 0:  # a copy without the first rank's files
        for file in (tmp_path / "global_step1").glob("*mp_rank_00_*"):
            file.unlink()
        missing = "expected the files of 2 tensor-parallel ranks, as in mp_rank_01_model_states.pt, found 1"
        with pytest.raises(CheckpointError, match=missing):
            zero.read(tmp_path)


BITS = {torch.float8_e4m3fn: "u1", torch.bfloat16: "i2", torch.float32: "i4", torch.float64: "i8"}


@pytest.mark.parametrize("dtype", BITS)
def test_copies_are_compared_by_the_sum_of_their_bits(dtype: torch.dtype) -> None:
    """In any dtype and size."""
    param = torch.tensor([-1.5, 0.25, 3.0]).to(dtype)
    stored = np.array(param.view(torch.uint8).tolist(), np.uint8).view(BITS[dtype])
    assert deepspeed_engine._digest(param) == int(stored.sum(dtype=np.int64))


@on_ranks(2)
def test_routing_table_says_how_parameters_are_cut() -> None:
    """QK-clip refuses those that are cut."""
    refused = "'up.weight' is cut by tensor parallelism, which QK-clip does not support"
    with redirect_stdout(io.StringIO()) as said, sharded_engine(settings_of(1, atoms=FUSED, report=True)) as engine:
        with pytest.raises(ValueError, match=refused):
            engine.basic_optimizer.row_scaling.set({"up.weight": torch.ones(68)})
        engine.basic_optimizer.row_scaling.set({"mix.weight": torch.ones(WIDTH)})
    table = re.sub(r"[ \u2502\n]+", " ", said.getvalue())
    assert bool(table) == (dist.get_rank() == 0)
    rows = [
        "up.weight 68 x 24 matrix: muon 2-D weight; rows cut over 2 TP ranks",
        "down.weight 24 x 68 matrix: muon 2-D weight; columns cut over 2 TP ranks",
        "gated.weight 56 x 24 matrix: muon 2-D weight: gate, up, set by atoms '*gated.weight'; rows cut over 2",
        "mix.weight 24 x 24 matrix: muon 2-D weight 1",
    ]
    assert not table or [row for row in rows if row in table] == rows
