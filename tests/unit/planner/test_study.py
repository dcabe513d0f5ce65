"""What `lwopt plan` calculates: deployments, memory, bytes and modelled seconds, all by hand. That plans are those of
runs: test_planned.py."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.public_models import study
from lwopt_backend.plan import Atom, Machine
from lwopt_backend.plan.atoms import matrices_of
from lwopt_backend.plan.buckets import BucketSeconds, BucketTime, pipeline
from lwopt_backend.plan.cost import CLUSTERS, StepTime, newton_schulz_flops
from lwopt_backend.plan.owners import longest_first
from lwopt_backend.planner.document import document
from lwopt_backend.planner.seconds import Elements, Placed, buffer_step, buffer_timeline
from lwopt_backend.planner.setting import Setting, cluster_named, share_of
from lwopt_backend.planner.shapes import ModelShapes, Training
from lwopt_backend.planner.study import Deployment, Study, local_experts, plan_study, stages
from lwopt_backend.routing.matrices import Divided
from lwopt_backend.routing.routing import Route

MACHINE = Machine("test", 1e12, 1e9, 1e-4, node_size=2, node_bytes_per_second=1e10, memory_bytes=8e9)
DENSE = {"qkv": (384, 128), "o": (128, 128), "norm": (128,)}
UP_DOWN = {f"mlp.experts.{e}.{name}": (512, 256) for e in range(8) for name in ("up", "down")}
MOE = {"attn": (256, 256), "router": (8, 256), **UP_DOWN}


def setting(engine: str = "plain", grad_dtype: str = "float32", **options: Any) -> Setting:
    return Setting.of(engine, MACHINE, options, grad_dtype=grad_dtype)


PADDED = setting(layout="padded")


def planned(routes: list[Route], deployment: Deployment, planned_for: Setting) -> Study:
    return plan_study(ModelShapes("test", *Training().of(routes)), deployment, planned_for)


def matrix(name: str, *shape: int) -> Route:
    return Route(name, shape, "matrix" if len(shape) == 2 else "elementwise", "test")


def layers(count: int, shapes: dict[str, tuple[int, ...]]) -> list[Route]:
    return [matrix(f"layers.{i}.{name}", *shape) for i in range(count) for name, shape in shapes.items()]


# Parallelism: tensor (tp), pipeline (pp) and expert (ep)
def test_world_size_that_does_not_divide_is_refused() -> None:
    """The world size counts all ranks; numbers that do not divide are refused."""
    deployment = Deployment(2048, tp=2, pp=16, ep=32)
    assert (deployment.stage_ranks, deployment.dp, deployment.expert_dp) == (128, 64, 4)
    refused = "ep: expected a divisor of the 8 ranks of a pipeline stage, found 64"
    for numbers, message in [
        ({"world_size": 0}, "world_size: expected at least 1, found 0"),
        ({"world_size": 12, "pp": 5}, "expected a multiple of tp x pp = 1 x 5, found 12.*60 for 12 data-parallel"),
        ({"world_size": 128, "pp": 16, "ep": 64}, refused),
    ]:
        with pytest.raises(ValueError, match=message):
            Deployment(**numbers)


def test_pipeline_stages_are_whole_layers() -> None:
    """Pipeline stages are whole layers, and the earlier ones longer."""
    routes = [matrix("embed", 8, 8), *layers(5, DENSE), matrix("head", 8, 8)]
    split = stages(routes, 2)
    assert [route.name for stage in split for route in stage] == [route.name for route in routes]
    assert split[0][0].name == "embed" and split[1][-1].name == "head"
    assert {r.name.split(".")[1] for r in split[0][1:]} == {"0", "1", "2"}
    with pytest.raises(ValueError, match="pp: expected at most 5"):
        stages(routes, 6)


def test_expert_parallel_ranks_hold_their_share() -> None:
    """Expert-parallel ranks hold their share of every layer's experts."""
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


