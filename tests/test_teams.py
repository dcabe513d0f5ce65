"""Several ranks that update one matrix together: equal to one owner up to rounding, planned where it is faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lwopt_backend.integrations.fsdp2 import LayerWiseOptimizer
from lwopt_backend.plan.cost import CLUSTERS
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import read_shapes_json
from lwopt_backend.planner.study import Deployment, Study, plan_study
from lwopt_backend.rules import AdaMuon, Muon, NorMuon, gram_newton_schulz, newton_schulz
from lwopt_backend.rules.newton_schulz import team_gram_newton_schulz
from lwopt_backend.runtime import collectives
from lwopt_backend.runtime.collectives import Alone, TorchCollectives
from lwopt_backend.runtime.whole import TeamOfRanks
from tests.cells import cells
from tests.fsdp2 import SHARDINGS, BesideTwin, layer_wise, mesh_of, named, weights_of
from tests.models import UnevenLM
from tests.on_ranks import on_ranks
from tests.ranks import RankPool

FP32 = {"matrix": {"name": "muon", "ns_dtype": "float32"}}
ROUNDING = 2e-6  # of weights of at most one, after three fp32 steps whose sums are in another order


def train(sharding: str, mode: str, **options: Any) -> tuple[dict[str, Tensor], BesideTwin]:
    """The weights after three steps, of a model of which two matrices of four have sides that 4 divides."""
    sharded = SHARDINGS[sharding](UnevenLM(hidden=(64, 40)))
    run = BesideTwin(sharding, mode, sharded=sharded, **FP32, **options)
    for step in range(3):
        run.backward(step)
        if mode == "no gradient" and step == 1:
            dict(named(run.model))["layers.0.weight"].grad = None
        if "clipping" in mode:
            run.optimizer.clip_grad_norm_(0.05)
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.optimizer.synchronize()
    return weights_of(run.model), run


@on_ranks(4)
@cells(
    sharding=["rows", "hybrid", "columns", "tensor parallel", "expert parallel"],
    mode=["fp32", "attach", "overlapped", "no gradient", "attach, clipping"],
    options=[{"teams": 2}, {"teams": 4}, {"teams": 2, "layout": "padded"}, {"teams": 4, "bucket_matrices": 1}],
)
def test_matrices_that_teams_update_end_as_with_one_owner(sharding: str, mode: str, options: dict[str, Any]) -> None:
    expected, _ = train(sharding, mode)
    found, run = train(sharding, mode, **options)
    plans = [stepper.plan for stepper in run.optimizer._steppers]
    assert max(plan.team_size for plan in plans) == options["teams"]
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= ROUNDING


class Fused(nn.Module):
    """q, k and v in one parameter, and experts in another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.einsum("eoi,ti->eto", self.experts, (q * k).tanh() + v).square().mean()


