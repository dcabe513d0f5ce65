"""What a study's document says at a glance: its title, its deployment in words, its key numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lwopt_backend.pictures.units import byte_unit, count, one_line, percent, ratio, time_unit


@dataclass(frozen=True, slots=True)
class KeyNumber:
    """A number, what it is, and a few words on where it comes from."""

    name: str
    value: str
    note: str
    is_bad: bool = False


def deployment_words(document: Mapping[str, Any]) -> str:
    """The ranks and how they are divided, the engine and the cluster; one line."""
    d = document["deployment"]
    factors = [f"{name} {d[name]:,}" for name in ("dp", "tp", "pp") if d[name] > 1]
    ranks = f"{d['world_size']:,} rank{'s' if d['world_size'] > 1 else ''}"
    words = [ranks if len(factors) < 2 else f"{ranks} = {' × '.join(factors)}"]
    if d["ep"] > 1:
        words.append(f"experts over ep {d['ep']:,} × dp {d['expert_dp']:,}")
    if len(document["stages"]) > 1:
        words.append(f"stage {document['stage']}, the slowest of {len(document['stages'])}")
    engine = f"engine {one_line(document['engine'], 20)}, {one_line(document['layout'], 20)} storage"
    return " · ".join([*words, engine, one_line(document["cluster"]["name"], 30)])


def key_numbers(document: Mapping[str, Any]) -> list[KeyNumber]:
    """Busiest rank over mean, padding, modelled step, peak memory, buckets, groups."""
    peak, owned = document["peak_bytes"], document["cluster"]["memory_bytes"]
    unit = byte_unit(peak)
    return [
        KeyNumber("busiest rank / mean", ratio(document["flops_imbalance"]), f"work counted by {document['cost']}"),
        KeyNumber("padding", f"{percent(document['padding_pct'])} %", f"of {_elements(document['numel'])}"),
        KeyNumber(
            "modelled step",
            time_unit(document["seconds"]).named(document["seconds"]),
            _added(document["seconds_parts"]),
        ),
        KeyNumber("peak memory", unit.named(peak), _memory_words(owned), bool(owned) and peak > owned),
        KeyNumber("buckets", count(document["buckets"]), f"{count(len(document['matrices']))} matrices"),
        KeyNumber("group size", count(document["group_size"]), _groups(document)),
    ]


def _elements(numel: int) -> str:
    return f"{numel / 1e9:,.2f} G elements" if numel >= 1e8 else f"{numel / 1e6:,.2f} M elements"


def _added(seconds: Mapping[str, float]) -> str:
    unit = time_unit(sum(seconds.values()))
    work, wire, latency = (unit.text(seconds[name]) for name in ("compute", "wire", "latency"))
    return f"{work} work + {wire} wire + {latency} latency"


def _memory_words(owned: float) -> str:
    return f"of {byte_unit(owned).named(owned)} per rank" if owned else "per rank"


def _groups(document: Mapping[str, Any]) -> str:
    """Instances of each buffer's group."""
    parts = document["parts"]
    words = [f"{part['instances']:,} instance{'s' if part['instances'] > 1 else ''}" for part in parts]
    if len(parts) == 1:
        return words[0]
    return ", ".join(f"{one_line(p['name'], 20)} {p['group_size']:,} × {p['instances']:,}" for p in parts)
