"""Steps on one clock: records of ranks that the plan generates are those of real ones, and the clock plays them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clock.generate import generator_of
from benchmarks.clock.passes import Given
from benchmarks.clock.play import Played, Rates, play
from benchmarks.clock.record import COMPUTE, REDUCE, Join, Read, Record, Session, Start, Wait, Work, opened
from benchmarks.clock.shown import figures, write_trace
from benchmarks.rehearsal.engines import MeshEngine
from benchmarks.timeline import passes_of, predicted, recorded_rank, run
from lwopt_backend.plan.cost import Machine
from lwopt_backend.planner.seconds import CLUSTERS
from lwopt_backend.planner.setting import Setting
from lwopt_backend.planner.shapes import read_shapes_json
from lwopt_backend.planner.study import Deployment, Study, plan_study

LAYER = {"q.weight": [64, 64], "o.weight": [64, 64], "up.weight": [200, 64], "down.weight": [64, 200], "norm": [64]}
MODEL = [[f"layers.{i}.{name}", shape] for i in range(3) for name, shape in LAYER.items()]


@pytest.fixture
def studied(tmp_path: Path) -> Callable[..., Study]:
    def plan(engine: str, ranks: int = 4, shapes: list[Any] = MODEL, **options: Any) -> Study:
        (tmp_path / "shapes.json").write_text(json.dumps(shapes))
        setting = Setting.of(engine, CLUSTERS["h100-8x-ib"], options)
        return plan_study(read_shapes_json(tmp_path / "shapes.json", setting.training), Deployment(ranks), setting)

    return plan


def recorded(session: Session, passes: bool) -> Record:
    """The second step; with ``passes``, those around it, too, and on FSDP2 an early exchange."""
    if not passes:
        return session.record()
    given = passes_of(session, session.planned, session.setting, Given(2**12))
    session.record()
    if isinstance(session.engine, MeshEngine):
        session.engine.attach()
    return session.record(given)


def real(study: Study, rank: int, passes: bool) -> Record:
    with opened(study.worst.planned[0], study.setting, rank) as session:
        return recorded(session, passes)


SMALL = {"bucket_mb": 0.05}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "owned": ("owned", {}),
    "owned, padded": ("owned", {"layout": "padded", **SMALL}),
    "owned, compact": ("owned", {"layout": "compact", "grad_dtype": "float32", **SMALL}),
    "fsdp2": ("fsdp2", {}),
    "fsdp2, small buckets": ("fsdp2", {"bucket_matrices": 2}),
    "zero1, stay": ("zero1", {}),
    "zero1, balance": ("zero1", {"policy": "balance", "bucket_numel": 9000}),
    "zero2": ("zero2", {"policy": "balance"}),
    "zero3": ("zero3", {"bucket_numel": 9000}),
}


PASSES = {"owned, padded, with passes": "owned, padded", "fsdp2, attached": "fsdp2, small buckets"}


@pytest.mark.parametrize(
    "case, ranks", [*product([*CASES, *PASSES], [4]), *product(["fsdp2", "zero1, balance", "zero3", "owned"], [5])]
)
def test_the_plan_generates_the_records_of_other_ranks(studied: Callable[..., Study], case: str, ranks: int) -> None:
    engine, options = CASES[PASSES.get(case, case)]
    study, passes = studied(engine, ranks, **options), case in PASSES
    template = recorded_rank(study.worst.planned[0])
    with opened(study.worst.planned[0], study.setting, template) as session:
        generator = generator_of(session, recorded(session, passes))
        generated = [generator.record_of(rank) for rank in range(ranks)]
    assert generated[template] == generator.template
    for rank in {*range(ranks)} - {template}:
        assert generated[rank] == real(study, rank, passes), rank
    assert len({*generated}) > 1, "ranks that differ were compared"


# The clock, on records made by hand: a flop takes a second, as does a byte on the wire.

SLOW = Rates(Machine("slow", 1.0, 1.0, 0.0), 1.0, launch=0.0, collective=0.0)


def sends(nbytes: int, stream: str = COMPUTE) -> Start:
    return Start("exchange", "all-to-all", nbytes, 2, ("out", 0), stream=stream)


def plays(*records: list[Any], rates: Rates = SLOW) -> Played:
    return play([(tuple(record), 1) for record in records], rates)


def test_a_collective_begins_with_the_last_rank_and_takes_the_most_bytes() -> None:
    early = [Work("a", flops=1), sends(2), Work("b", flops=3), Wait(0), Work("c", flops=1)]
    late = [Work("a", flops=4), sends(5), Wait(0), Work("c", flops=2)]
    played = plays(early, late)
    (trip,) = played.trips
    assert (trip.begin, trip.end, trip.last) == (4, 9, 1)
    assert played.ends == (10, 11) and played.seconds == 11
    assert trip.waited == 5 and trip.mean == 5, "each rank's work waits from second 4 to second 9"
    assert played.works == (5, 6) and played.busiest == 1 and played.hidden == 0 and played.bound == 16


def test_collectives_follow_one_another_on_the_wire_and_work_hides_them() -> None:
    record = [sends(3), sends(3), Work("a", flops=5), Wait(0), Wait(1), Work("b", flops=1)]
    played = plays(record, record)
    assert [(trip.begin, trip.end) for trip in played.trips] == [(0, 3), (3, 6)]
    assert played.seconds == 7 and played.hidden == 5 / 6


def test_a_stream_waits_for_what_it_is_told_and_a_host_for_what_it_reads() -> None:
    record = [
        Work("a", flops=2),
        Join(on=COMPUTE, stream=REDUCE),
        Work("on the other stream", flops=5, stream=REDUCE),
        Work("b", flops=1),
        Read("flags"),
        Work("c", flops=1, calls=1),
        Join(on=REDUCE),
        Work("d", flops=1),
    ]
    played = plays(record, rates=Rates(SLOW.machine, 1.0, launch=0.5, collective=0.0))
    where = {span.what: (span.begin, span.end) for span in played.spans[0]}
    assert where["on the other stream"] == (2, 7) and where["b"] == (2, 3) and where["c"] == (3, 4)
    assert where["d"] == (7, 8) and where["flags"] == (0, 3)


def test_a_device_stands_still_for_a_host_that_launches_slowly() -> None:
    played = plays([Work("a", flops=1, calls=10)], rates=Rates(SLOW.machine, 1.0, launch=0.5))
    assert played.seconds == 5 and played.works == (1,) and played.hosts == (4,)


def test_ranks_that_start_other_collectives_are_found() -> None:
    with pytest.raises(ValueError, match="where another starts"):
        plays([sends(1)], [Start("exchange", "all-gather", 1, 2)])
    with pytest.raises(ValueError, match="more collectives than others"):
        plays([sends(1)], [sends(1), sends(1)])


def test_rings_leave_a_node_by_all_cards_and_all_to_alls_by_one() -> None:
    rates = Rates(Machine("nodes", 1.0, 1.0, 0.0, 4, 8.0), 1.0)
    assert rates.wire(Start("", "all-gather", 0, 8), 40) == 10, "four cards"
    assert rates.wire(Start("", "all-gather", 0, 4), 40) == 5, "within a node"
    assert rates.wire(Start("", "all-reduce", 0, 2, stride=4), 40) == 40, "one rank of each node"
    assert rates.wire(Start("", "all-to-all", 0, 8), 70) == 40, "four of seven other ranks are in other nodes"


# The command, and passes of a model.


@pytest.mark.parametrize("engine", ["owned", "fsdp2", "zero1", "zero3"])
def test_a_step_is_played(studied: Callable[..., Study], engine: str, tmp_path: Path) -> None:
    study = studied(engine, 16)
    played = predicted(study)
    found = figures(played)
    assert sum(played.counts) == 16 and found["over_mean"] >= found["over_busiest"] >= 1
    write_trace(played, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"} and all(event.get("dur", 1) > 0 for event in events)


def test_attach_starts_the_exchange_in_the_backward_pass(studied: Callable[..., Study]) -> None:
    study = studied("fsdp2", bucket_matrices=4)
    given = Given(2**22)
    alone, attached = predicted(study, given=given), predicted(study, given=given, attach=True)

    def early(played: Played) -> list[int]:
        """The buckets that leave before the backward pass ends."""
        last = max(span.end for span in played.spans[0] if span.what == "backward")
        return [trip.start.at[1] for trip in played.trips if trip.start.at[0] and max(trip.ready) < last]

    assert early(alone) == [] and early(attached) == [0, 1]
    assert alone.given == attached.given


def test_parameters_of_owned_storage_return_behind_the_next_forward_pass(studied: Callable[..., Study]) -> None:
    studies = (studied("owned", overlap_param_gather=overlap, bucket_mb=0.05) for overlap in (False, True))
    at_once, later = (predicted(study, given=Given(2**22)) for study in studies)
    assert later.given == pytest.approx(at_once.given) and later.seconds < at_once.seconds


def test_the_command_says_what_a_step_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shapes.json").write_text(json.dumps(MODEL))
    words = f"--shapes {tmp_path}/shapes.json --world-size 64 --engine fsdp2 --attach --trace {tmp_path}/trace.json"
    with pytest.raises(SystemExit) as ended:
        run(words.split())
    assert not ended.value.code and (tmp_path / "trace.json").exists()
    printed = " ".join(capsys.readouterr().out.split())
    assert "A prediction" in printed and "hidden behind work" in printed and "What waits for what" in printed
