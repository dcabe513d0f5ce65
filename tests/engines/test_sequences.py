"""Random sequences of what training loops do, on every engine, beside one process of torch.optim.

A program is a list of phases: an engine, a number of ranks, and events (``tests/support/loops.py``). A phase begins
with what the phase before has saved. The right difference is 0.0. A failure prints the shortest of its programs that
still fails; ``run`` repeats it. ``python -m tests.engines.test_sequences`` prints how often what is drawn.
"""

import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.cells import with_full
from tests.support.command_line import succeeds
from tests.support.loops import MATRICES, NAMES, Invalid, One, is_of_deepspeed
from tests.support.loops_on_engines import running
from tests.support.models import largest_difference
from tests.support.ranks import RankPool, gathered

Event = tuple[Any, ...]
Phase = tuple[str, int, list[Event]]
ALONE = ["plain", "plain, lazy", "plain, kept", "plain, late", "plain, copies", "fsdp2", "fsdp2, units"]
DEEPSPEED = [*(f"zero {stage}" for stage in range(4)), *(f"owned {stage}" for stage in range(3))]
MODULES = ["modules", "modules, mixed"]
ENGINES = [*ALONE, *MODULES, *DEEPSPEED]
PATIENCE = 180.0  # seconds for a phase: a rank that fails alone leaves the others waiting
SEEDS, MORE = 3, 60  # of each engine in `make test`, and in `make test-full`
VALUES = {
    "muon": {"lr": [0.01, 0.02], "weight_decay": [0.05, 0.1], "momentum": [0.9, 0.95], "nesterov": [True, False]},
    "adamw": {
        "lr": [1e-3, 3e-3],
        "weight_decay": [0.05, 0.1],
        "betas": [(0.8, 0.95), (0.9, 0.95)],
        "eps": [1e-8, 1e-6],
    },
}
WAYS = {"plain": ["folder", "number", "nested", "flat", "pieces", "copy"]}
WAYS |= {"fsdp2": ["number", "nested", "flat", "full", "pieces", "copy"], "modules": ["folder", "number", "copy"]}


