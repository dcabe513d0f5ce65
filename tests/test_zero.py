"""Training under DeepSpeed as people write it equals torch.optim.Muon and AdamW on one process, bit for bit."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils.logging import logger
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lwopt_backend.integrations.deepspeed_zero import LayerWiseMuon
from lwopt_backend.plan import MACHINES
from lwopt_backend.plan.build import modelled_time
from lwopt_backend.runtime.stepper import MatrixStepper
from tests.engines import ExactLM
from tests.models import MATRICES, VOCABULARY, UnevenLM
from tests.ranks import RankPool, kept_in_a_world
from tests.zero import (
    ADAMW,
    BF16,
    MUON,
    OWN_ROWS,
    ROWS,
    Reference,
    batch_shares,
    build,
    config,
    engine_for,
    full_weights,
    largest_difference,
    newton_schulz_in_float32,
    own_rows,
    settings_for,
    train,
    trained,
)

STEPS = 3
STORED = [("zero", 0), ("zero", 1), ("zero", 2), ("zero", 3), ("owned", 0), ("owned", 1), ("owned", 2)]
each_stored = pytest.mark.parametrize(("storage", "stage"), STORED)


def settings_of(storage: str, stage: int, accumulation: int = 1, **params: Any) -> dict[str, Any]:
    rows = OWN_ROWS // torch.distributed.get_world_size()
    return settings_for(storage, stage, rows=rows, accumulation=accumulation, **params)


def train_on_own(engine: Any, steps: int | range) -> None:
    for step in range(steps) if isinstance(steps, int) else steps:
        for rows in own_rows(step, engine.gradient_accumulation_steps()):
            engine.backward(engine(*rows))
            engine.step()


@kept_in_a_world
def on_one_process(parts: int) -> nn.Module:
    single = Reference(ExactLM())
    single.train_on_all(STEPS, parts=parts)
    return single.model


def planned_state(stage: int, options: dict[str, Any]) -> list[int]:
    """How many bytes of optimizer state this rank has, and how many the plans say."""
    settings = settings_for("zero", stage)
    settings["zero_optimization"] |= options
    with engine_for(settings) as engine:
        train(engine, 1, same_rows=True)
        optimizer = engine.basic_optimizer
        planned = sum(plan.state_bytes[torch.distributed.get_rank()] for plan in optimizer._binding.plans)
        return [planned, sum(t.nbytes for state in optimizer.state.values() for t in state.values())]


@pytest.mark.parametrize(
    ("stage", "options"),
    [(0, {}), (1, {}), (2, {"parameter_alignment": True}), (3, {}), (3, {"sub_group_size": 1000})],
    ids=str,
)
def test_the_state_is_as_large_as_planned(ranks: RankPool, stage: int, options: dict[str, Any]) -> None:
    for planned, found in ranks.run(planned_state, stage, options):
        assert planned == found > 0


def differ_with_settings(stage: int, changes: dict[str, Any]) -> float:
    with engine_for(settings_of("owned", stage, 2) | changes, ExactLM()) as engine:
        train_on_own(engine, STEPS)
        return largest_difference(full_weights(engine), on_one_process(2))


@pytest.mark.parametrize(
    ("stage", "changes"),
    [
        (stage, changes)
        for stage in (0, 2)
        for changes in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2})
    ]
    + [(stage, {"zero_optimization": {"stage": stage, "overlap_comm": False}}) for stage in (0, 1, 2)],
    ids=str,
)
def test_owned_gradients_divided_before_their_sum_or_reduced_after_backward_are_the_same(
    ranks: RankPool, stage: int, changes: dict[str, Any]
) -> None:
    """Halves are exact in fp32."""
    assert ranks.run(differ_with_settings, stage, changes) == [0.0, 0.0]


# Loops


def snapshot(engine: Any) -> list[Tensor]:
    states = [tensor for state in engine.basic_optimizer.state.values() for tensor in state.values()]
    return [tensor.clone() for tensor in (*full_weights(engine).values(), *states)]


def evaluate(engine: Any, first: Any, second: Any) -> None:
    """After every micro-batch, the last of which took a step: nothing may change."""
    for rows in (first, second):
        engine.backward(engine(*rows))
        engine.step()
        before = snapshot(engine)
        engine.eval()
        with torch.no_grad():
            engine(*first)
        engine.train()
        assert all(torch.equal(old, new) for old, new in zip(before, snapshot(engine), strict=True))


def call_backward_of_the_loss(engine: Any, first: Any, second: Any) -> None:
    for rows in (first, second):
        engine(*rows).backward()  # DeepSpeed divides by the accumulation steps
        engine.step()


def accumulate_unmanaged(engine: Any, first: Any, second: Any) -> None:
    for rows in (first, second):
        engine.backward(engine(*rows) / 2)
    engine.step()


def accumulate_without_sync(engine: Any, first: Any, second: Any) -> None:
    with engine.no_sync():
        engine.backward(engine(*first) / 2)
    engine.backward(engine(*second) / 2)
    engine.step()


def compile_eagerly(engine: Any, first: Any, second: Any) -> None:
    if not engine.is_compiled:
        engine.compile(backend="eager")
    for rows in (first, second):
        engine.backward(engine(*rows))
        engine.step()
    assert engine.is_compiled


AT_ONCE = {"gradient_accumulation_steps": 1}
LOOPS = {
    "eval": (evaluate, {}),
    "loss.backward": (call_backward_of_the_loss, {}),
    "unmanaged": (accumulate_unmanaged, {**AT_ONCE, "managed_gradient_accumulation": False}),
    "no_sync": (accumulate_without_sync, AT_ONCE),
    "compiled": (compile_eagerly, {}),
}


def differ_in_loop(storage: str, stage: int, name: str) -> float:
    loop, changes = LOOPS[name]
    with engine_for(settings_of(storage, stage, 2) | changes, ExactLM()) as engine:
        for step in range(STEPS):
            loop(engine, *own_rows(step, 2))
        return largest_difference(full_weights(engine), on_one_process(2))


NO_SYNC = "no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage"
BY_DEEPSPEED = {
    ("zero", 0, "loss.backward"): "Direct calls to tensor.backward() are not supported in this configuration",
    ("zero", 2, "no_sync"): f"{NO_SYNC} 2",
    ("zero", 3, "no_sync"): f"{NO_SYNC} 3",
    ("owned", 2, "no_sync"): f"{NO_SYNC} 2",
}


@each_stored
@pytest.mark.parametrize("loop", ["eval", "loss.backward", "unmanaged", "no_sync"])
def test_training_loops_equal_a_single_process(ranks: RankPool, storage: str, stage: int, loop: str) -> None:
    message = BY_DEEPSPEED.get((storage, stage, loop))
    if message is not None:
        assert all(message in error for error in ranks.errors(differ_in_loop, storage, stage, loop))
    else:
        assert ranks.run(differ_in_loop, storage, stage, loop) == [0.0, 0.0]


@pytest.mark.full  # it imports the compiler
def test_a_compiled_engine(ranks: RankPool) -> None:
    assert ranks.run(differ_in_loop, "owned", 2, "compiled") == [0.0, 0.0]


# Models


class Variant(ExactLM):
    """The same model with a tied head, frozen layers, parameters of no elements, recomputed activations, or with layers
    that are run twice and one that is not run, but may be ``touched``, which makes its gradient zero."""

    def __init__(self, kind: str, *, touched: bool = False) -> None:
        super().__init__(tied=kind == "tied")
        self.kind, self.touched = kind, touched
        if kind == "frozen":
            for module in (self.embedding, self.layers[2]):
                module.requires_grad_(False)
        if kind == "zero-size":
            self.down, self.up = nn.Parameter(torch.zeros(24, 0)), nn.Parameter(torch.zeros(0, 24))
            self.nothing = nn.Parameter(torch.zeros(0))
        if kind == "twice and never":
            self.unused = nn.Linear(24, 24, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.kind == "zero-size":
            x = x + x @ self.down @ self.up + self.nothing.sum()
        if self.touched:
            x = x + 0.0 * self.unused.weight.sum()
        x = x + self.inner(x) * self.gated(x)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    def inner(self, x: Tensor) -> Tensor:
        if self.kind == "recomputed by DeepSpeed":
            if not deepspeed.checkpointing.is_configured():
                deepspeed.checkpointing.configure(None)
            return deepspeed.checkpointing.checkpoint(self.layers, x)
        if self.kind.startswith("recomputed"):
            return checkpoint(self.layers, x, use_reentrant=self.kind == "recomputed, reentrant")
        return self.layers(self.layers(x)) if "twice" in self.kind else self.layers(x)


def differ_with_variant(storage: str, stage: int, kind: str) -> tuple[float, list[str]]:
    """ZeRO counts a missing gradient as zero, with weight decay."""
    extra = ("unused.weight",) if "never" in kind else ()
    touched = storage == "zero" and bool(extra)
    single = Reference(Variant(kind, touched=touched), matrices=(*MATRICES, *extra))
    frozen = {name: p.clone() for name, p in single.model.named_parameters() if not p.requires_grad}
    with engine_for(settings_of(storage, stage), Variant(kind)) as engine:
        train_on_own(engine, STEPS)
        single.train_on_all(STEPS)
        ours = {}
        for name, param in engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([param], enabled=stage == 3):
                ours[name] = param.detach().clone()
        owned = storage == "owned"
        grouping = (engine.basic_optimizer._owned if owned else engine.basic_optimizer._binding).grouping
    difference = 0.0
    for name, param in single.model.named_parameters():
        assert ours[name].shape == param.shape
        assert name not in frozen or torch.equal(ours[name], frozen[name])
        difference = max([difference, *(ours[name] - param.detach()).abs().flatten().tolist()])
    return difference, [route.name for route in grouping.routes if route.kind == "matrix"]


KINDS = ("tied", "frozen", "zero-size", "recomputed", "recomputed, reentrant", "recomputed by DeepSpeed")


@pytest.mark.parametrize(
    ("storage", "stage", "kind"),
    [
        *(("zero", stage, kind) for kind in KINDS for stage in range(4)),
        ("zero", 2, "twice and never"),
        *(("owned", stage, kind) for kind in ("recomputed, reentrant", "twice and never") for stage in range(3)),
    ],
)
def test_models_equal_a_single_process(ranks: RankPool, storage: str, stage: int, kind: str) -> None:
    if (stage, kind) == (3, "zero-size"):  # ZeRO-3 takes what it never gathers for what it has not gathered yet
        for error in ranks.errors(differ_with_variant, storage, stage, kind):
            assert "have no elements, which ZeRO-3 cannot gather" in error
        return
    matrices = [name for name in MATRICES if kind != "frozen" or name != "layers.2.weight"]
    if "never" in kind:
        matrices.insert(matrices.index("gate.weight") + 1, "unused.weight")
    for difference, routed in ranks.run(differ_with_variant, storage, stage, kind):
        assert difference == 0.0
        assert routed == matrices


def differ_under_zero_init() -> tuple[set[torch.Size], float, float, list[str]]:
    """Parameters are empty when the engine sees them; what is gathered to be read is what was trained."""
    settings = config(3, rows=ROWS)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = UnevenLM()
    shapes = {param.shape for param in model.parameters()}
    with engine_for(settings, model) as engine:
        train(engine, STEPS, same_rows=True)
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            read = {name: param.detach().clone() for name, param in model.named_parameters()}
        routes = engine.basic_optimizer._binding.grouping.routes
        differences = [largest_difference(weights, trained(STEPS).model) for weights in (full_weights(engine), read)]
        return shapes, *differences, [route.name for route in routes if route.kind == "matrix"]


def test_parameters_made_under_zero_init(ranks: RankPool) -> None:
    for found in ranks.run(differ_under_zero_init):
        assert found == ({torch.Size([0])}, 0.0, 0.0, list(MATRICES))


class Forked(UnevenLM):
    """Two ways of one shape, of which a rank takes one. ``touching`` the other gives it a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.ways = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))

    def forward(self, tokens: Tensor, targets: Tensor, way: int, touching: bool) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.ways[way](x)
        x = x + self.layers(x) * self.gated(x)
        loss = nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())
        return loss + 0.0 * sum(p.sum() for p in self.ways[1 - way].parameters()) if touching else loss


