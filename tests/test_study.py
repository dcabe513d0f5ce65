"""Studies: deployments, memory and bytes by hand. That plans are those of runs: test_planned.py."""

import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.public_models import study
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.plan.cost import Machine, newton_schulz_flops
from lwopt_backend.plan.owners import longest_first
from lwopt_backend.planner.document import document
from lwopt_backend.planner.setting import Setting, cluster_named, share_of
from lwopt_backend.planner.shapes import ModelShapes, Training
from lwopt_backend.planner.study import Deployment, Study, local_experts, stages
from lwopt_backend.planner.study import plan_study as plan_model
from lwopt_backend.routing.matrices import Divided
from lwopt_backend.routing.routing import Route

MACHINE = Machine("test", 1e12, 1e9, 1e-4, node_size=2, node_bytes_per_second=1e10, memory_bytes=8e9)


def setting(engine: str = "owned", grad_dtype: str = "float32", **options: Any) -> Setting:
    return Setting.of(engine, MACHINE, options, grad_dtype=grad_dtype)


OWNED = setting(layout="padded")
DENSE = {"qkv": (384, 128), "o": (128, 128), "norm": (128,)}
UP_DOWN = {f"mlp.experts.{e}.{name}": (512, 256) for e in range(8) for name in ("up", "down")}
MOE = {"attn": (256, 256), "router": (8, 256), **UP_DOWN}


def plan_study(routes: list[Route], deployment: Deployment, planned_for: Setting) -> Study:
    return plan_model(ModelShapes("test", *Training().of(routes)), deployment, planned_for)


def matrix(name: str, *shape: int) -> Route:
    return Route(name, shape, "matrix" if len(shape) == 2 else "elementwise", "test")


def layers(count: int, shapes: dict[str, tuple[int, ...]]) -> list[Route]:
    return [matrix(f"layers.{i}.{name}", *shape) for i in range(count) for name, shape in shapes.items()]


