"""``python -m tests.support.zoo [LIBRARY[.FAMILY] ...]``: what the product says of every model of four libraries.

Each family has a process of its own, with a limit of memory and of time: what hits one is counted, others go on.
Prints each family that stopped, each disagreement with the judge, and at the end families by kinds of weights, by how
they are told, and by what the judge says, with the false cuts apart. Fails where there is a false cut.

``--json=FILE`` also writes what was found, one family a line. Families that the file has are not run again, but
counted: a run that was ended is continued so. ``--trace`` prints where building stopped.
"""

import gc
import importlib
import json
import multiprocessing
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.judge import JudgeFailed
from tests.support.zoo import vision_operators
from tests.support.zoo.compare import Verdict, ran, verdicts
from tests.support.zoo.libraries import LIBRARIES, Family, shortened

GIBIBYTES = 8  # of one family, beyond the libraries
SECONDS = 120  # of a CPU
SHARED = ("torch._dynamo", "transformers.modeling_utils", "transformers.masking_utils", "transformers.generation")
# Cuts that the judge does not see, by family and the end of a weight's name, and why each is right
ARGUED = {
    ("transformers.falcon", "query_key_value.weight"): "71 heads of queries, a head of keys and one of values",
    ("transformers.focalnet", "projection_in.weight"): "queries, the context that they are multiplied with, and the "
    "weights of levels, which are one small matrix, as a router's",
    ("transformers", "per_layer_model_projection.weight"): "Gemma: the norm is of each layer's outputs by themselves, "
    "and no layer takes another's",
    ("transformers.wavlm", "gru_rel_pos_linear.weight"): "two gates that are multiplied, each a sum of four outputs",
    ("diffusers.Flux2Transformer2DModel", "to_qkv_mlp_proj.weight"): "values and an MLP's outputs, side by side",
}


class Outcome(NamedTuple):
    """``unbuilt``: why the family could not be built or judged; ``stopped``: why its pass ended before its end."""

    family: str
    unbuilt: str = ""
    stopped: str = ""
    kinds: list[Verdict] = []
    seconds: float = 0.0

    @property
    def library(self) -> str:
        return self.family.partition(".")[0]


def argued(name: str, weight: str) -> str:
    """Why a cut is right that the judge calls false; empty if it is not."""
    found = (
        why for (family, end), why in ARGUED.items() if f"{name}.".startswith(f"{family}.") and weight.endswith(end)
    )
    return next(found, "")


def judged(family: Family) -> tuple[list[Verdict], str]:
    """Of one family, and why its pass stopped, if it did."""
    model = shortened(family.build().eval())
    args, kwargs = family.example(model)
    judge, stopped = ran(model, args, kwargs)
    if stopped:  # perhaps for want of a layer
        model = family.build().eval()
        args, kwargs = family.example(model)
        judge, stopped = ran(model, args, kwargs)
    example = None if stopped else (args, kwargs)
    return [*verdicts(model, judge, example, full=family.whole and not stopped)], stopped


def limited(family: Family, answer: Connection) -> None:
    """In a process of its own: send the outcome of one family, of which memory and time are limited."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + GIBIBYTES * 2**30,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    begin = time.process_time()
    try:
        found, stopped = judged(family)
        answer.send(Outcome(family.name, "", stopped, found, time.process_time() - begin))
    except (Exception, JudgeFailed) as error:
        if "--trace" in sys.argv:
            traceback.print_exc()
        said = f"{type(error).__name__}: {error}".replace("\n", " ")[:140]
        if isinstance(error, MemoryError) or "can't allocate memory" in said:
            said = f"needs more than {GIBIBYTES} GiB"
        answer.send(Outcome(family.name, said, "", [], time.process_time() - begin))


def outcome(family: Family) -> Outcome:
    """Of one family; its process may end in any way."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=limited, args=(family, sender), daemon=True)  # ends with this one
    child.start()
    sender.close()
    try:
        found: Outcome = receiver.recv()
    except (EOFError, OSError):
        child.join()
        ended = -(child.exitcode or 0)
        took = ended in (signal.SIGXCPU, signal.SIGKILL)
        why = f"takes more than {SECONDS} CPU-seconds" if took else f"ends with signal {ended}"
        found = Outcome(family.name, why)
    child.join()
    return found


def warmed() -> None:
    """Import here what every pass imports, once for all families."""
    torch.set_num_threads(1)  # whose threads would not be in a fork
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        judged(Family("", lambda: model, lambda _: ((torch.zeros(2, 4),), {})))
    for name in SHARED:
        importlib.import_module(name)
    gc.freeze()  # so that no collection copies the memory that forks share