class Drawing:
    """Events of one phase that the pages allow."""

    def __init__(self, draw: random.Random, engine: str, ranks: int, alike: bool) -> None:
        """``alike``: the element-wise parameters have one count of steps, which DeepSpeed needs."""
        self.draw, self.engine, self.ranks, self.alike = draw, engine, ranks, alike
        self.family = engine.partition(",")[0].partition(" ")[0]
        self.of_deepspeed = is_of_deepspeed(engine)
        self.accumulation = draw.choice([1, 2])
        self.saved, self.frozen, self.taken = False, set[str](), set[str]()
        self.events: list[Event] = []

    def happens(self, chance: float) -> bool:
        return self.draw.random() < chance

    def add(self, what: str, *given: Any) -> None:
        self.events.append((what, *given))

    def phase(self) -> list[Event]:
        if self.of_deepspeed and self.happens(0.3):
            self.add("limit", 4096.0)
        for _ in range(self.draw.choice([0, 2, 3, 4, 5])):
            for what in self.draw.choices(self.between(), k=self.draw.randint(0, 3)):
                getattr(self, what)()
            (self.step_of_deepspeed if self.of_deepspeed else self.step)()
        self.thaw()
        for name in sorted(self.taken):  # a save has no state of what is taken out
            self.add("put_back", name)
        return self.events

    # Between steps

    def between(self) -> list[str]:
        names = ["write", "evaluate", "save", "load", "load", "freeze", "reset", "anew"]
        if not self.of_deepspeed:
            names += ["schedule", "take", "reorder", "edit", "swap", "wrong"]
        elif self.stage_groups():
            names += ["take", "reorder"]
        return names

    def stage_groups(self) -> bool:
        """Whether DeepSpeed's param groups have the model's parameters."""
        return self.engine == "zero 0" or self.family == "owned"

    def one_of(self) -> str:
        """A parameter; never one that keeps every backward pass possible."""
        of_both = ["spare.weight"] if self.alike or self.engine == "zero 0" else ["spare.weight", "last.bias"]
        return self.draw.choice(of_both)

    def write(self) -> None:
        rule = self.draw.choice([*VALUES])
        key = self.draw.choice([*VALUES[rule]])
        self.add("write", rule, key, self.draw.choice(VALUES[rule][key]))

    def evaluate(self) -> None:
        self.add("evaluate")

    def schedule(self) -> None:
        self.add("schedule")

    def reorder(self) -> None:
        self.add("reorder")

    def edit(self) -> None:
        # safe_set_full_fp32_param of stage 3 fails on the last rank where the ranks do not divide a weight's elements.
        if self.engine != "zero 3" or self.ranks == 1:
            self.add("edit")

    def swap(self) -> None:
        self.add("swap")

    def wrong(self) -> None:
        edits = ["move", "append", "replace", "repeat"]
        if not self.taken:
            self.add(
                "wrong",
                self.draw.choice([*edits, *(["add group", "remove group"] if self.family != "modules" else [])]),
            )

    def freeze(self) -> None:
        name = self.one_of()
        self.frozen ^= {name}
        self.add("freeze", name, name in self.frozen)

    def take(self) -> None:
        name = self.one_of()
        self.add("put_back" if name in self.taken else "take_out", name)
        self.taken ^= {name}

    def reset(self) -> None:
        matrices = [name for name in MATRICES if self.happens(0.5)]
        elementwise = [name for name in NAMES if name not in MATRICES]
        if self.alike or self.of_deepspeed:
            elementwise = elementwise if self.happens(0.5) else []
        else:
            elementwise = [name for name in elementwise if self.happens(0.5)]
        if matrices + elementwise:
            self.add("reset", matrices + elementwise)

    def thaw(self) -> None:
        """DeepSpeed saves frozen parameters apart, and loads a parameter that is frozen from these alone: KeyError."""
        for name in sorted(self.frozen) if self.of_deepspeed else ():
            self.add("freeze", name, False)
            self.frozen.remove(name)

    def anew(self) -> None:
        """On the same weights, without state. What is frozen then would not be trained."""
        for name in sorted(self.frozen):
            self.add("freeze", name, False)
        for name in sorted(self.taken):
            self.add("put_back", name)
        self.frozen, self.taken = set(), set()
        if not self.of_deepspeed:
            self.add("clear", "both", True)
        self.add("anew")

    def save(self) -> None:
        if not self.taken:
            self.thaw()
            self.saved = True
            self.add("save", "" if self.of_deepspeed else self.draw.choice(WAYS[self.family]))

    def load(self) -> None:
        if self.saved and not self.taken:
            self.thaw()
            self.add("load", self.happens(0.5))

    # Steps

    def factors(self) -> list[float | None]:
        return [24.0 * self.draw.randint(-4, 4) for _ in range(self.ranks)]

    def uses(self) -> list[str]:
        """What a pass uses: something that is never frozen, in each module that it uses."""
        found = [name for name in NAMES if self.happens(0.7)]
        if self.alike and "spare.bias" in found:
            found = [name for name in NAMES if name in found or name == "last.bias"]
        elif self.alike:
            found = [name for name in found if name != "last.bias"]
        needs = {"last.bias": "last.weight", "spare.weight": "first.weight", "spare.bias": "first.weight"}
        if self.family == "modules":
            found += [needs[name] for name in found if name in needs and needs[name] not in found]
        if not {"first.weight", "last.weight"}.intersection(found):
            found.append("first.weight")
        return [name for name in NAMES if name in found]

    def step_of_deepspeed(self) -> None:
        if not self.taken and self.happens(0.15) and (self.stage_groups() or self.events[-1:] != [("save", "")]):
            self.edit()
        uses: list[Any] = self.uses()
        passes: list[Any] = [(self.factors(), uses) for _ in range(self.accumulation)]
        if self.happens(0.15) and self.events[-1:] != [("edit",)]:  # stages 1 to 3 edit masters, and weights in a step
            passes[0][0][self.draw.randrange(self.ranks)] = float("nan")
        self.add("passes", passes, "")

    def step(self) -> None:
        used, scaled, last = set[str](), self.happens(0.2), ""
        if self.family != "modules" and self.happens(0.1):
            self.add("closure", [(self.factors(), self.uses())])
            self.add("clear", "both", True)
            return
        for _ in range(self.draw.randint(1, 2)):
            last = self.passes(scaled, used)
            for what in self.draw.choices(
                ["norm", "zeros", "scale", "drop", "clip_value", "clip"], k=self.draw.randint(0, 2)
            ):
                if last != "scaled":
                    self.gradients(what, sorted(used), last)
        if scaled:
            self.add("unscale")
            for what in self.draw.choices(["norm", "clip_value", "clip"], k=self.draw.randint(0, 2)):
                self.gradients(what, sorted(used), last)
        self.add("step", "scaled" if scaled else self.draw.choice(["", "", "", "autocast", "inference"]))
        if self.happens(0.15):
            self.add("again")
            self.add("clear", "both", self.happens(0.7))
        elif self.happens(0.3) and not self.taken:
            self.add("clear", "model", self.happens(0.5))
        else:
            self.add("clear", "both", self.happens(0.6))

    def passes(self, scaled: bool, used: set[str]) -> str:
        """Several micro-batches; under ``no_sync`` plain PyTorch's ranks may leave out some."""
        on_plain = self.family == "plain"
        how = (
            "scaled"
            if scaled
            else self.draw.choice(["", "", "each", "autocast", *(["apart", "apart"] if on_plain else [])])
        )
        found: list[Any] = []
        uses: list[Any] = self.uses()
        count = self.draw.randint(1, 3)
        for number in range(count):
            factors = self.factors()
            of_ranks = [self.uses() for _ in factors] if on_plain and self.happens(0.3) else uses
            if on_plain and how != "each" and (how == "apart" or number < count - 1) and self.happens(0.4):
                factors[self.draw.randrange(self.ranks)] = None
            found.append((factors, of_ranks))
            for names in of_ranks if isinstance(of_ranks[0], list) else [of_ranks]:
                used.update(names)
        if self.happens(0.12):
            found[-1][0][self.draw.randrange(self.ranks)] = float("nan")
        self.add("passes", found, how)
        return how

    def gradients(self, what: str, used: list[str], last: str) -> None:
        """Gradients of passes under ``no_sync`` alone are each rank's own: they may be dropped, but not read."""
        if what == "drop" and not self.alike and len(used) > 1:
            self.add("drop", self.draw.choice(used))
        elif what == "scale" and last != "apart":
            self.add("scale", self.draw.choice(used))
        elif what == "clip" and last != "apart":
            self.add("clip", self.draw.choice([1.0, float("inf")]))
        elif what == "clip_value" and last != "apart":
            self.add("clip_value", 8192.0)
        elif what in ("norm", "zeros") and last != "apart":
            self.add(what)