def test_dense_and_expert_buffers_have_own_ranks() -> None:
    """Every matrix is planned once."""
    found = planned(layers(4, MOE), Deployment(16, pp=2, ep=4), PADDED)
    first, second = found.stages
    assert [(p.name, p.ranks, len(p.atoms)) for p in first.parts] == [("dense", 8, 4), ("experts", 2, 8)]
    names = [atom.name for stage in found.stages for part in stage.parts for atom in part.atoms]
    assert len(set(names)) == len(names) == 24
    assert second.parts[0].atoms[0].name == "layers.2.attn"
    assert first.parts[0].owners == second.parts[0].owners and first.digest != second.digest
    dense, experts = found.worst.parts  # whose busiest rank is found over both buffers
    by_hand = [dense.loads[r % dense.group_size] + experts.loads[r // 4 % experts.group_size] for r in range(8)]
    assert found.worst.loads() == by_hand and found.worst.time.compute == max(by_hand) / 1e12


def test_experts_have_no_copies_that_share_their_work() -> None:
    """Options on copies are of the dense matrices, whose ranks experts do not share."""
    on_pairs = setting("fsdp2", group_size=2, share_copies=False)
    dense, experts = planned(layers(4, MOE), Deployment(8, ep=4), on_pairs).worst.parts
    assert any("each copy computes all updates by itself" in note.text for note in dense.notes)
    assert not any(note.about == "copies" for note in experts.notes)


def test_copies_share_the_work_by_the_bytes_of_their_rule() -> None:
    """Fixed: Whether copies share was decided by what Muon does in fp32, whatever the rule and the dtypes. In bf16 an
    update takes half the memory's bytes, so computing again is sooner for wider matrices."""

    def shares(dtype: torch.dtype) -> bool:
        of_four_copies = Setting.of("fsdp2", MACHINE, {"group_size": 8}, dtype=dtype)
        (part,) = planned([matrix(f"w.{n}", 384, 2048) for n in range(512)], Deployment(32), of_four_copies).worst.parts
        return any("the copies of each matrix share" in note.text for note in part.notes)

    assert shares(torch.float32) and not shares(torch.bfloat16)


def test_tensor_parallel_ranks_take_turns_in_the_work() -> None:
    """Tensor-parallel ranks store a part, and take turns in the work."""
    routes = [matrix("w", 96, 64), matrix("n", 30)]
    shared = share_of(routes, {"w": Divided(matrices_of((96, 64)))}, PADDED, tp=4)
    assert [tuple(param.shape) for group in shared.grouping.groups for param in group["params"]] == [(24, 64), (8,)]
    (atom,) = planned(routes, Deployment(8, tp=4), PADDED).worst.parts[0].atoms
    assert (atom.name, atom.shape, atom.cost) == ("w", (24, 64), math.ceil(newton_schulz_flops((96, 64)) / 4))


def test_stacked_experts_are_planned_one_by_one() -> None:
    """Experts in a stack are planned one by one, each on one rank."""
    stack = Route("layers.0.experts.up", (6, 512, 512), "elementwise", "3-D", stack=True)
    (part,) = planned([stack], Deployment(2), setting()).worst.parts
    assert [atom.name for atom in part.atoms] == [f"layers.0.experts.up[{number}]" for number in range(6)]
    assert part.owners == (0, 0, 0, 1, 1, 1)


# Bytes
def test_workspace_bytes_and_seconds_of_a_padded_buffer() -> None:
    # Two equal matrices and one of half their size on two ranks: shards of 1.5, so a quarter of one shard is padding.
    routes = [matrix("l.0.a", 128, 128), matrix("l.1.b", 128, 128), matrix("l.2.c", 64, 128)]
    found = planned(routes, Deployment(2), PADDED)
    (part,) = found.worst.parts
    large, small = 128 * 128, 64 * 128
    assert part.buffer_numel == 2 * (large + small) and part.numel == 2 * large + small
    assert sorted(part.owned_numels) == [large, large + small]
    assert {memory.workspace for memory in found.worst.memory()} == {4 * large + 2 * 2 * (large + large)}
    assert [(c.what, c.count, c.nbytes) for c in part.collectives] == [
        ("reduce-scatter of gradients", 1, 4 * (large + small)),
        ("all-gather of parameters", 1, 2 * (large + small)),
    ]
    busiest = newton_schulz_flops((128, 128)) + newton_schulz_flops((64, 128))
    assert part.time.compute == pytest.approx(busiest / 1e12)
    assert part.time.wire == pytest.approx(6 * (large + small) / 1e10)  # both ranks are in one node
    assert part.time.latency == pytest.approx(2 * 1e-4)
    # Four instances of one rank: their owners also sum the owned gradients
    (part,) = planned(routes[:1], Deployment(4), setting(layout="padded", group_size=1)).worst.parts
    (across,) = [c.nbytes for c in part.collectives if c.what == "all-reduce across instances"]
    assert (part.group_size, part.ranks, across) == (1, 4, 2 * 4 * large * 3 // 4)
    assert part.time.wire == pytest.approx(across / 2e9)  # by both cards of a node


def test_zero2_holds_gradients_in_parts_and_zero1_whole() -> None:
    """ZeRO 2 holds parameters whole and gradients in halves, ZeRO 1 both whole."""
    stage = planned(layers(4, DENSE), Deployment(2), setting("zero2")).worst
    (part,), memory = stage.parts, stage.memory()[0]
    half, elementwise = part.numel // 2, 4 * 128
    assert part.buffer_numel == part.numel
    assert memory.parameters == 2 * (part.numel + elementwise)
    sent = {c.what: c.nbytes for c in part.collectives}
    assert sent["zero2's all-reduce of gradients"] == 4 * part.numel
    assert sent["zero2's all-gather of parameters"] == part.numel
    whole = planned(layers(4, DENSE), Deployment(2), setting("zero1")).worst.memory()[0].gradients
    assert whole - memory.gradients == 4 * (half + elementwise // 2)


@pytest.mark.parametrize("engine", ["zero3", "fsdp2"])
def test_zero3_and_fsdp2_exchange_every_matrix(engine: str) -> None:
    found = planned(layers(4, DENSE), Deployment(4), setting(engine))
    (part,) = found.worst.parts
    shard, exchange = part.numel // 4, part.collectives[0]
    assert exchange.nbytes == max(int((0.75 * owned + shard - owned / 4) * 2) for owned in part.owned_numels)
    assert found.worst.memory()[0].parameters == (4 if engine == "fsdp2" else 2) * (shard + 128)
    assert part.notes[-1].text.endswith("with at most 3 other rank(s).")
    (part,) = planned(layers(4, DENSE), Deployment(512), setting(engine)).worst.parts
    holding = 384 if engine == "fsdp2" else 512  # no weight has more rows, of which a rank holds at least one
    assert f"at most {holding - 1} other rank(s)" in part.notes[-1].text and "HSDP" in part.notes[-1].text


def test_a_cluster_file(tmp_path: Path) -> None:
    path, head = tmp_path / "mine.yaml", "name: mine\n"
    path.write_text(head + "flops_per_second: 1e14\nbytes_per_second: 25e9\nlatency_seconds: 0.00002\nnode_size: 4\n")
    assert cluster_named(str(path)) == Machine("mine", 1e14, 25e9, 2e-5, 4)
    misspelt = head + "flops_per_sec: 1\n"
    for wrong, message in ((misspelt, "did you mean 'flops_per_second'"), ("- a\n", "expected a mapping")):
        path.write_text(wrong)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            cluster_named(str(path))


# Seconds of a step in plain PyTorch
H100 = CLUSTERS["h100-8x-ib"]
SIMPLE = Machine("simple", flops_per_second=10, bytes_per_second=2, latency_seconds=100)
NODES_OF_TWO = replace(SIMPLE, node_size=2, node_bytes_per_second=8)
EIGHT = replace(NODES_OF_TWO, node_size=8)  # of 2 bytes a second between nodes, 8 within
# A rank sends half of every bucket (256 and 128 elements, compact 192 and 64) within a group of two: 4 bytes a gradient
# and 2 a parameter. Instances add an all-reduce of the owned gradients, 2 x (instances - 1) / instances of 4 bytes.
WITHIN, ACROSS = (256 + 128) / 2 * (4 + 2), (256 + 128) / 2 * 4 * 2


def two_buckets(layout: str) -> Placed:
    """Over two shards: bucket 1 is matrix 0 (64 elements) at shard 1; bucket 0 is 1 (128) and 2 (64) at 0 and 1."""
    atoms = Atom("a", (8, 8), 30), Atom("b", (8, 16), 50), Atom("c", (8, 8), 40)
    return Placed(atoms, 2, (1, 0, 1), (1, 0, 0), (256, 128) if layout == "padded" else (192, 64))


@pytest.mark.parametrize(
    ("machine", "instances", "wire", "latency"),
    [
        (SIMPLE, 1, WITHIN / 2, 4 * 100),  # four collectives of one round each
        (SIMPLE, 3, WITHIN / 2 + ACROSS * 2 / 3 / 2, 4 * 100 + 2 * 4 * 100),  # two more of 2 x 2 rounds
        (NODES_OF_TWO, 3, WITHIN / 8 + ACROSS * 2 / 3 / 2, 1200),  # neighbours use a node's links, instances do not
        (EIGHT, 4, WITHIN / 8 + ACROSS * 3 / 4 / 8, 1200),  # a node
        (EIGHT, 8, WITHIN / 8 + ACROSS * 7 / 8 / 8, 1600),  # two nodes, which a ring leaves by four cards
        (replace(EIGHT, node_size=3), 2, WITHIN / 2 + ACROSS * 1 / 2 / 2, 800),  # ranks 2 and 3 are in two nodes
    ],
)
def test_seconds_of_a_padded_step(machine: Machine, instances: int, wire: float, latency: float) -> None:
    """A padded step is its busiest owner's work, its wire and latency."""
    time = buffer_step(two_buckets("padded"), machine, instances=instances)
    assert (time.compute, time.wire, time.latency) == (7.0, pytest.approx(wire), latency)


def test_seconds_of_a_compact_step() -> None:
    """A compact step sends the matrices alone, and one rank nothing."""
    time = buffer_step(two_buckets("compact"), SIMPLE, elements=Elements(parameter=1, gradient=2))
    assert (time.compute, time.wire, time.latency) == (7.0, (192 + 64) / 2 * (2 + 1) / 2, 400.0)
    atoms = two_buckets("padded").atoms
    alone = buffer_step(Placed(atoms, 1, (0, 0, 0), (1, 0, 0), (128, 64)), SIMPLE)
    assert alone == StepTime(120 / SIMPLE.flops_per_second, 0, 0)


def test_pipeline_of_buckets_out_and_back() -> None:
    # wire     | b0 2 | b1 3 |      | b0 1 | b1 1
    # shard 0                | b0 3 | b1 4 |
    # shard 1                | b0 2 | b1 1 |
    """Gradients arrive in order, then buckets return when all ranks got there."""
    stages = [BucketSeconds(2, 1, {0: (3, 0), 1: (2, 0)}), BucketSeconds(3, 1, {0: (4, 0), 1: (1, 0)})]
    times = pipeline(stages, [0, 0], 0, reduced=True).buckets
    assert times == (BucketTime((0, 2), (5, 8), (8, 9)), BucketTime((2, 5), (7, 12), (12, 13)))
    assert pipeline([stages[0]], [0, 0], 0, reduced=True).seconds == 6, "one bucket"


def test_the_timeline_of_two_buckets_is_that_of_its_stages() -> None:
    """Two reductions of 100 seconds and their bytes; matrix 0 at shard 1, then 1 and 2 at shards 0 and 1; two ways back
    like them, in the order in which backward completes them: bucket 0 has the last parameters."""
    found = buffer_timeline(two_buckets("padded"), SIMPLE)
    parts = buffer_step(two_buckets("padded"), SIMPLE)
    on_wire = sum(time.out[1] - time.out[0] + time.back[1] - time.back[0] for time in found.buckets)
    assert on_wire == pytest.approx(parts.wire + parts.latency)
    assert max(parts.compute, on_wire) <= found.seconds == found.buckets[-1].back[1] <= parts.total


# Seconds of a step on DeepSpeed and FSDP2
def test_the_overlapped_step_is_work_alone_where_nothing_travels() -> None:
    def seconds(routes: list[Route], engine: str, deployment: Deployment) -> float:
        return planned(routes, deployment, setting(engine)).worst.timeline.seconds * 1e12

    four = sum(newton_schulz_flops(route.shape) for route in layers(4, DENSE) if len(route.shape) == 2)
    assert seconds(layers(4, DENSE), "zero1", Deployment(1)) == pytest.approx(four)
    assert seconds(layers(4, DENSE), "fsdp2", Deployment(2, tp=2)) == pytest.approx(four / 2), "two ranks take turns"
    routes = [*layers(4, DENSE), matrix("l.0.experts.0.w", 256, 256), matrix("l.0.experts.1.w", 256, 256)]
    more = newton_schulz_flops((256, 256))
    assert seconds(routes, "fsdp2", Deployment(2, tp=2, ep=2)) == pytest.approx(four / 2 + more), "experts count once"
    travels = planned(layers(4, DENSE), Deployment(4), setting("fsdp2")).worst
    assert travels.time.compute < travels.timeline.seconds < travels.time.total


OF_PUBLIC_MODELS: list[tuple[str, str, int, dict[str, bool]]] = [
    ("llama-7b", "zero3", 64, {}),
    ("llama3.1-70b", "fsdp2", 64, {}),
    ("llama3.1-70b", "zero2", 512, {}),
    ("qwen3-30b-a3b", "fsdp2", 512, {"stack": True}),
]


@pytest.mark.parametrize(("name", "engine", "ranks", "how"), OF_PUBLIC_MODELS)
def test_last_rank_is_about_as_busy_as_in_an_lpt_deal(name: str, engine: str, ranks: int, how: dict[str, bool]) -> None:
    """The last rank is done soon after the busiest of an LPT deal. Or ranks wait for the wire."""
    found = study(name, engine, ranks, **how)
    (part,) = found.worst.parts
    said, costs = document(found, source=name, assignments=True), [atom.cost for atom in part.atoms]
    assert sorted(matrix for matrix, _, _ in said["assignments"]) == sorted(atom.name for atom in part.atoms)
    wire, _ = found.setting.machine.collective(part.collectives[0].nbytes, ranks, direct=True)
    lpt = longest_first(costs, [0] * ranks)
    assert said["path_over_longest_first"] == round(part.path / lpt, 4)
    assert found.setting.seconds(part.path) <= max(1.15 * found.setting.seconds(lpt), wire)
