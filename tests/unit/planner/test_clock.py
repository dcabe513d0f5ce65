"""Steps on one clock: records of ranks that the plan generates are those of real ones, and the clock plays them."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import timeline
from benchmarks.clock.generate import records
from benchmarks.clock.passes import BACKWARD, Given, GivenPasses
from benchmarks.clock.play import Played, Rates, play
from benchmarks.clock.record import COMPUTE, REDUCE, Join, Read, Start, Tracer, Wait, Work, opened
from benchmarks.rehearsal import engines
from benchmarks.timeline import passes_of, predicted, recorded_rank
from lwopt_backend.engines.buffers.bucket_manager import IN_FLIGHT
from lwopt_backend.plan.cost import Machine
from lwopt_backend.planner.study import Study
from lwopt_backend.runtime.collectives import TorchCollectives
from lwopt_backend.runtime.step import Matrices
from tests.support.planner_shapes import LAYER, SMALL, study_in
from tests.support.ranks import RankPool


@pytest.fixture
def studied(tmp_path: Path) -> Callable[..., Study]:
    def plan(engine: str, ranks: int = 4, **options: Any) -> Study:
        return study_in(tmp_path / "shapes.json", engine, ranks, options)

    return plan


# The clock, on records made by hand: a flop takes a second, as does a byte on the wire.

SLOW = Rates(Machine("slow", 1.0, 1.0, 0.0), 1.0, launch=0.0, collective=0.0)


def sends(nbytes: int, stream: str = COMPUTE) -> Start:
    return Start("exchange", "all-to-all", nbytes, 2, ("out", 0), stream=stream)


def plays(*records: list[Any], launch: float = 0.0) -> Played:
    rates = Rates(SLOW.machine, 1.0, launch=launch, collective=0.0)
    return play([(tuple(record), 1) for record in records], rates)


def test_collective_begins_with_the_last_rank() -> None:
    """A collective begins with the last rank, and work hides it."""
    early = [Work("a", flops=1), sends(2), Work("b", flops=3), Wait(0), Work("c", flops=1)]
    late = [Work("a", flops=4), sends(5), Wait(0), Work("c", flops=2)]
    played = plays(early, late)
    assert [(trip.begin, trip.end) for trip in played.trips] == [(4, 9)] and played.ends == (10, 11)
    assert (played.works, played.busiest, played.hidden, played.bound) == ((5, 6), 1, 0, 16)
    record = [sends(3), sends(3), Work("a", flops=5), Wait(0), Wait(1), Work("b", flops=1)]
    assert plays(record, record).hidden == 5 / 6


def test_streams_and_hosts_wait_for_what_they_use() -> None:
    """A stream waits for what it joins, and a host for what it reads and launches."""
    record = [Work("a", flops=2), Join(on=COMPUTE, stream=REDUCE), Work("aside", flops=5, stream=REDUCE)]
    record += [Work("b", flops=1), Read("flags"), Work("c", flops=1, calls=1), Join(on=REDUCE), Work("d", flops=1)]
    where = {span.what: (span.begin, span.end) for span in plays(record, launch=0.5).spans[0]}
    assert where == {"a": (0, 2), "aside": (2, 7), "b": (2, 3), "c": (3, 4), "d": (7, 8)}
    slow = plays([Work("a", flops=1, calls=10)], launch=0.5)
    assert slow.seconds == 5 and slow.works == (1,), "the device stands still for its host"


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


@pytest.mark.parametrize("method", ["standard", "gram", "auto", "quack-kernels"])
def test_a_record_has_the_flops_of_the_rule(tmp_path: Path, method: str) -> None:
    """Those of the plan, by formula; kernels for symmetric products take half of theirs."""
    shapes = [["up", [1024, 256]], ["o", [256, 256]], ["down", [256, 768]]]
    study = study_in(
        tmp_path / "shapes.json", "fsdp2", 2, {"matrix": {"name": "muon", "ns_method": method}}, shapes=shapes
    )
    (planned,) = study.worst.planned
    assert planned.part is not None
    for rank in range(2):
        with opened(planned, study.setting, rank) as session:
            record = session.record()
        assert sum(event.flops for event in record if isinstance(event, Work)) == planned.part.loads[rank] > 0


# Reality: the engines themselves on four ranks over gloo, whose work and wire advance a clock instead of taking time.

REAL = Rates(Machine("real", 7.5e7, 4e5, 0.0), math.inf, launch=0.0, collective=0.0, blocking=True)
LAYERS = [[f"layers.{i}.{name}", shape] for i in range(6) for name, shape in LAYER.items()]
TOKENS = Given(100)
REALITY: dict[str, tuple[str, dict[str, Any], bool]] = {  # engine, options, whether passes are played
    "ZeRO 1": ("zero1", {"policy": "balance", "bucket_numel": 30000}, False),
    "ZeRO 3": ("zero3", {"bucket_numel": 60000}, False),
    "FSDP2": ("fsdp2", {"bucket_matrices": 8}, False),  # by default, a CPU has other buckets
    "HSDP": ("fsdp2", {"bucket_matrices": 8, "group_size": 2}, False),
    "plain": ("plain", {"bucket_mb": 0.05}, True),
}


class Hands:
    """A rank's clock. A collective begins when all ranks have started it and those before it have ended."""

    def __init__(self) -> None:
        self.now = self.wire = 0.0
        self._ranks = dist.new_group()

    def held(self, kind: str, pending: Any, nbytes: int) -> Any:
        """In place of a collective's handle, one whose wait moves the clock to the collective's end."""
        latest = torch.tensor([self.now, nbytes], dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._ranks)
        started, most = latest.tolist()
        end = self.wire = max(started, self.wire) + REAL.wire(Start("", kind, 0, 4), int(most))

        def wait() -> None:
            pending.wait()
            self.now = max(self.now, end)

        return SimpleNamespace(wait=wait)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within it, optimizers' collectives are held, and their rules take the time of their flops."""
        names = ("all_to_all", "all_reduce_max", "reduce_scatter_parts", "all_gather_parts")
        own = {name: getattr(TorchCollectives, name) for name in names}
        transform = Matrices.transform

        def all_to_all(group: Any, into: Tensor, out: Tensor, receives: Any, sends: Any) -> Any:
            most = max(into.numel() - receives[group.rank], out.numel() - sends[group.rank]) * out.itemsize
            return self.held("all-to-all", own["all_to_all"](group, into, out, receives, sends), most)

        def flags(group: Any, tensor: Tensor) -> Any:
            return self.held("all-reduce", own["all_reduce_max"](group, tensor), 2 * tensor.nbytes * 3 // 4)

        def in_parts(name: str, kind: str) -> Any:
            def start(group: Any, *args: Any) -> Any:
                buffer = max((each for each in args if isinstance(each, Tensor)), key=Tensor.numel)
                nbytes = buffer.nbytes * (group.world_size - 1) // group.world_size
                return self.held(kind, own[name](group, *args), nbytes)

            return mock.patch.object(TorchCollectives, name, start)

        def timed(whole: Matrices, rule: Any, atoms: Sequence[int], stack: Tensor) -> Sequence[Tensor]:
            self.now += sum(whole.atoms[atom].cost for atom in atoms) / REAL.machine.flops_per_second
            return transform(whole, rule, atoms, stack)

        with (
            mock.patch.object(TorchCollectives, "all_to_all", all_to_all),
            mock.patch.object(TorchCollectives, "all_reduce_max", flags),
            in_parts("reduce_scatter_parts", "reduce-scatter"),
            in_parts("all_gather_parts", "all-gather"),
            mock.patch.object(Matrices, "transform", timed),
        ):
            yield
        dist.destroy_process_group(self._ranks)


class TimedPasses(GivenPasses):
    def __init__(self, hands: Hands, names: Any) -> None:
        super().__init__(TOKENS, Tracer(), names)
        self._hands = hands

    def _work(self, what: str, params: Sequence[Tensor], passes: int) -> None:
        flops = sum(self._given.flops(self._names[id(param)], param.numel()) for param in params)
        self._hands.now += int(passes * flops) / REAL.machine.flops_per_second


def done(folder: Path, case: str) -> float:
    """When a step of this rank of four is done, of the real engine on CPUs over gloo."""
    engine_name, options, passes = REALITY[case]
    study = study_in(folder / f"{os.getpid()}.json", engine_name, 4, options, shapes=LAYERS)
    with mock.patch.object(engines, "DEVICE", torch.device("cpu")):
        engine = engines.ENGINES[engine_name](study.worst.planned[0], study.setting)
        for _ in range(2 if passes else 1):  # as in a session
            engine.backward()
            engine.step()
        if not passes:
            engine.backward()
        hands = Hands()
        with hands.used():
            engine.train(TimedPasses(hands, engine.names)) if passes else engine.step()
    return hands.now


@pytest.mark.on_gloo
@pytest.mark.parametrize("case", REALITY)
@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_four_ranks_over_gloo_are_done_when_the_clock_says(tmp_path: Path, ranks: RankPool, case: str) -> None:
    engine, options, passes = REALITY[case]
    study = study_in(tmp_path / "shapes.json", engine, 4, options, shapes=LAYERS)
    planned = study.worst.planned[0]
    with opened(planned, study.setting, recorded_rank(planned)) as session:
        session.record()
        given = GivenPasses(TOKENS, session.tracer, session.engine.names) if passes else None
        expected = play([*records(session, session.record(given))], REAL).seconds
    # In a rehearsal of plain PyTorch, which reads zeros, flags carry the order of buckets in every step.
    assert max(ranks.run(done, tmp_path, case)) == pytest.approx(expected, rel=1e-4 if case == "plain" else 1e-9)


# Passes of a model, and the command.


def test_owned_gradients_are_added_beside_backward(studied: Callable[..., Study]) -> None:
    """What has come in plain PyTorch is added beside the backward pass. Which waits for no bucket but the one whose
    memory it takes, the last but two."""
    study = studied("plain", layout="compact", **SMALL)
    planned = study.worst.planned[0]
    with opened(planned, study.setting, recorded_rank(planned)) as session:
        given = passes_of(session, planned, study.setting, Given(2**12))
        session.record()
        record = session.record(given)
    last = max(place for place, event in enumerate(record) if getattr(event, "what", "") == BACKWARD)
    sent, waited, streams = 0, 0, set[str]()
    for event in record[:last]:
        sent += isinstance(event, Start)
        if isinstance(event, Wait):
            assert event.start == sent - IN_FLIGHT
            waited += 1
        if isinstance(event, Work) and event.at[0] == "arrive":
            streams.add(event.stream)
    assert waited > 1 and streams == {"beside"}


def test_owned_parameters_return_behind_the_forward(studied: Callable[..., Study]) -> None:
    """Parameters in plain PyTorch return behind the next forward pass."""
    studies = (studied("plain", overlap_param_gather=overlap, bucket_mb=0.05) for overlap in (False, True))
    at_once, later = (predicted(study, given=Given(2**22)) for study in studies)
    assert later.given == pytest.approx(at_once.given) and later.seconds < at_once.seconds


def test_the_table_has_a_row_for_each_engine_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ways = {name: timeline.WAYS[name] for name in ("ZeRO 1, 2", "FSDP2, with passes", "plain, with passes")}
    with mock.patch.multiple(timeline, CELLS=(("gpt2-124m", 1, 8),), WAYS=ways, FITS=1e-9):
        monkeypatch.setattr(sys, "argv", ["timeline", "--json", str(tmp_path / "rows.json")])
        timeline.main()
    rows = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "rows.json").read_text())["figures"]
    assert [f"| {' | '.join(row)} |" for row in written] == rows
    assert [row[1] for row in written] == ["ZeRO 1, 2", "FSDP2, with passes"]
    assert all(float(row[5]) >= float(row[4]) >= 1 for row in written), "mean, busiest and whole step are in order"