def drawn(engine: str, seed: int) -> list[Phase]:
    """A program that begins on that engine."""
    draw = random.Random(f"{engine} {seed}")
    others = [engine] if engine in MODULES else [*ALONE, *DEEPSPEED]
    engines = [engine, *(draw.choice(others) for _ in range(draw.choice([0, 0, 1, 2])))]
    alike = any(map(is_of_deepspeed, engines)) and len(engines) > 1
    counts = [draw.choice([1, 2, 2, 3, 4]) for _ in engines]
    return [(each, ranks, Drawing(draw, each, ranks, alike).phase()) for each, ranks in zip(engines, counts)]


# Running


def run(pools: dict[int, RankPool], program: list[Phase], folder: Path) -> str:
    """What is wrong, in which phase and after which event; nothing if nothing is."""
    for number, (engine, ranks, events) in enumerate(program):
        begins, ends = (folder / str(each) for each in (number, number + 1))
        convert = ""
        if number:
            before = program[number - 1][0]
            convert = "universal" if is_of_deepspeed(engine) else "dcp" if is_of_deepspeed(before) else ""
        try:
            if convert:
                succeeds("convert", begins, f"{begins} converted", "--to", convert, "--json")
            loads = (f"{begins} converted" if convert else str(begins)) if number else ""
            truth = f"{begins} truth" if number else ""
            leaves = number < len(program) - 1
            answers = pools[ranks].run(replay, engine, events, loads, truth, str(ends), leaves, timeout=PATIENCE)
            wrong = answers[0]
        except Exception as error:
            wrong = f"{convert or 'ranks'}: {type(error).__name__}: {error}"
        if wrong:
            return "" if wrong == "Invalid" else f"phase {number}, {wrong}"
    return ""