def differ_when_ranks_go_other_ways(stage: int, touching: bool, optimizer: str) -> float:
    settings = config(stage, rows=ROWS // 2, ns_dtype="float32")
    single = Reference(Forked(), matrices=(*MATRICES, "ways.0.weight", "ways.1.weight"))
    if optimizer == "AdamW":
        settings["optimizer"] = {"type": optimizer, "params": {**ADAMW, "torch_adam": True}}
        single.muon = torch.optim.AdamW(single.muon.param_groups[0]["params"], **ADAMW)
    with newton_schulz_in_float32(), engine_for(settings, Forked()) as engine:
        for step in range(STEPS):
            shares = batch_shares(step, 2)
            engine.backward(engine(*shares[torch.distributed.get_rank()], torch.distributed.get_rank(), touching))
            engine.step()
            for way, rows in enumerate(shares):
                (single.model(*rows, way, touching) / 2).backward()
            single.step()
        return largest_difference(full_weights(engine), single.model)


@pytest.mark.parametrize(("stage", "touching"), [(0, False), (1, True)])
def test_a_rank_counts_with_a_zero_gradient_for_what_it_does_not_use(
    ranks: RankPool, stage: int, touching: bool
) -> None:
    assert max(ranks.run(differ_when_ranks_go_other_ways, stage, touching, "LayerWiseMuon")) <= 1e-6


@pytest.mark.parametrize(
    ("stage", "touching", "optimizer"),
    [(1, False, "LayerWiseMuon"), (2, True, "LayerWiseMuon"), (2, False, "AdamW"), (1, False, "AdamW")],
)
def test_zero_mixes_up_gradients_of_ranks_that_go_other_ways(
    ranks: RankPool, stage: int, touching: bool, optimizer: str
) -> None:
    """DeepSpeed adds up buckets in the order in which each rank filled its own, with any optimizer, and says nothing.

    Should this fail, DeepSpeed has learnt better, and the documentation must.
    """
    assert min(ranks.run(differ_when_ranks_go_other_ways, stage, touching, optimizer)) > 1e-3


# Param groups and options of AdamW


def differ_with_amsgrad() -> tuple[float, set[str]]:
    with engine_for(config(2, rows=ROWS, adamw={**ADAMW, "amsgrad": True})) as engine:
        train(engine, STEPS, same_rows=True)
        states = engine.basic_optimizer.state.values()
        difference = largest_difference(full_weights(engine), trained(STEPS, amsgrad=True).model)
        return difference, {key for state in states for key in state}


def test_every_option_of_adamw_is_torchs(ranks: RankPool) -> None:
    for difference, keys in ranks.run(differ_with_amsgrad):
        assert difference == 0.0 and "max_exp_avg_sq" in keys


def differ_with_own_groups() -> tuple[float, list[dict[str, Any]], list[int]]:
    """Three param groups with their own rates and decays, one so small that a rank stores none of it."""
    model, single = UnevenLM(), UnevenLM()
    gate = model.gate.weight
    decayed = [p for p in model.parameters() if p.ndim == 2 and p is not gate]
    groups = [
        {"params": decayed, "weight_decay": 0.2, "lr": 0.01},
        {"params": [p for p in model.parameters() if p.ndim != 2], "weight_decay": 0.0},
        {"params": [gate], "lr": 0.005, "adamw": {"lr": 1e-4}},
    ]
    theirs = dict(single.named_parameters())
    outer = [theirs[name] for name in ("embedding.weight", "lm_head.weight")]
    optimizers = [
        torch.optim.Muon([theirs[name] for name in MATRICES[:3]], lr=0.01, weight_decay=0.2),
        torch.optim.AdamW(outer, **{**ADAMW, "lr": 0.01, "weight_decay": 0.2}),
        torch.optim.AdamW([p for p in theirs.values() if p.ndim != 2], **{**ADAMW, "weight_decay": 0.0}),
        torch.optim.Muon([theirs["gate.weight"]], lr=0.005, weight_decay=MUON["weight_decay"]),
    ]
    with engine_for(config(2, rows=ROWS), model, model_parameters=groups) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            single(*batch_shares(step, 1)[0]).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        kept = [{k: g[k] for k in ("rule", "lr", "weight_decay")} for g in engine.optimizer.param_groups]
        layout = engine.basic_optimizer._binding.plans[-1].layout
        stored = [layout.stored_numel(rank) for rank in range(layout.world_size)]
        return largest_difference(full_weights(engine), single), kept, stored


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_param_groups_keep_their_own_lr_and_weight_decay(ranks: RankPool) -> None:
    for difference, kept, stored in ranks.run(differ_with_own_groups):
        assert kept == [
            {"rule": "muon", "lr": 0.01, "weight_decay": 0.2},
            {"rule": "adamw", "lr": 0.01, "weight_decay": 0.2},
            {"rule": "adamw", "lr": 3e-3, "weight_decay": 0.0},
            {"rule": "muon", "lr": 0.005, "weight_decay": 0.1},
        ]
        assert difference == 0.0
        assert sum(stored) == 10
        assert len(stored) == 2 or min(stored) == 0, "one of four ranks must store nothing to be tested"


# Matrices that are not stored as one (outputs, inputs) parameter each


EXPERTS = 5


class OddlyStored(nn.Module):
    """An embedding, a linear and a stack of experts that are stored as (inputs, outputs), and a head.

    Fused weights, experts as (outputs, inputs) and convolutions are in tests/test_atoms_on_engines.py.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.wide = Conv1D(31, 12)
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.randn(EXPERTS, 31, 12) / 31**0.5)
        self.experts.is_transposed = True
        self.lm_head = nn.Linear(12, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + (torch.tanh(self.wide(x)).unsqueeze(-3) @ self.experts.weight).mean(-3)
        return nn.functional.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


MATRICES_OF_IT = ("wide.weight", "experts.weight")


def slices_of(whole: Tensor) -> list[Tensor]:
    """Every matrix of a parameter as (outputs, inputs), a tensor of its own."""
    return [part.T.contiguous().clone() for part in whole.detach().reshape(-1, *whole.shape[-2:])]


def differ_from_slices(stage: int, policy: str) -> tuple[float, dict[str, str], list[Any]]:
    """The reference has a parameter for every slice; also why these are matrices, and who owns them."""
    single = OddlyStored()
    named = dict(single.named_parameters())
    slices = {name: [nn.Parameter(part) for part in slices_of(named[name])] for name in MATRICES_OF_IT}
    muon = torch.optim.Muon([own for parts in slices.values() for own in parts], **MUON)
    adamw = torch.optim.AdamW([p for name, p in named.items() if name not in MATRICES_OF_IT], **ADAMW)
    with engine_for(config(stage, rows=ROWS, policy=policy, bucket_numel=1500), OddlyStored()) as engine:
        train(engine, STEPS, same_rows=True)
        for step in range(STEPS):
            single(*batch_shares(step, 1)[0]).backward()
            for name, parts in slices.items():
                for own, grad in zip(parts, slices_of(named[name].grad)):
                    own.grad = grad
            muon.step()
            adamw.step()
            for name, parts in slices.items():
                named[name].data.copy_(torch.stack([own.detach().T for own in parts]).view(named[name].shape))
            single.zero_grad()
        binding = engine.basic_optimizer._binding
        plan = next(plan for plan in binding.plans if plan.rule == "muon")
        owners = [(atom.name, owner) for atom, owner in zip(plan.matrices.atoms, plan.matrices.ownership.owners)]
        reasons = {route.name: route.reason for route in binding.grouping.routes if route.kind == "matrix"}
        return largest_difference(full_weights(engine), single), reasons, owners


@pytest.mark.parametrize(("stage", "policy"), [(0, "balance"), (1, "balance"), (2, "stay"), (3, "auto")])
def test_every_slice_is_a_matrix_of_outputs_by_inputs_with_an_owner(ranks: RankPool, stage: int, policy: str) -> None:
    for difference, reasons, owners in ranks.run(differ_from_slices, stage, policy):
        assert difference == 0.0
        stored = "stored transposed"
        assert reasons == {"wide.weight": f"2-D weight, {stored}", "experts.weight": f"5 stacked experts, {stored}"}
        of_experts = {name: owner for name, owner in owners if "experts" in name}
        assert list(of_experts) == [f"experts.weight[{number}]" for number in range(EXPERTS)]
        assert policy == "stay" or set(of_experts.values()) == {0, 1}


# Offloading


CPU = {"device": "cpu"}


def differ_from_no_offload(
    folder: str, stage: int, offload: dict[str, Any], changes: dict[str, Any]
) -> tuple[bool, float, set[str], bool]:
    """Whether weights are equal, the norms' ratio, where states are, and whether a resumed run is equal."""
    # At stage 3 DeepSpeed adds up the norm of offloaded gradients in another order, so a clip would round otherwise.
    settings = config(stage, rows=ROWS // 4, accumulation=2, clip=0.0 if stage == 3 else 0.5) | changes
    with engine_for(settings) as engine:
        train(engine, 4)
        plain, norm = full_weights(engine), float(engine.get_global_grad_norm())
    settings["zero_optimization"] = {**settings["zero_optimization"], **offload}
    with engine_for(settings) as engine:
        train(engine, 2)
        engine.save_checkpoint(folder)
        train(engine, range(2, 4))
        states = engine.basic_optimizer.state.values()
        devices = {tensor.device.type for state in states for tensor in state.values()}
        ours, ratio = full_weights(engine), float(engine.get_global_grad_norm()) / norm
    with engine_for(settings) as engine:
        engine.load_checkpoint(folder)
        train(engine, range(2, 4))
        resumed = full_weights(engine)
    same, again = (all(torch.equal(plain[name], other[name]) for name in plain) for other in (ours, resumed))
    return same, ratio, devices, again


@pytest.mark.parametrize(
    ("stage", "offload", "changes"),
    [
        (1, {"offload_optimizer": CPU}, {}),
        (1, {"offload_optimizer": CPU}, BF16),
        (2, {"offload_optimizer": CPU}, BF16),
        (2, {"offload_optimizer": {**CPU, "pin_memory": True}}, {}),
        (3, {"offload_optimizer": CPU}, {}),
        (3, {"offload_param": CPU}, {}),
        (3, {"offload_param": CPU, "offload_optimizer": CPU, "sub_group_size": 1000}, BF16),
        pytest.param(2, {"offload_optimizer": CPU}, {}, marks=pytest.mark.full),
        pytest.param(3, {"offload_optimizer": CPU}, BF16, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_offload_changes_no_bit_and_resumes(
    ranks: RankPool, tmp_path: Any, stage: int, offload: dict[str, Any], changes: dict[str, Any]
) -> None:
    for equal, norms, devices, resumed in ranks.run(differ_from_no_offload, str(tmp_path), stage, offload, changes):
        assert equal and resumed and norms == pytest.approx(1.0, rel=1e-6) and devices == {"cpu"}


def devices_of_work(stage: int, ns_device: str) -> list[str]:
    """Where each stepper sends matrices and runs the rule, if the engine's device were an accelerator."""
    seen: list[str] = []
    original = MatrixStepper.__init__

    def note(self: MatrixStepper, *args: Any, **kwargs: Any) -> None:
        seen.append(f"{args[2]} {kwargs['rule_device']} {kwargs['batch_numel'] > 0}")
        original(self, *args, **kwargs)

    settings = config(stage, ns_device=ns_device)
    settings["zero_optimization"]["offload_optimizer"] = CPU
    with engine_for(settings) as engine:
        MatrixStepper.__init__ = note
        try:
            engine.device = torch.device("meta")
            engine.basic_optimizer._prepare(engine.basic_optimizer._binding)
        finally:
            MatrixStepper.__init__ = original
    return seen


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("ns_device", "expected"), [("auto", "meta meta True"), ("cpu", "meta cpu False")])
def test_matrices_are_computed_where_the_configuration_says(
    ranks: RankPool, stage: int, ns_device: str, expected: str
) -> None:
    assert ranks.run(devices_of_work, stage, ns_device) == [[expected]] * 2


# An engine's life


def train_in_two_engines(storage: str, stage: int, folder: str) -> tuple[float, list[int], bool]:
    """The first engine ends; the second goes on with its model and the same optimizer, from fresh state."""
    settings = settings_of(storage, stage)
    model = ExactLM()
    optimizer = LayerWiseMuon(model.parameters(), **settings.pop("optimizer")["params"])
    single, states = Reference(ExactLM()), []
    for steps in (range(2), range(2, 4)):
        with engine_for(settings, model, optimizer=optimizer) as engine:
            train_on_own(engine, steps)
            states.append(len(optimizer.state))
            engine.save_checkpoint(folder)
            weights = full_weights(engine)
        single = Reference(single.model)
        single.train_on_all(steps)
    hooks = any(hasattr(p, "_hp_mapping") or p._post_accumulate_grad_hooks for p in model.parameters())
    return largest_difference(weights, single.model), states, hooks and storage == "owned"


@each_stored
def test_an_optimizer_serves_a_second_engine_when_the_first_is_gone(
    ranks: RankPool, tmp_path: Any, storage: str, stage: int
) -> None:
    for difference, states, hooks_left in ranks.run(train_in_two_engines, storage, stage, str(tmp_path)):
        assert difference == 0.0 and not hooks_left
        assert len(set(states)) == 1, "nothing of the first engine's is kept"
        assert storage == "owned" or states[0] == 2, "one per group"


@contextlib.contextmanager
def warnings_of(logger: logging.Logger) -> Iterator[list[str]]:
    handler, texts = logging.Handler(logging.WARNING), []
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


def warnings_of_a_changed_model(stage: int) -> list[str]:
    """Two steps with a parameter that was frozen when the engine was built, then two with one replaced, too."""
    model = UnevenLM()
    model.layers[0].bias.requires_grad_(False)
    given = [p for p in model.parameters() if p.requires_grad]
    with engine_for(config(stage), model, model_parameters=given) as engine, warnings_of(logger) as said:
        train(engine, 1)
        model.layers[0].bias.requires_grad_(True)
        train(engine, 2)
        if stage < 3:  # where modules hold DeepSpeed's own parameters
            model.layers[0].bias.requires_grad_(False)
            model.gate.weight = nn.Parameter(model.gate.weight.detach().clone())
            train(engine, 2)
    return [text for text in said if "LayerWise" in text]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_that_deepspeed_does_not_train_is_warned_of_once(ranks: RankPool, stage: int) -> None:
    first, second = ranks.run(warnings_of_a_changed_model, stage)
    assert second == []
    start = "LayerWiseMuon: parameter 'layers.0.bias' is trained now, but not when the optimizer was"
    assert first[0].startswith(start)
    assert first[0].endswith("so no step uses the gradient; call deepspeed.initialize after the last such change")
    replaced = "LayerWiseMuon: parameter 'gate.weight' is no longer in the model (replaced), and no step reaches what "
    assert [text[: len(replaced)] for text in first[1:]] == ([replaced] if stage < 3 else [])


def announced(settings: dict[str, Any]) -> list[str]:
    with warnings_of(logger) as said:
        build(settings)
    return [line for line in said if "gradient_clipping" in line]


def test_deepspeeds_default_clipping_is_announced_once(ranks: RankPool) -> None:
    settings = config(2)
    del settings["gradient_clipping"]
    (line,), others = ranks.run(announced, settings)
    assert "clips gradients at its default norm of 1.0; set it to 0" in line
    assert others == []
    assert ranks.run(announced, config(2, clip=0.0)) == [[], []]


def modelled_on_this_device() -> bool:
    with engine_for(config(2)) as engine:
        plan = engine.basic_optimizer._binding.plans[0].matrices
        return plan.modelled[0][1] == modelled_time(plan, MACHINES["cpu"])


def test_policies_are_compared_on_the_kind_of_machine_that_trains(ranks: RankPool) -> None:
    assert all(ranks.run(modelled_on_this_device))