@on_ranks(4)
@cells(teams=[2, 4])
def test_teams_update_each_matrix_in_a_parameter(teams: int) -> None:
    found = []
    for size in (None, teams):
        model = Fused()
        fully_shard(model, mesh=mesh_of())
        atoms = {"qkv.weight": {"qkv": [16, 16, 16]}, "experts": "stack"}
        optimizer = LayerWiseOptimizer(model, **FP32, atoms=atoms, teams=size, report=False)
        for _ in range(3):
            model(torch.randn(5, 16, generator=torch.Generator().manual_seed(dist.get_rank()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights_of(model))
    (stepper,) = optimizer._steppers
    assert sum(atom.team is not None for atom in stepper.plan.atoms) == (3 + 3) * teams
    assert max(float((found[1][name] - found[0][name]).abs().max()) for name in found[0]) <= ROUNDING


# Newton-Schulz of a team

SCALES = {"usual": 1.0, "tiny": 1e-36, "huge": 1e25, "zero": 0.0, "nan": float("nan")}


@on_ranks(4)
@cells(scale=[*SCALES], dtype=["float32", "bfloat16"], coefficients=["simple", "polar_express"])
def test_a_teams_newton_schulz_is_that_of_one_rank(scale: str, dtype: str, coefficients: str) -> None:
    matrix = SCALES[scale] * torch.randn(8, 24, generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {"steps": 5, "coefficients": coefficients, "dtype": getattr(torch, dtype)}
    team = TeamOfRanks(TorchCollectives())
    part = matrix.chunk(4, dim=1)[team.rank].contiguous()
    found = team_gram_newton_schulz(part, team, **options, restarts=None)
    for whole in (gram_newton_schulz, newton_schulz):
        expected = whole(matrix, eps=1e-7, **options).chunk(4, dim=1)[team.rank]
        rounding = {"float32": 1e-4, "bfloat16": 0.06}[dtype]
        torch.testing.assert_close(found.float(), expected.float(), atol=rounding, rtol=0, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"ns_steps": 1}, {"ns_coefficients": "polar_express", "ns_steps": 8}])
def test_the_calls_that_are_planned_are_those_that_are_made(options: dict[str, Any]) -> None:
    """A rank that fails makes what is left of them, so that no rank waits for it."""

    class Noted(TeamOfRanks):
        def sum(self, tensor: Tensor) -> Tensor:
            noted.append(("sum", tensor.shape, tensor.dtype))
            return super().sum(tensor)

        def gather(self, rows: Tensor) -> Tensor:
            noted.append(("gather", rows.shape, rows.dtype))
            return super().gather(rows)

    noted: list[Any] = []
    rule = Muon(**options)
    rule.transform_part(torch.randn(8, 24), Noted(Alone()))
    assert noted == [(call.what, torch.Size(call.shape), call.dtype) for call in rule.team_calls((24, 8))]


def test_a_rule_that_changes_the_update_is_left_to_one_rank() -> None:
    class Halved(Muon):
        def transform(self, matrices: Tensor) -> Tensor:
            return super().transform(matrices) / 2

    class Halving:
        def transform(self, matrices: Tensor) -> Tensor:
            return super().transform(matrices) / 2  # type: ignore[misc]

    class MixedIn(Halving, Muon):
        pass

    assert Muon().team_calls((8, 8)) and Muon(ns_method="gram").team_calls((8, 8))
    assert not any(rule().team_calls((8, 8)) for rule in (Halved, MixedIn, NorMuon, AdaMuon))
    assert not Muon(ns_method="quack-kernels").team_calls((8, 8))


# Plans


@pytest.fixture
def studied(tmp_path: Path) -> Any:
    def plan(shapes: list[tuple[int, int]], ranks: int = 8, **options: Any) -> Study:
        (tmp_path / "shapes.json").write_text(json.dumps([[f"{i}.weight", shape] for i, shape in enumerate(shapes)]))
        setting = Setting.of("fsdp2", CLUSTERS["h100-8x-ib"], None, options)
        return plan_study(read_shapes_json(tmp_path / "shapes.json", setting.training), Deployment(ranks), setting)

    return plan


def test_teams_are_chosen_where_the_modelled_step_is_shorter_with_them(studied: Any) -> None:
    few = [(4096, 4096), (16384, 4096), (4096, 16384)]
    many = [(512, 512)] * 64
    (alone,), (shared,) = studied(few).stages[0].planned, studied(few, teams="auto").stages[0].planned
    assert max(shared.loads) < 0.5 * max(alone.loads)
    sizes = {atom.team.size for atom in shared.part.atoms if atom.team is not None}
    assert len(sizes) == 1 and shared.lines != alone.lines
    for shapes in (many, [(4095, 4095)]):  # enough for all ranks, or sides that no team divides
        assert studied(shapes, teams="auto").digest == studied(shapes).digest
    (forced,) = studied(many, teams=2).stages[0].planned
    assert len(forced.part.atoms) == 2 * len(many)


def test_the_parts_of_a_matrix_are_in_one_bucket_on_consecutive_ranks(studied: Any) -> None:
    for options in ({"bucket_matrices": 1}, {"bucket_matrices": 3}, {"bucket_numel": 64 * 64}):
        (planned,) = studied([(64, 64), (128, 64), (63, 64)] * 5, teams=4, **options).stages[0].planned
        found: dict[str, list[tuple[int, int, int]]] = {}
        for atom, owner, bucket in zip(planned.part.atoms, planned.part.owners, planned.part.buckets):
            if atom.team is not None:
                found.setdefault(atom.matrix, []).append((atom.team.place, owner, bucket))
        assert len(found) == 10 and len(planned.part.bucket_numels) > 1
        for parts in found.values():
            first = parts[0][1]
            assert first % 4 == 0 and parts == [(place, first + place, parts[0][2]) for place in range(4)]


# What goes wrong


@on_ranks(4)
@cells(before=[0, 1, 2, 12, None])
def test_a_rank_that_fails_within_a_team_takes_all_with_it(before: int | None) -> None:
    """Before its team's first call, between calls, or in another rule, before it has begun."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    optimizer = layer_wise(model, teams=2)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            fail_after(before, patch)
        model(torch.ones(1, 16)).sum().backward()
        with pytest.raises((ZeroDivisionError, RuntimeError), match="rank 1 failed with Zero|broken here"):
            optimizer.step()
    assert all(param.full_tensor().isfinite().all() for param in model.parameters())
    optimizer.step()  # the ranks' calls still match


def fail_after(calls: int | None, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("broken here")

    if calls is None:
        patch.setattr(Muon, "directions", fail)
        return
    made: list[int] = []

    def counted(of: Any) -> Any:
        def call(team: TeamOfRanks, tensor: Tensor) -> Tensor:
            made.append(1)
            return fail() if len(made) == calls + 1 else of(team, tensor)

        return call

    patch.setattr(TeamOfRanks, "sum", counted(TeamOfRanks.sum))
    patch.setattr(TeamOfRanks, "gather", counted(TeamOfRanks.gather))


@on_ranks(2)
def test_a_transport_that_fails_within_a_team_says_where() -> None:
    """As if the other rank had died."""

    def closed(*args: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    fully_shard(model, mesh=mesh_of())
    optimizer = layer_wise(model, teams=2)
    model(torch.ones(1, 16)).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchCollectives, "all_reduce", closed)
        with pytest.raises(RuntimeError, match="'1.weight' by a team of 2 ranks failed; another rank .*closed by peer"):
            optimizer.step()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one": ({"teams": 1}, "teams: expected None, 'auto' or a number of ranks, 2 or more; found 1"),
    "word": ({"teams": "2"}, "teams: expected None, 'auto' or a number of ranks, 2 or more; found '2'"),
    "size": ({"teams": 3}, r"teams is 3, but no matrix can be updated by 3 ranks together: found mesh\(es\) of 4"),
    "rule": ({"teams": 2, "matrix": "normuon"}, "2 ranks together: .*the rule must be 'muon' without the kernels"),
}


@on_ranks(4)
@cells(case=[*REFUSED])
def test_teams_that_cannot_be_made_are_refused(case: str) -> None:
    options, message = REFUSED[case]
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    with pytest.raises(ValueError, match=message):
        layer_wise(model, **options)


# The process groups of teams


def parts_of_a_default_group_that_is_split() -> None:
    """As with NCCL, if init_process_group was given a device_id."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_splits", lambda: True)
        pairs = TorchCollectives().part([[0, 1], [2, 3]])
        total = torch.full((1,), float(dist.get_rank()))
        pairs.all_reduce(total)
        assert pairs.ranks() == ([0, 1] if dist.get_rank() < 2 else [2, 3])
        assert total.item() == (1.0 if dist.get_rank() < 2 else 5.0)
        assert TorchCollectives().part([[0, 1], [2, 3]]).group is pairs.group
        with pytest.raises(ValueError, match="no communicator can be made for ranks .*leave it out"):
            pairs.part([[0], [1]])


def test_teams_meet_where_only_all_ranks_can_make_groups(rank_pools: dict[int, RankPool]) -> None:
    pool = rank_pools[4]
    pool.renew()
    pool.run(parts_of_a_default_group_that_is_split)
    pool.renew()