def test_world_size_counts_all_ranks_and_numbers_that_do_not_divide_are_refused() -> None:
    deployment = Deployment(2048, tp=2, pp=16, ep=32)
    assert (deployment.stage_ranks, deployment.dp, deployment.expert_dp) == (128, 64, 4)
    for numbers, message in [
        ({"world_size": 0}, "world_size: expected at least 1, found 0"),
        ({"world_size": 12, "pp": 5}, "expected a multiple of tp x pp = 1 x 5, found 12.*60 for 12 data-parallel"),
        (
            {"world_size": 128, "pp": 16, "ep": 64},
            "ep: expected a divisor of the 8 ranks of a pipeline stage, found 64",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            Deployment(**numbers)


def test_stages_are_whole_layers_and_the_earlier_ones_longer() -> None:
    routes = [matrix("embed", 8, 8), *layers(5, DENSE), matrix("head", 8, 8)]
    split = stages(routes, 2)
    assert [route.name for stage in split for route in stage] == [route.name for route in routes]
    assert split[0][0].name == "embed" and split[1][-1].name == "head"
    assert {r.name.split(".")[1] for r in split[0][1:]} == {"0", "1", "2"}
    with pytest.raises(ValueError, match="pp: expected at most 5"):
        stages(routes, 6)


def test_a_rank_holds_its_share_of_every_layers_experts() -> None:
    local, _ = local_experts(layers(2, MOE), {}, 4, "*.experts.*")
    first_two = [f"layers.{i}.mlp.experts.{e}.up" for i in (0, 1) for e in (0, 1)]
    assert [r.name for r in local if ".up" in r.name] == first_two
    stack = [matrix("layers.0.mlp.experts.w", 8, 16, 32)]
    divided = {stack[0].name: Divided(matrices_of(stack[0].shape))}
    (part,), parts = local_experts(stack, divided, 4, "*.experts.*")
    assert part.shape == (2, 16, 32) and parts[part.name].blocks == matrices_of((2, 16, 32))
    with pytest.raises(ValueError, match="ep: expected a divisor of the 8 experts"):
        local_experts(layers(1, MOE), {}, 3, "*.experts.*")
    with pytest.raises(ValueError, match="expected one numbered expert .* found 'layers.0.mlp.experts.w'"):
        local_experts(stack, {}, 3, "*.experts.*")


def test_dense_and_expert_buffers_have_own_ranks_and_every_matrix_is_planned_once() -> None:
    study = plan_study(layers(4, MOE), Deployment(16, pp=2, ep=4), OWNED)
    first, second = study.stages
    assert [(p.name, p.ranks, len(p.atoms)) for p in first.parts] == [("dense", 8, 4), ("experts", 2, 8)]
    names = [atom.name for stage in study.stages for part in stage.parts for atom in part.atoms]
    assert len(set(names)) == len(names) == 24
    assert second.parts[0].atoms[0].name == "layers.2.attn"
    assert first.parts[0].owners == second.parts[0].owners  # equal shapes, equal plans
    assert first.digest != second.digest
    stage = study.worst  # whose busiest rank is found over both buffers
    dense, experts = stage.parts
    by_hand = [dense.loads[r % dense.group_size] + experts.loads[r // 4 % experts.group_size] for r in range(8)]
    assert stage.loads() == by_hand
    assert stage.time.compute == max(by_hand) / 1e12


def test_heavy_dense_shards_lie_where_experts_leave_time() -> None:
    # Three expert matrices over two ranks: the first expert rank has two of them. Two dense matrices, one larger.
    routes = [matrix("l.0.a", 256, 256), matrix("l.0.b", 512, 256)]
    routes += [matrix(f"l.0.experts.{e}.w{k}", 256, 256) for e in range(2) for k in range(3)]
    stage = plan_study(routes, Deployment(4, ep=2), setting(layout="padded", group_size=4)).worst
    large, small = newton_schulz_flops((512, 256)), newton_schulz_flops((256, 256))
    assert sorted(stage.parts[1].loads) == [small, 2 * small]
    assert max(stage.loads()) == small + large  # not 2 * small + large


def test_tensor_parallel_ranks_store_a_part_and_take_turns_in_the_work() -> None:
    routes = [matrix("w", 96, 64), matrix("n", 30)]
    shared = share_of(routes, {"w": Divided(matrices_of((96, 64)))}, OWNED, tp=4)
    assert [tuple(param.shape) for group in shared.grouping.groups for param in group["params"]] == [(24, 64), (8,)]
    (atom,) = plan_study(routes, Deployment(8, tp=4), OWNED).worst.parts[0].atoms
    assert (atom.name, atom.shape, atom.cost) == ("w", (24, 64), math.ceil(newton_schulz_flops((96, 64)) / 4))


def test_workspace_bytes_and_seconds_of_a_padded_buffer() -> None:
    # Two equal matrices and one of half their size on two ranks: shards of 1.5, so a quarter of one shard is padding.
    routes = [matrix("l.0.a", 128, 128), matrix("l.1.b", 128, 128), matrix("l.2.c", 64, 128)]
    study = plan_study(routes, Deployment(2), OWNED)
    (part,) = study.worst.parts
    large, small = 128 * 128, 64 * 128
    assert part.buffer_numel == 2 * (large + small) and part.numel == 2 * large + small
    assert sorted(part.owned_numels) == [large, large + small]
    assert {memory.workspace for memory in study.worst.memory()} == {2 * (3 * large + 3 * large) + 8 * large}
    assert [(c.what, c.count, c.nbytes) for c in part.collectives] == [
        ("reduce-scatter of gradients", 1, 4 * (large + small)),
        ("all-gather of parameters", 1, 2 * (large + small)),
    ]
    busiest = newton_schulz_flops((128, 128)) + newton_schulz_flops((64, 128))
    assert part.time.compute == pytest.approx(busiest / 1e12)
    assert part.time.wire == pytest.approx(6 * (large + small) / 1e10)  # both ranks are in one node
    assert part.time.latency == pytest.approx(2 * 1e-4)
    # Four instances of one rank: their owners also sum the owned gradients
    (part,) = plan_study(routes[:1], Deployment(4), setting(layout="padded", group_size=1)).worst.parts
    (across,) = [c.nbytes for c in part.collectives if c.what == "all-reduce across instances"]
    assert (part.group_size, part.ranks, across) == (1, 4, 2 * 4 * large * 3 // 4)
    assert part.time.wire == pytest.approx(across / 2e9)  # by both cards of a node


def test_zero_holds_parameters_whole_gradients_in_halves_and_whole_at_stage_1() -> None:
    stage = plan_study(layers(4, DENSE), Deployment(2), setting("zero2")).worst
    (part,), memory = stage.parts, stage.memory()[0]
    half, elementwise = part.numel // 2, 4 * 128
    assert part.buffer_numel == part.numel
    assert memory.parameters == 2 * (part.numel + elementwise)
    sent = {c.what: c.nbytes for c in part.collectives}
    assert sent["zero2's all-reduce of gradients"] == 4 * part.numel
    assert sent["zero2's all-gather of parameters"] == part.numel
    whole = plan_study(layers(4, DENSE), Deployment(2), setting("zero1")).worst.memory()[0].gradients
    assert whole - memory.gradients == 4 * (half + elementwise // 2)


def test_the_overlapped_step_is_work_alone_where_nothing_travels() -> None:
    def seconds(routes: list[Route], engine: str, deployment: Deployment) -> float:
        return plan_study(routes, deployment, setting(engine)).worst.timeline.seconds * 1e12

    four = sum(newton_schulz_flops(route.shape) for route in layers(4, DENSE) if len(route.shape) == 2)
    assert seconds(layers(4, DENSE), "zero1", Deployment(1)) == pytest.approx(four)
    assert seconds(layers(4, DENSE), "fsdp2", Deployment(2, tp=2)) == pytest.approx(four / 2), "two ranks take turns"
    routes = [*layers(4, DENSE), matrix("l.0.experts.0.w", 256, 256), matrix("l.0.experts.1.w", 256, 256)]
    more = newton_schulz_flops((256, 256))
    assert seconds(routes, "fsdp2", Deployment(2, tp=2, ep=2)) == pytest.approx(four / 2 + more), "experts count once"
    travels = plan_study(layers(4, DENSE), Deployment(4), setting("fsdp2")).worst
    assert travels.time.compute < travels.timeline.seconds < travels.time.total


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_sharded_engines_exchange_every_matrix(engine: str) -> None:
    study = plan_study(layers(4, DENSE), Deployment(4), setting(engine))
    (part,) = study.worst.parts
    shard = part.numel // 4
    exchange = part.collectives[0]
    assert exchange.nbytes == max(int((0.75 * owned + shard - owned / 4) * 2) for owned in part.owned_numels)
    assert study.worst.memory()[0].parameters == (4 if engine == "fsdp2" else 2) * (shard + 128)


def test_a_cluster_file(tmp_path: Path) -> None:
    path, head = tmp_path / "mine.yaml", "name: mine\n"
    path.write_text(head + "flops_per_second: 1e14\nbytes_per_second: 25e9\nlatency_seconds: 0.00002\nnode_size: 4\n")
    assert cluster_named(str(path)) == Machine("mine", 1e14, 25e9, 2e-5, 4)
    misspelt = head + "flops_per_sec: 1\n"
    for wrong, message in ((misspelt, "did you mean 'flops_per_second'"), ("- a\n", "expected a mapping")):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            cluster_named(str(path))


def test_experts_in_a_stack_are_planned_one_by_one_each_on_one_rank() -> None:
    stack = Route("layers.0.experts.up", (6, 512, 512), "elementwise", "3-D", stack=True)
    (part,) = plan_study([stack], Deployment(2), setting()).worst.parts
    assert [atom.name for atom in part.atoms] == [f"layers.0.experts.up[{number}]" for number in range(6)]
    assert part.owners == (0, 0, 0, 1, 1, 1)


# Where matrices travel to their owners, all ranks are done at nearly the same time


def last_done(found: dict[str, Any], costs: dict[str, int], ranks: int) -> int:
    """The cost until the last rank is done, from the list of assignments: a bucket arrives when all ranks are done with
    the last but one before it."""
    done, ends = [0] * ranks, [0, 0]
    for name, owner, bucket in found["assignments"]:
        done[owner] += costs[name] if bucket is None else 0
    ends[1] = max(done)
    for bucket in range(found["buckets"]):
        for name, owner, number in found["assignments"]:
            if number == bucket:
                done[owner] = max(done[owner], ends[-2]) + costs[name]
        ends.append(max(done))
    return max(done)


CELLS = {
    ("llama-7b", "zero1", 64): (1.0, 1),
    ("llama-7b", "zero3", 8): (1.003, 16),
    ("llama-7b", "zero3", 64): (1.0, 3),
    ("llama3.1-70b", "zero2", 512): (1.0, 1),
    ("llama3.1-70b", "zero3", 64): (1.1316, 5),
    ("llama3.1-70b", "fsdp2", 64): (1.0026, 6),
    ("qwen3-30b-a3b, stacked", "zero1", 512): (1.0, 1),
    ("qwen3-30b-a3b, stacked", "fsdp2", 512): (2.0762, 3),
    ("qwen3-30b-a3b", "fsdp2", 512): (1.0255, 3),
}


@pytest.mark.parametrize(("model", "engine", "ranks"), CELLS)
def test_the_last_rank_is_done_soon_after_the_busiest_of_a_longest_first_deal(
    model: str, engine: str, ranks: int
) -> None:
    name, _, stacked = model.partition(", ")
    found = study(name, engine, ranks, stack=bool(stacked))
    (part,) = found.worst.parts
    said = document(found, source=model, assignments=True)
    assert (said["path_over_longest_first"], said["buckets"]) == CELLS[model, engine, ranks]
    costs = {atom.name: atom.cost for atom in part.atoms}
    owners: dict[str, int] = {name: owner for name, owner, _ in said["assignments"]}
    assert len(owners) == len(said["assignments"]) == len(costs), "every matrix once"
    path = last_done(said, costs, ranks)
    exchange, seconds = part.collectives[0], found.setting.seconds
    wire, _ = found.setting.machine.collective(exchange.nbytes, ranks, direct=True)
    work = seconds(longest_first(list(costs.values()), [0] * ranks))
    assert path == part.path and seconds(path) <= max(1.15 * work, wire), "ranks wait for each other, or for the wire"
