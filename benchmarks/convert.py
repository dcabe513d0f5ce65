"""``lwopt convert`` beside DeepSpeed's ``ds_to_universal`` and the disk: time, MB/s and memory, in one run.

    python benchmarks/convert.py                         checkpoints of 2 GB, three rounds
    python benchmarks/convert.py --mb 200 --rounds 5 --workers 4
    python benchmarks/convert.py --mb 8000 --cold --without-stock
    python benchmarks/convert.py --json convert.json     write it down

Sources are a ZeRO-2 checkpoint of AdamW in bf16, which a stock DeepSpeed engine saves on two ranks, and Megatron's
torch_dist of the same shapes. Both become DeepSpeed's universal format. The disk's own speed is that of a plain copy of
the source's files. Each is a program of its own, imports included, until the disk holds its files: DeepSpeed's tool
leaves them to the system, so that flushing them is added to its time. They take turns; figures are medians. Files of
the source are in the system's cache, as they were just written, if there is memory; with ``--cold`` each is measured
once more with the source on the disk alone, as a checkpoint is that another machine wrote. Each begins ``SETTLE``
seconds after files were removed: a virtual machine gives freed memory back to its host in about two, and what it then
takes again costs more than the copy itself. A copy that began at once had it for nothing; a program that imports first
did not.

"CPU s" is user and system time of all its processes, which other work on the machine changes least. "of a copy" is the
time beside a copy of the source; "of as many" beside a copy of as many bytes as are written; "bytes alone" is the same
without what the program takes to start, which is its time for a checkpoint of a few kB; "CPU alone" is that in CPU
seconds, of the copy's.

``lwopt convert`` reads everything once, and checks it while it writes (checksums; master weights against weights);
``ds_to_universal`` checks nothing, and writes everything twice. The program fails if the two made different tensors
of the ZeRO-2 checkpoint, or if the memory of ``lwopt convert`` goes 1 GB beyond the largest tensor.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from convert_memory import Finished, copy, flush, nbytes, run
from convert_sources import largest, save_deepspeed, save_megatron, shapes
from rich.console import Console
from rich.table import Table

from lwopt_backend.checkpoint.deepspeed import universal as deepspeed_universal
from lwopt_backend.checkpoint.differences import differences

LIMIT = 10**9  # bytes of memory beyond the largest tensor
SETTLE = 3  # seconds
OURS, STOCK, COPY, START = "lwopt convert", "ds_to_universal", "copy", "lwopt convert of kB"
CONVERT = "import sys; from lwopt_backend.cli import main; sys.argv[0] = 'lwopt'; main()"


@dataclass
class Row:
    """What one program does to one source, over all rounds."""

    source: str
    program: str
    source_bytes: int
    largest: int
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    written: int = 0
    peak: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def worked(self) -> float:
        return statistics.median(self.cpu)


def measure(row: Row, program: Callable[[Path], Finished], folder: Path, cold: Path | None) -> None:
    """Run a program once more. The files of ``cold`` are dropped from the system's cache before."""
    target = folder / "made" / row.program.replace(" ", "_")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if cold is not None:
        flush(cold, forget=True)
    time.sleep(SETTLE)
    finished = program(target)
    row.seconds.append(finished.seconds)
    row.cpu.append(finished.cpu)
    row.written = nbytes(target)
    row.peak = max(row.peak, finished.peak)


def programs(
    source: Path, step: Path, small: Path, workers: int, stock: bool, log: Path
) -> Mapping[str, Callable[[Path], Finished]]:
    """By name; each converts into a folder. ``step`` is the source's folder of the step, ``small`` a few kB."""

    def ours(target: Path, source: Path = source) -> Finished:
        options = ["--to", "universal", "--workers", str(workers), "--json"]
        return run([sys.executable, "-c", CONVERT, "convert", str(source), str(target), *options], log)

    def theirs(target: Path) -> Finished:
        folders = ["--input_folder", str(step), "--output_folder", str(target / step.name)]
        counts = ["--num_extract_workers", str(workers), "--num_merge_workers", str(workers), "--inject_missing_state"]
        done = run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *counts], log)
        start = time.perf_counter()
        flush(target)
        return Finished(done.seconds + time.perf_counter() - start, done.cpu, done.peak)

    def starting(target: Path) -> Finished:
        return ours(target, small)

    return {COPY: partial(copy, step), **({STOCK: theirs} if stock else {}), START: starting, OURS: ours}


