"""Figures as PNG and SVG, and files that are written whole or not at all."""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.figure import Figure

from lwopt_backend.pictures.look import INK, MUTED, PAPER, RULE, look

DPI = 140
# Colours that a page sets by its mode; the names are those of the report's style sheet.
PAGE_COLORS = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--rule)", PAPER: "var(--card)"}
NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def png(figure: Figure) -> bytes:
    """The figure on white."""
    buffer = io.BytesIO()
    with _saving():
        figure.savefig(buffer, format="png", dpi=DPI)
    return buffer.getvalue()


def inline_svg(figure: Figure, name: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page, transparent, its ids beginning with ``name``.

    Texts stay texts and take the page's font. Equal figures give equal strings.
    """
    buffer = io.StringIO()
    with _saving():
        figure.savefig(buffer, format="svg", transparent=True, metadata=NO_METADATA)
    text = buffer.getvalue()
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text[text.index("<svg") :], count=1, flags=re.DOTALL)
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href=", "href=")
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg)
    for color, variable in PAGE_COLORS.items():
        svg = re.sub(rf"(fill|stroke): {color}", rf"\1: {variable}", svg)
    return svg.strip()


@contextmanager
def _saving() -> Iterator[None]:
    """A name may hold letters that the font lacks; a PNG shows boxes for them, which is no reason to warn."""
    with look(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        yield


def write_whole(path: str | Path, content: bytes) -> None:
    """Write a file so that nobody sees half of it; if that fails, what was there before stays. Makes its folder."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