def replay(engine: str, events: list[Event], loads: str, kept: str, folder: str, leaves: bool) -> str:
    """One phase, on a rank. Its result is the same on all ranks."""
    truth = One()
    passes = [event[1] for event in events if event[0] == "passes"]
    limit = next((event[1] for event in events if event[0] == "limit"), 0.0)
    if kept:
        truth.save("", "")
        truth.saved = torch.load(kept, weights_only=False)
        truth.load(True)
    truth.go_on(engine, dist.get_world_size(), limit)
    how = {"accumulation": len(passes[0]) if passes else 1, "limit": limit, "converted": bool(loads)}
    with running(engine, **how) as side:
        wrong = at_once(lambda: side.enter(loads), "enter") if loads else ""
        for number, event in enumerate(events):
            wrong = wrong or happens(truth, side, event, f"{folder} {number}")
        if leaves and not wrong:
            wrong = at_once(lambda: side.leave(folder), "leave")
            truth.save("", "")
            if dist.get_rank() == 0:
                torch.save(truth.saved, f"{folder} truth")
            dist.barrier()
    return wrong


def at_once(do: Callable[[], Any], what: str) -> str:
    """What goes wrong in it, on any rank."""
    wrong = ""
    try:
        wrong = do() or ""
    except Invalid:
        wrong = "Invalid"
    except Exception as error:
        wrong = f"{what}: {type(error).__name__}: {error}\n{traceback.format_exc()}"
    found: str = next(filter(None, gathered(wrong)), "")
    return found


def happens(truth: One, side: Any, event: Event, folder: str) -> str:
    what, *given = event
    given += [folder] if what == "save" else []
    if what == "limit":
        return ""

    def do() -> str:
        of_side = getattr(side, what)(*given)
        truth.found = getattr(side, "found", None)
        of_truth = getattr(truth, what)(*given)
        if what == "norm" and of_side == pytest.approx(of_truth, rel=1e-6, nan_ok=True):
            return ""
        if what in ("norm", "zeros", "again", "wrong") and of_side != of_truth:
            return f"{what}: expected {of_truth}, found {of_side}"
        mine, theirs = side.weights(), truth.weights()
        theirs = {name: tensor for name, tensor in theirs.items() if name in mine}
        difference = largest_difference(mine, theirs) if mine else 0.0
        return f"{what}: weights differ by {difference}" if difference != 0.0 else ""

    return at_once(do, what)


# Shrinking


def kind_of(wrong: str) -> str:
    """A failure without its numbers, in whichever phase."""
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", "", wrong.partition(", ")[2])[:120]


def fewer(program: list[Phase]) -> Iterator[list[Phase]]:
    """Without a phase, then without an event, from the last on."""
    for number in reversed(range(len(program))):
        if len(program) > 1:
            yield program[:number] + program[number + 1 :]
    for number in reversed(range(len(program))):
        engine, ranks, events = program[number]
        for at in reversed(range(len(events))):
            yield [*program[:number], (engine, ranks, events[:at] + events[at + 1 :]), *program[number + 1 :]]


