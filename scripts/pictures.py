"""Draw docs/idea.svg, the idea of layer-wise sharding, or docs/step.svg, a rank's step from a trace of the clock.

python scripts/pictures.py
python -m benchmarks.timeline --hf config.json --world-size 64 --engine fsdp2 --passes --trace step.json
python scripts/pictures.py step.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT, TOP, ROW = 600, 388, 74, 66
COLUMNS, WIDE, HIGH = (92, 272, 452), 84, 12  # left edges; a slice
OWNER, OWNED = 2, "BCAD"  # the rank that owns A; what each rank owns
SLICES = ("#3b7dd8", "#2a9d8f", "#d9822b", "#a05bb5")
COLORS = {"rule": SLICES[0], "out": SLICES[1], "back": SLICES[2], "elementwise": SLICES[3]}  # by a word of the name
STYLE = """
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.on { fill: #ffffff; font-size: 11px }
.card { fill: #f6f8fa } .quiet { fill: #59636e } .way { stroke: #59636e; fill: none; stroke-width: 1.5 }
.other { fill: #e2e6ea; stroke: #b6bec7 } .frame { fill: none; stroke: #1f2328; stroke-width: 1.5 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .on { fill: #ffffff } .card { fill: #161b22 } .quiet { fill: #9aa5b1 } .way { stroke: #9aa5b1 }
  .other { fill: #30363d; stroke: #4c555f } .frame { stroke: #e6edf3 } }
@media (max-width: 450px) { text { font-size: 16px } }
"""


def rectangle(x: float, y: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {look}/>'


def words(x: float, y: float, *lines: str, look: str = 'text-anchor="middle"') -> Iterator[str]:
    for number, line in enumerate(lines):
        yield f'<text x="{x}" y="{y + 18 * number}" {look}>{line}</text>'


def middle(rank: int) -> float:
    return TOP + ROW * rank + ROW / 2


def idea() -> Iterator[str]:
    """A matrix cut over four ranks, its owner, and the way back."""
    left, center, right = COLUMNS
    yield rectangle(0, 0, WIDTH, HEIGHT, 'rx="10" class="card"')
    yield from words(left + WIDE / 2, 30, "1. Every rank stores", "a slice of matrix A")
    yield from words(center + WIDE / 2, 30, "2. The owner of A", "orthogonalizes it once")
    yield from words(right + WIDE / 2, 30, "3. Every rank updates", "its slice of A")
    for rank, color in enumerate(SLICES):
        y = middle(rank)
        yield from words(16, y + 5, f"rank {rank}", look='class="quiet"')
        for x in (left, right):
            yield rectangle(x, y - HIGH / 2, WIDE, HIGH, f'rx="2" fill="{color}"')
        piece = middle(OWNER) + (rank - 1.5) * HIGH
        for x, start, end in ((left + WIDE + 4, y, piece), (center + WIDE + 4, piece, y)):
            far = x + (center - left - WIDE) - 12
            curve = f"M{x} {start} C{x + 45} {start} {far - 45} {end} {far} {end}"
            yield f'<path d="{curve}" class="way" marker-end="url(#end)"/>'
        if rank == OWNER:
            for number, slice_color in enumerate(SLICES):
                yield rectangle(center, y + (number - 2) * HIGH, WIDE, HIGH, f'fill="{slice_color}"')
            yield rectangle(center, y - 2 * HIGH, WIDE, 4 * HIGH, 'class="frame"')
        else:
            yield rectangle(center, y - 2 * HIGH, WIDE, 4 * HIGH, 'class="other"')
            yield from words(center + WIDE / 2, y + 5, OWNED[rank], look='text-anchor="middle" class="quiet"')
    below = "Other matrices (B, C, D) have other owners, so every rank works."
    yield from words(WIDTH / 2, HEIGHT - 18, below, look='text-anchor="middle" class="quiet"')


def step(trace: Path, rank: int = 0, before: float = 2.0) -> Iterator[str]:
    """Compute and wire of a rank, from ``before`` milliseconds before the first exchange on."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["pid"] == rank]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [(rows[e["tid"]], e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3) for e in events if e["ph"] == "X"]
    zero = min(begin for _, name, begin, _ in spans if name.startswith("exchange")) - before
    scale = (WIDTH - 100) / (max(end for *_, end in spans) - zero)
    yield rectangle(0, 0, WIDTH, 150, 'rx="10" class="card"')
    for number, row in enumerate(("compute", "wire")):
        yield from words(16, 53 + 46 * number, row, look='class="quiet"')
        for _, name, begin, end in (span for span in spans if span[0] == row and span[3] > zero):
            x = 84 + (max(begin, zero) - zero) * scale
            color = next((color for word, color in COLORS.items() if word in name), "#8a94a0")
            label = name.removeprefix("exchange ").removeprefix("rule ")
            width = (end - max(begin, zero)) * scale
            yield rectangle(round(x, 1), 32 + 46 * number, round(width, 1), 30, f'rx="1" fill="{color}"')
            if width > 5.9 * len(label):
                yield from words(
                    round(x + width / 2, 1), 52 + 46 * number, label, look='class="on" text-anchor="middle"'
                )
    for tick in range(0, int((WIDTH - 100) / scale) + 1, 5):
        yield from words(round(84 + tick * scale, 1), 134, f"{tick} ms", look='class="quiet" text-anchor="middle"')


def svg(height: int, lines: Iterator[str]) -> str:
    point = '<path d="M0 0 L8 4 L0 8 z" fill="#8a94a0"/>'
    arrow = (
        f'<marker id="end" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">{point}'
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    return "\n".join([head, f"<style>{STYLE}</style>", f"<defs>{arrow}</marker></defs>", *lines, "</svg>", ""])


if __name__ == "__main__":
    if sys.argv[1:]:
        (DOCS / "step.svg").write_text(svg(150, step(Path(sys.argv[1]))))
    else:
        (DOCS / "idea.svg").write_text(svg(HEIGHT, idea()))
