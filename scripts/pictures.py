"""Draw the pictures of docs/: from plans, routing, formats and defaults of the package, and from results.

`python scripts/pictures.py` writes docs/pictures/, docs/plan.png and docs/rules.png; it needs the extras hf and plots.
Tests draw those of docs/pictures/ again, and fail if the package would draw others; docs/plan.png has the digest of its
plan. They are as wide as a phone, and those of docs/pictures/ follow the reader's colour scheme.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lwopt_backend.checkpoint.formats import FORMATS, TARGETS
from lwopt_backend.cli import app
from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.explanation import Given
from lwopt_backend.plan.atoms import Atom
from lwopt_backend.plan.buffers.layout import BufferParam
from lwopt_backend.plan.buffers.plan import plan_buffers
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.planner.picture import MEMORY, write_png
from lwopt_backend.rules.muon import Muon

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 390
COLORS = ["#3b7dd8", "#d9822b", "#2a9d8f", "#9b59b6", "#c2485a", "#5d8a3a", "#b8860b", "#4c6fa8"]
STYLE = """text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.b { font-weight: 600 } .q { fill: #59636e } .i { fill: #ffffff } .card { fill: #f6f8fa }
.box { fill: #e2e6ea; stroke: #b6bec7 } .way { stroke: #59636e; fill: none; stroke-width: 1.5 }
.pad { fill: #ffffff; stroke: #8a94a0; stroke-dasharray: 3 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .q { fill: #9aa5b1 } .i { fill: #ffffff }
  .card { fill: #161b22 } .box { fill: #30363d; stroke: #4c555f } .way { stroke: #9aa5b1 } .pad { fill: #161b22 } }"""
HEAD = '<path d="M0 0 L8 4 L0 8 z" fill="#8a94a0"/>'


class Drawing:
    """A picture that grows downwards: shapes by their left upper corners."""

    def __init__(self) -> None:
        self.shapes: list[str] = []
        self.bottom = 0.0

    def rect(self, x: float, y: float, width: float, height: float, css: str = "box", fill: str = "") -> None:
        color = f' fill="{fill}"' if fill else f' class="{css}"'
        self.shapes.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"{color}/>')
        self.bottom = max(self.bottom, y + height)

    def text(self, x: float, y: float, words: str, css: str = "", anchor: str = "start") -> None:
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{css}">{escape(words)}</text>')
        self.bottom = max(self.bottom, y + 4)

    def box(self, x: float, y: float, width: float, lines: Sequence[str], fill: str = "") -> float:
        """Words in a box; returns its height."""
        height = 10 + 17 * len(lines)
        self.rect(x, y, width, height, fill=fill)
        for number, line in enumerate(lines):
            self.text(x + width / 2, y + 18 + 17 * number, line, "i" if fill else "", "middle")
        return height

    def arrow(self, *points: tuple[float, float]) -> None:
        path = " ".join(f"{'L' if number else 'M'}{x:g} {y:g}" for number, (x, y) in enumerate(points))
        self.shapes.append(f'<path d="{path}" class="way" marker-end="url(#end)"/>')

    def svg(self, title: str) -> str:
        height = self.bottom + 12
        marker = '<marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">',
            f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n<defs>{marker}{HEAD}</marker></defs>",
            f'<rect x="0" y="0" width="{WIDTH}" height="{height:g}" rx="8" class="card"/>',
            *self.shapes,
        ]
        return "\n".join([*lines, "</svg>"]) + "\n"


WAYS = {  # of a bucket: what is done where, and the collective between two of them
    "ZeRO 1 to 3, FSDP2": (
        ("each rank:", "momentum of", "its elements"),
        "all-to-all",
        ("owner:", "the rule on", "a whole matrix"),
        "all-to-all",
        ("each rank:", "applies its", "elements"),
    ),
    "ZeRO 0": (
        ("each rank:", "has every", "gradient"),
        "",
        ("owner:", "momentum,", "the rule"),
        "broadcast",
        ("each rank:", "applies the", "update"),
    ),
    'plain PyTorch; DeepSpeed with "storage": "owned"': (
        ("backward:", "a bucket is", "full"),
        "reduce-scatter",
        ("owner:", "momentum,", "rule, apply"),
        "all-gather",
        ("forward:", "waits for", "new values"),
    ),
}


def buckets() -> str:
    """The tasks of ``runtime/step.py`` and ``engines/buffers``, on each engine."""
    drawing, y = Drawing(), 24.0
    for engine, (first, there, second, back, third) in WAYS.items():
        drawing.text(12, y, engine, "b")
        for number, lines in enumerate((first, second, third)):
            drawing.box(12 + 132 * number, y + 26, 102, lines, COLORS[2] if number == 1 else "")
        for number, way in enumerate((there, back)):
            x = 114 + 132 * number
            drawing.arrow((x + 2, y + 56), (x + 28, y + 56))
            drawing.text(x + 15, y + 19, way, "q", "middle")
        y += 116
    return drawing.svg("A bucket's way on each engine")


MATRICES = {"qkv": (3, 1), "o": (1, 1), "up": (4, 1), "down": (1, 4)}  # of a layer, in units of the width


def layouts(ranks: int = 4, width: int = 64) -> str:
    """The same two layers in a padded and in a compact bucket, as ``plan_buffers`` plans them."""
    params = []
    for name, (rows, columns) in [(f"{layer}.{n}", s) for layer in (0, 1) for n, s in MATRICES.items()]:
        shape = (rows * width, columns * width)
        atom = Atom(name, shape, newton_schulz_flops(shape))
        params.append(BufferParam(name, shape[0] * shape[1], "float32", atom))
    drawing, y = Drawing(), 24.0
    for layout in ("padded", "compact"):
        plan = plan_buffers(params, ranks, layout, sum(param.numel for param in params))
        (bucket,) = plan.buckets
        longest = max(stop - start for start, stop in bucket.parts)
        drawing.text(12, y, f"{layout}: {bucket.padding / bucket.numel:.0%} of the bucket is padding", "b")
        scale = (WIDTH - 74) / longest
        for rank, (start, stop) in enumerate(bucket.parts):
            top = y + 12 + 30 * rank
            drawing.text(12, top + 16, f"rank {rank}", "q")
            if stop > start:
                drawing.rect(62, top, scale * (stop - start), 24, "pad")
            for slot in bucket.slots:
                if start <= slot.offset < stop:
                    left, span = 62 + scale * (slot.offset - start), scale * slot.numel
                    name = params[slot.param].name
                    drawing.rect(left, top, span, 24, fill=COLORS[[*MATRICES].index(name.partition(".")[2])])
                    if span > 44:
                        drawing.text(left + span / 2, top + 17, name, "i", "middle")
        y += 12 + 30 * ranks + 26
    return drawing.svg("A padded and a compact bucket of two layers on four ranks")


class Block(nn.Module):
    """Grouped queries in one weight, group by group, and a modulation of six outputs' parts by the time."""

    def __init__(self, width: int = 64, groups: int = 2, heads: int = 2, channels: int = 8) -> None:
        super().__init__()
        self.groups, self.heads, self.channels = groups, heads, channels
        self.qkv = nn.Linear(width, groups * (heads + 2) * channels, bias=False)
        self.o = nn.Linear(groups * heads * channels, width, bias=False)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(nn.functional.silu(time))[:, None].chunk(3, dim=-1)
        mixed = self.qkv(self.norm(x) * (1 + scale) + shift)
        mixed = mixed.view(*x.shape[:2], self.groups, self.heads + 2, self.channels)
        q, k, v = mixed.split([self.heads, 1, 1], dim=3)
        q, k, v = (each.flatten(2, 3).transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(self.heads, dim=1) for each in (k, v))
        read = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + gate * self.o(read.transpose(1, 2).flatten(2))


def fused() -> str:
    """Two fused weights as they are stored, and the matrices that routing finds in them."""
    with torch.device("meta"):
        model, example = Block(), ((torch.empty(2, 5, 64), torch.empty(2, 64)), {})
    _, _, found = Given({"matrix": "muon"}, None, example).decide(HostConfig, model)
    drawing, y = Drawing(), 24.0
    for name, title in (("qkv.weight", "qkv, two query groups"), ("modulation.weight", "modulation")):
        blocks = found.divided[name].blocks
        rows = sum(block.rows.size for block in blocks)
        drawing.text(12, y, f"{title}: stored, and its matrices", "b")
        scale, top = 132 / rows, y + 14
        for number, block in enumerate(blocks):
            stripes = block.rows
            for run in range(stripes.count):
                start = top + scale * (stripes.start + run * stripes.pitch)
                drawing.rect(40, start, 96, scale * stripes.length, fill=COLORS[number])
                middle = start + scale * stripes.length / 2
                if scale * stripes.length > 14:
                    drawing.text(88, middle + 4, block.name, "i", "middle")
            height = scale * stripes.size
            left = 166 + 74 * number
            drawing.rect(left, top, 64, height, fill=COLORS[number])
            drawing.text(left + 32, top + height / 2 + 4, block.name, "i", "middle")
            drawing.text(left + 32, top + height + 16, f"{block.shape[0]} x {block.shape[1]}", "q", "middle")
        y = top + 132 + 40
    return drawing.svg("Fused weights, cut into the matrices in them")


def modules() -> str:
    """Two modules on ranks of their own, and what goes between them."""
    drawing = Drawing()
    for top, name, ranks, color in ((24, "vision", 2, COLORS[1]), (146, "language", 6, COLORS[0])):
        drawing.text(12, top, f"{name}: its own engine, groups and plan", "b")
        for rank in range(ranks):
            first = 0 if name == "vision" else 2
            drawing.box(12 + 62 * rank, top + 12, 54, ("rank", str(first + rank)), color)
    drawing.arrow((70, 84), (70, 120))
    drawing.text(84, 106, "activations and their gradients: your code", "q")
    drawing.text(12, 228, "All ranks decide together:", "b")
    for number, words in enumerate(("is every gradient finite?", "the norm of all gradients", "does the step count?")):
        drawing.text(24, 250 + 20 * number, f"- {words}")
    return drawing.svg("Two modules, each on its own ranks")


LOADED_BY = {
    "universal": ("DeepSpeed, any", "stage and ranks"),
    "dcp": ("FSDP2, plain", "PyTorch, any ranks"),
    "accelerate": ("Accelerate, Trainer", "on FSDP2"),
    "safetensors": ("transformers:", "weights alone"),
}


def formats() -> str:
    """What ``lwopt convert`` reads and writes, and who loads it."""
    drawing, step = Drawing(), 34
    drawing.text(12, 22, "read", "b")
    drawing.text(WIDTH - 12, 22, "written for", "b", "end")
    middle = 34 + step * len(FORMATS) / 2
    for number, name in enumerate(FORMATS):
        top = 34 + step * number
        drawing.rect(12, top, 118, 26)
        drawing.text(71, top + 18, name, "", "middle")
        drawing.arrow((130, top + 13), (166, middle))
    drawing.box(167, middle - 22, 62, ("lwopt", "convert"), COLORS[2])
    for number, name in enumerate(TARGETS):
        top = 34 + step * len(FORMATS) * (number + 0.5) / len(TARGETS) - 32
        drawing.arrow((229, middle), (247, top + 32))
        drawing.rect(248, top, 134, 64)
        drawing.text(315, top + 18, name, "b", "middle")
        for line, words in enumerate(LOADED_BY[name]):
            drawing.text(315, top + 36 + 17 * line, words, "", "middle")
    top = 34 + step * len(FORMATS) + 16
    drawing.text(12, top, "Optimizer state, counters and schedule go along;", "q")
    drawing.text(12, top + 18, "safetensors and pytorch-bin have weights alone.", "q")
    return drawing.svg("Formats, and the arrows between them")


def rates() -> str:
    """Which rate, by what the reader has."""
    drawing = Drawing()
    drawing.box(75, 14, 240, ("Do you have a learning rate", "for AdamW?"), COLORS[2])
    drawing.arrow((150, 58), (98, 92))
    drawing.arrow((240, 58), (292, 92))
    drawing.text(104, 76, "yes", "b", "end")
    drawing.text(286, 76, "no", "b")
    default = Muon().adjust_lr_fn or "original"
    drawing.box(8, 94, 182, ("adjust_lr_fn:", '"match_rms_adamw"', "lr: AdamW's rate", "AdamW's part: the same"))
    drawing.box(
        200, 94, 182, ("adjust_lr_fn:", f'"{default}", the default', "lr: 0.01, 0.02, 0.04", "AdamW's part: 3e-4, say")
    )
    drawing.text(195, 196, "Matrices then move as under AdamW, or as Muon's", "q", "middle")
    drawing.text(195, 213, "authors train. The two never mix: 0.02 with the", "q", "middle")
    drawing.text(195, 230, "first is far too high.", "q", "middle")
    return drawing.svg("Which learning rate for Muon")


ENGINES = {  # as in the table of the README
    "ZeRO 1": ["--engine", "zero1"],
    "ZeRO 2": ["--engine", "zero2"],
    "ZeRO 3": ["--engine", "zero3"],
    "FSDP2": ["--engine", "fsdp2", "--dtype", "float32"],
    "plain": ["--engine", "plain"],
}


def documents() -> dict[str, dict[str, Any]]:
    """The plans of Llama-3.1-8B on 64 ranks, by engine: some ten seconds each."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="bfloat16").save_pretrained(folder)
        for name, given in ENGINES.items():
            words = ["plan", "--hf", folder, "--world-size", "64", *given, "--json"]
            found[name] = json.loads(CliRunner().invoke(app, words).stdout)
    return found


KINDS = ("parameters", "gradients", "masters", "state", "workspace", "exchange")


def memory(plans: Mapping[str, Mapping[str, Any]]) -> str:
    """What the fullest rank holds in a step, by engine, as stacked bars."""
    most = {}
    for name, plan in plans.items():
        of_ranks = plan["memory_per_rank"]
        fullest = max(of_ranks, key=lambda rank: sum(rank[kind] for kind in KINDS))
        most[name] = {kind: fullest[kind] / 2**30 for kind in KINDS}
    scale = (WIDTH - 120) / max(sum(of.values()) for of in most.values())
    drawing, y = Drawing(), 44.0
    drawing.text(12, 22, "GiB of a rank in a step: Llama-3.1-8B, 64 ranks", "b")
    for name, of in most.items():
        drawing.text(12, y + 15, name)
        left = 62.0
        for kind, value in of.items():
            drawing.rect(left, y, scale * value, 21, fill=MEMORY[kind])
            left += scale * value
        drawing.text(left + 6, y + 15, f"{sum(of.values()):.3g}", "b")
        y += 31
    for number, kind in enumerate(KINDS):
        x, top = 12 + 126 * (number % 3), y + 6 + 22 * (number // 3)
        drawing.rect(x, top, 13, 13, fill=MEMORY[kind])
        drawing.text(x + 19, top + 11, kind)
    return drawing.svg("Memory of a rank on five engines")


def pictures() -> dict[str, str]:
    """Those that take no plan of a large model, by the name of the file."""
    return {
        "buckets": buckets(),
        "layouts": layouts(),
        "fused": fused(),
        "modules": modules(),
        "formats": formats(),
        "rates": rates(),
    }


def main() -> None:
    folder = ROOT / "docs" / "pictures"
    folder.mkdir(exist_ok=True)
    plans = documents()
    for name, text in (pictures() | {"memory": memory(plans)}).items():
        (folder / f"{name}.svg").write_text(text)
    write_png(plans["plain"] | {"source": "Llama-3.1-8B"}, ROOT / "docs" / "plan.png")
    sys.path.insert(0, str(ROOT / "examples"))
    from compare_rules import write_dots

    rows = json.loads((ROOT / "benchmarks" / "results" / "rules.json").read_text())["rules"]
    write_dots(ROOT / "docs" / "rules.png", rows)


if __name__ == "__main__":
    main()