def shortened(program: list[Phase], fails: Callable[[list[Phase]], bool]) -> list[Phase]:
    """A program of which no phase and no event can be left out."""
    found = True
    while found:
        found = False
        for each in fewer(program):
            if fails(each):
                program, found = each, True
                break
    return program


def told(pools: dict[int, RankPool], program: list[Phase], folder: Path) -> str:
    """A failure, and the shortest program that ends in it; nothing if nothing is wrong."""
    folders = (folder / str(number) for number in range(10**6))

    def wrong_in(each: list[Phase]) -> str:
        into = next(folders)
        into.mkdir()
        return run(pools, each, into)

    if not (wrong := wrong_in(program)):
        return ""
    short = shortened(program, lambda each: kind_of(wrong_in(each)) == kind_of(wrong))
    lines = [
        f"    ({engine!r}, {ranks}, [\n" + "".join(f"        {e},\n" for e in events) + "    ]),\n"
        for engine, ranks, events in short
    ]
    return f"{wrong}\nrun(rank_pools, [\n{''.join(lines)}], tmp_path)"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("seed",), with_full([(seed,) for seed in range(SEEDS)], [(seed,) for seed in range(MORE)]))
def test_a_random_loop_trains_the_weights_of_one_process(
    rank_pools: dict[int, RankPool], engine: str, seed: int, tmp_path: Path
) -> None:
    if said := told(rank_pools, drawn(engine, seed), tmp_path):
        pytest.fail(said)


@pytest.mark.parametrize("stage", range(4))
def test_a_run_that_took_no_step_goes_on_elsewhere(rank_pools: dict[int, RankPool], stage: int, tmp_path: Path) -> None:
    """DeepSpeed's files of ZeRO have no state then, and the next engine refused what was made of them."""
    one: Event = ("passes", [([24.0, 48.0], [*NAMES])], "")
    for number, (engine, events) in enumerate({"owned 0": [one], "plain": [one, ("step", "")]}.items()):
        (folder := tmp_path / str(number)).mkdir()
        wrong = run(rank_pools, [(f"zero {stage}", 2, []), (engine, 2, events)], folder)
        assert not wrong


@pytest.mark.parametrize(("engine", "way"), [("plain", "flat"), ("plain", "nested"), ("fsdp2", "nested")])
def test_state_of_what_is_frozen_comes_back(
    rank_pools: dict[int, RankPool], engine: str, way: str, tmp_path: Path
) -> None:
    """torch's set_optimizer_state_dict leaves it out, and plain PyTorch refused the rest."""
    frozen = "spare.weight"
    others = [name for name in NAMES if name != frozen]

    def step(uses: Sequence[str]) -> list[Event]:
        return [("passes", [([24.0, 48.0], uses)], ""), ("step", ""), ("clear", "both", True)]

    events = [*step(NAMES), ("freeze", frozen, True), *step(others), ("save", way), *step(others), ("load", True)]
    events += [*step(others), ("freeze", frozen, False), *step(NAMES)]
    assert not run(rank_pools, [(engine, 2, events)], tmp_path)


def coverage() -> str:
    """How often each event is drawn in the seeds of `make test`, by the kind of engine."""
    counts = Counter[tuple[str, str]]()
    for engine in ENGINES:
        for of, ranks, events in (phase for seed in range(SEEDS) for phase in drawn(engine, seed)):
            for what, *given in events:
                kind = {"passes": given[-1:], "save": given, "step": given, "wrong": given}.get(what, [])
                counts[" ".join([what, *map(str, kind)]).strip(), of] += 1
            counts[f"{ranks} ranks", of] += 1
    rows = sorted({what for what, _ in counts})
    lines = [f"| event | {' | '.join(ENGINES)} | all |", "| --- " * (len(ENGINES) + 2) + "|"]
    for what in rows:
        of_engines = [counts[what, engine] for engine in ENGINES]
        lines.append(f"| {what} | {' | '.join(map(str, of_engines))} | {sum(of_engines)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(coverage())
