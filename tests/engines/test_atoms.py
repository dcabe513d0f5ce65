"""Matrices in a parameter are updated as if they were separate parameters, on every engine, bit for bit; and QK-clip
after a step equals multiplying the rows of heads by hand."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lwopt_backend import Heads, QKClip
from tests.support.cells import cells
from tests.support.engines import ENGINES, ZERO, Cell, running
from tests.support.fused import ATOMS, BLOCKS, HEADS, MATRICES, PER_HEAD, USED, FusedLM, HeadsLM, UsedLM
from tests.support.models import largest_difference
from tests.support.on_ranks import on_ranks
from tests.support.plain import exact_sums, shares
from tests.support.references import Reference

STEPS = 3
COUNT = 3 + 3 + 1 + 2 + 1 + 1 + 3 + 1 + 4 + 2 + 5  # of matrices in the model
BOUND = 100.0
LAYERS = {
    "fused": Heads("qkv.weight", "qkv.weight", heads=4, key_heads=4, query_bias="qkv.bias", key_bias="qkv.bias"),
    "grouped": Heads("grouped.weight", "grouped.weight", heads=2, key_heads=2),
    "apart": Heads("mix.weight", "out.weight", heads=6, key_heads=2, query_bias=None, key_bias="out.bias"),
    "transposed": Heads("gate_up.weight", "down.weight", heads=2, key_heads=2),
}


def logits(step: int) -> dict[str, Tensor]:
    """The logits of the layers that are clipped in a step; the first is not."""
    found = {
        "fused": torch.tensor([50.0, 150.0, 400.0, 90.0]) + step,
        "grouped": torch.tensor([250.0, 30.0]),
        "apart": torch.tensor([20.0, 300.0, 110.0, 30.0, 101.0, 99.0]),
        "transposed": torch.tensor([130.0, 120.0]),
    }
    return found if step else {}


@torch.no_grad()
def by_hand(model: Any, step: int) -> None:
    if not step:
        return
    given = {name: (BOUND / values.clamp(min=BOUND)) for name, values in logits(step).items()}
    half = given["fused"] ** 0.5
    for head in range(4):
        for tensor in (model.qkv.weight, model.qkv.bias):
            tensor[head * 6 : head * 6 + 6] *= half[head]
            tensor[24 + head * 2 : 24 + head * 2 + 2] *= half[head]
    for group, factor in enumerate(given["grouped"] ** 0.5):
        model.grouped.weight[group * 16 : group * 16 + 12] *= factor  # 8 rows of q and 4 of k
    for head, factor in enumerate(given["apart"]):  # keys are shared, so queries take all
        model.mix.weight[head * 4 : head * 4 + 4] *= factor
    for head, factor in enumerate(given["transposed"] ** 0.5):
        model.gate_up.weight[:, head * 23 : head * 23 + 23] *= factor
        model.down.weight[head * 12 : head * 12 + 12] *= factor


HOW: list[tuple[str, dict[str, Any]]] = [  # options, by the engines that have them
    *(("zero", {"bucket_numel": 1, "policy": policy}) for policy in ("auto", "stay", "balance")),
    ("owned", {}),
    *(("plain", {"layout": layout}) for layout in ("padded", "compact", "auto")),
    *(("fsdp2", {"sharding": sharding}) for sharding in ("rows", "columns", "hybrid")),
]


def there_is(ranks: int, engine: str, how: tuple[str, dict[str, Any]]) -> bool:
    kind, options = how
    sizes = (4,) if options.get("sharding") == "hybrid" else {"plain": (1, 2, 3, 4), "owned": (2,)}.get(kind, (2, 4))
    chooses = engine in ("zero 1", "zero 2")
    return engine.startswith(kind) and ranks in sizes and chooses == (options.get("policy", "auto") != "auto")


@cells(there_is, ranks=[1, 2, 3, 4], engine=ENGINES, how=HOW)
@on_ranks()
def test_fused_weights_and_qk_clip_on_every_engine(engine: str, how: tuple[str, dict[str, Any]]) -> None:
    """All ranks train on all rows. FSDP2 loses the hooks that make the sums of three ranks exact."""
    options, build = {"atoms": ATOMS, **how[1]}, FusedLM if engine == "fsdp2" else lambda: exact_sums(FusedLM())
    cell = Cell(engine, alike=True, sharding=options.pop("sharding", "rows"), options=options)
    single = Reference(build(), matrices=MATRICES, blocks=BLOCKS)
    with running(cell, build()) as run:
        optimizer = run.made.basic_optimizer if engine in ZERO else run.optimizer
        clip = QKClip(optimizer, LAYERS, BOUND)
        for step in range(STEPS):
            clip(logits(step))
            run.train(range(step, step + 1))
            single.step(shares(step, 1))
            by_hand(single.model, step)
        assert largest_difference(run.weights(), single.model) == 0.0
        if engine == "fsdp2":
            assert sum(len(stepper.plan.atoms) for stepper in optimizer._steppers) == COUNT
        elif engine in ZERO:
            assert_owners(optimizer._binding, options["policy"])
        elif options.get("layout", "padded") != "padded":
            pieces = [p for b in optimizer.core.manager.buckets for p in b.pieces]
            mine = sum(p.numel for p in pieces if optimizer.core.members[p.param].name == "turned.up")
            assert mine < single.model.turned.up.numel() or dist.get_world_size() == 1, "experts are shared out"


def assert_owners(binding: Any, policy: str) -> None:
    """All matrices travel. "balance" leaves equal experts where they are stored, "auto" deals them out."""
    (plan,) = (plan.matrices for plan in binding.plans if plan.matrices)
    owners = {atom.name: owner for atom, owner in zip(plan.atoms, plan.ownership.owners)}
    assert len(owners) == COUNT and len(plan.buckets) > (policy == "auto" or dist.get_world_size() == 4)
    some = {"qkv.weight.q", "gate_up.weight.up", "experts.up[2]", "conv.weight", "moe.w13[1].gate"}
    turned = {f"turned.up[{number}]" for number in range(5)}
    assert some | turned <= owners.keys() and len({*owners.values()}) > 1
    assert policy != "auto" or len({owners[name] for name in turned}) > 1
    reasons = {route.name: route.reason for route in binding.grouping.routes}
    assert reasons["turned.up"] == "5 stacked experts, stored transposed"


@cells(lambda ranks, engine: (ranks, engine) != (3, "fsdp2"), ranks=[1, 2, 3, 4], engine=ENGINES)
@on_ranks()
def test_per_head_on_every_engine_equals_one_process(engine: str) -> None:
    """Each is trained as a parameter of its own would be by torch.optim.Muon; o_proj is one matrix. FSDP2 as above."""
    build = HeadsLM if engine == "fsdp2" else lambda: exact_sums(HeadsLM())
    single = Reference(build(), matrices=(*HEADS, "grouped.o_proj.weight"), blocks=HEADS)
    with running(Cell(engine, alike=True, options=PER_HEAD), build()) as run:
        for step in range(STEPS):
            run.train(range(step, step + 1))
            single.step(shares(step, 1))
        assert largest_difference(run.weights(), single.model) == 0.0


@cells(lambda ranks, engine: (ranks, engine) != (3, "fsdp2"), ranks=[1, 2, 3, 4], engine=ENGINES)
@on_ranks()
def test_what_is_told_by_use_on_every_engine_equals_one_process(engine: str) -> None:
    """Modulation, gates, weights on the right, experts in two dimensions, kernels and convolutions. FSDP2 as above."""
    build = UsedLM if engine == "fsdp2" else lambda: exact_sums(UsedLM())
    others = ("attn.weight", "up.weight", "down.weight", "mix.weight")
    single = Reference(build(), matrices=(*USED, *others), blocks=USED)
    with running(Cell(engine, alike=True, options={"convolutions": "flatten", "atoms": {}}), build()) as run:
        for step in range(STEPS):
            run.train(range(step, step + 1))
            single.step(shares(step, 1))
        assert largest_difference(run.weights(), single.model) == 0.0