def outcomes(wanted: list[str], log: Path | None) -> Iterator[Outcome]:
    """Of the families that were asked for; those of an earlier run, which ``log`` has, first."""
    done = set[str]()
    for line in log.read_text().splitlines() if log is not None and log.exists() else ():
        before = Outcome(*json.loads(line))
        done.add(before.family)
        yield before._replace(kinds=[Verdict(one[0], tuple(one[1]), *one[2:]) for one in before.kinds])
    warmed()
    for library, families in LIBRARIES.items():
        if wanted and not any(word.partition(".")[0] == library for word in wanted):
            continue
        print(f"{library} {version(library)}", flush=True)
        for family in families():
            asked = not wanted or any(f"{family.name}.".startswith(f"{word}.") for word in wanted)
            if not asked or family.name in done:
                continue
            found = outcome(family)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            yield found


def main() -> None:
    vision_operators.load()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    log = next((Path(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("--json=")), None)
    found = list[Outcome]()
    for one in outcomes(wanted, log):
        found.append(one)
        said = f"not built: {one.unbuilt}" if one.unbuilt else f"{len(one.kinds)} kinds"
        stopped = f", stopped: {one.stopped}" if one.stopped else ""
        print(f"{one.family}: {said}, {one.seconds:.1f} s{stopped}", flush=True)
        for kind in one.kinds:
            if kind.fault:
                unclear = ", said to be unclear" if kind.said else ""
                print(f"    {kind.weight} {kind.shape} | {kind.is_} | {kind.fault}{unclear} | {kind.why}", flush=True)
    if summary(found):
        raise SystemExit(1)


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> None:
    """Print rows with columns of equal width; numbers are the last ones."""
    cells = [head, *(tuple(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    numbers = {place for row in rows for place, cell in enumerate(row) if isinstance(cell, int)}
    for row in cells:
        print(" | ".join(f"{c:>{w}}" if n in numbers else f"{c:<{w}}" for n, (c, w) in enumerate(zip(row, widths))))


def summary(found: list[Outcome]) -> int:
    """Print counts of all that was found; how many cuts are false."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    families: dict[tuple[str, str, str, str], set[str]] = defaultdict(set)
    kinds: Counter[tuple[str, str, str, str]] = Counter()
    whys: Counter[tuple[str, str, str]] = Counter()
    for one in found:
        counts[one.library]["not built" if one.unbuilt else "stopped" if one.stopped else "whole"] += 1
        for what, why in (("not built", one.unbuilt), ("stopped", one.stopped)):
            if why:
                whys[one.library, what, why] += 1
        for kind in one.kinds:
            is_argued = kind.fault == "false cut" and argued(one.family, kind.weight)
            key = one.library, kind.is_, kind.told, "argued cut" if is_argued else kind.fault or "agrees"
            families[key].add(one.family)
            kinds[key] += 1
            counts[one.library]["kinds"] += 1
            counts[one.library]["seen"] += kind.is_ not in ("unseen", "computed with")
            counts[one.library]["differ"] += kind.fault not in ("", "false cut")
    print("\nWhere a pass stops, or a family cannot be built")
    table(("library", "what", "why", "families"), [(*key, count) for key, count in sorted(whys.items())])
    print("\nKinds of weights: a family's weights that differ in more than the number of a layer")
    head = ("library", "the judge saw", "told as", "the judge says", "families", "kinds of weights")
    table(head, [(*key, len(families[key]), count) for key, count in sorted(kinds.items())])
    print("\nFamilies")
    columns = ("whole", "stopped", "not built", "kinds", "seen", "differ")
    table(
        ("library", "families", *columns),
        [
            (library, sum(of[one] for one in columns[:3]), *(of[one] for one in columns))
            for library, of in counts.items()
        ],
    )
    cuts = [(one.family, kind) for one in found for kind in one.kinds if kind.fault == "false cut"]
    false = [(name, kind) for name, kind in cuts if not argued(name, kind.weight)]
    print(f"\ncuts that the judge does not see, and why they are right: {len(cuts) - len(false)}")
    for name, kind in cuts:
        if why := argued(name, kind.weight):
            print(f"{name} | {kind.weight} | {why}")
    print(f"\nfalse cuts: {len(false)}")
    for name, kind in false:
        print(f"{name} | {kind.weight} {kind.shape} | {kind.is_} | {kind.why}")
    return len(false)


if __name__ == "__main__":
    main()