def compare(folder: Path) -> None:
    """Raises SystemExit if DeepSpeed's tool and ours made different tensors of the ZeRO-2 checkpoint."""
    stock, ours = (
        deepspeed_universal.read(folder / "made" / name / "global_step1") for name in (STOCK, "lwopt_convert")
    )
    wrong = [f"{found.key} of {found.name}: {found.what}" for found in differences(stock, ours) if found.what]
    if wrong:
        raise SystemExit(f"{STOCK} (A) and {OURS} (B) differ:\n" + "\n".join(wrong[:20]))


def table(rows: Sequence[Row], workers: int) -> Table:
    drawn = Table(title=f"to DeepSpeed's universal format, {workers} workers", title_justify="left")
    for heading in ("source", "program"):
        drawn.add_column(heading, no_wrap=True)
    headings = ("s", "CPU s", "MB read", "MB written", "of a copy", "of as many", "bytes alone", "CPU alone", "peak MB")
    for heading in headings:
        drawn.add_column(heading, justify="right")
    for row in rows:
        base, start = (next(r for r in rows if (r.source, r.program) == (row.source, name)) for name in (COPY, START))
        sizes = [f"{size / 1e6:.0f}" for size in (row.source_bytes, row.written)]
        times = [f"{row.median:.1f}", f"{row.worked:.1f}"]
        if row.program == START:
            drawn.add_row(row.source, row.program, *times)
            continue
        share = row.written / row.source_bytes
        ratios = [row.median / base.median, row.median / base.median / share]
        alone = [(row.median - start.median) / base.median / share] if row.program == OURS else []
        shown = [f"{ratio:.2f}x" for ratio in (*ratios, *alone)] + [""] * (not alone)
        cpu = (row.worked - start.worked if alone else row.worked) / base.worked / share
        memory = f"{row.peak / 1e6:.0f}" if row.peak else ""
        drawn.add_row(row.source, row.program, *times, *sizes, *shown, f"{cpu:.2f}x", memory)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=2000, help="of each source")
    parser.add_argument("--width", type=int, default=1024, help="of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="of both programs")
    parser.add_argument("--cold", action="store_true", help="also with the source on the disk alone")
    parser.add_argument("--without-stock", action="store_true", help="do not run ds_to_universal")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args()
    os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    console = Console(width=130 if not Console().is_terminal else None, highlight=False)
    found = shapes(options.width, int(options.mb * 1e6 / 14))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.folder) as name, console.status("saving sources") as status:
        folder = Path(name)
        steps = {
            "ZeRO-2, AdamW": folder / "zero2" / "global_step1",
            "Megatron torch_dist": folder / "megatron" / "iter_0000001",
        }
        small = folder / "small"
        save_megatron(small / "iter_0000001", shapes(16, 1))
        for source, step in steps.items():
            save_deepspeed(step.parent, found, 2) if step.name == "global_step1" else save_megatron(step, found)
            flush(step)
            stock = step.name == "global_step1" and not options.without_stock
            done = programs(step.parent, step, small, options.workers, stock, folder / "log")
            for cold in (False, True)[: 1 + options.cold]:
                named = source + ", cold" * cold
                of_source = {name: Row(named, name, nbytes(step), largest(found)) for name in done}
                for turn, (name, program) in itertools.product(range(options.rounds), done.items()):
                    status.update(f"{named}: {name}, round {turn + 1}")
                    measure(of_source[name], program, folder, step if cold else None)
                rows += of_source.values()
            if stock:
                compare(folder)
            for used in (folder / "made", step.parent):
                shutil.rmtree(used)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    console.print(table(rows, options.workers))
    wrong = [
        f"{row.program} of {row.source}: {row.peak / 1e6:.0f} MB at most, more than the largest tensor of "
        f"{row.largest / 1e6:.0f} MB and {LIMIT / 1e6:.0f} MB"
        for row in rows
        if row.program == OURS and row.peak > row.largest + LIMIT
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
