"""The setting ``atoms``: by glob on parameters' names, which matrices are in a parameter.

::

    {"*.attn.c_attn.weight": {"qkv": [768, 768, 768]},          q, k and v one after the other
     "*.linear_qkv.weight": {"qkv": [512, 128, 128], "groups": 8},   again and again for each query group
     "*.o_proj.weight": {"heads": 12}, "*.gate_up_proj": {"gate_up": "interleaved"},
     "*.w_in.weight": {"split_sizes": [1024, 64]},
     "*.conv.weight": "flatten", "*.experts.w1": "stack", "*.fused.weight": "whole"}

Sizes are numbers of outputs, however the matrix is stored, and of every matrix of a stack alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from pydantic import model_validator

from lwopt_backend.options import Count, Options, option, parse
from lwopt_backend.plan.blocks import Block, Grid, Parts, divided, equal, grouped, undivided
from lwopt_backend.spelling import suggestion

Word = Literal["whole", "stack", "flatten"]
WORDS: tuple[Word, ...] = ("whole", "stack", "flatten")


class Division(Options):
    """How the outputs of a matrix are divided; one of the first four."""

    split_sizes: tuple[Count, ...] | None = option(None, "parts of these many outputs, one after the other", "dion's")
    heads: Count | None = option(None, "equal parts, as many as there are heads", "dion's num_heads")
    qkv: tuple[Count, Count, Count] | None = option(
        None, "outputs of q, k and v; with groups, of one", "Megatron's split_qkv"
    )
    gate_up: Literal["halves", "interleaved"] | None = option(None, "gate and up, or gate, up, gate, up, ...", "ours")
    groups: Count = option(1, "how often qkv or split_sizes come", "Megatron's query groups")

    @model_validator(mode="after")
    def _one_of_them(self) -> Division:
        forms = [key for key in ("split_sizes", "heads", "qkv", "gate_up") if getattr(self, key) is not None]
        if len(forms) != 1 or self.split_sizes == ():
            found = " and ".join(map(repr, forms)) or "none"
            raise ValueError(f"expected one of 'split_sizes', 'heads', 'qkv', 'gate_up', with sizes; found {found}")
        if self.groups > 1 and forms[0] in ("heads", "gate_up"):
            raise ValueError(f"'groups' goes with 'qkv' or 'split_sizes'; found it with {forms[0]!r}")
        return self

    def parts(self, outputs: int, whose: str) -> Parts:
        """The parts of so many outputs. Raises ValueError that begins with ``whose`` if they do not add up."""
        if self.heads is not None or self.gate_up is not None:
            count = self.heads or 2
            if outputs % count:
                raise ValueError(f"{whose} has {outputs} outputs, which do not divide into {count} equal parts")
            if self.heads is not None:
                return equal(count, outputs // count, "head")
            halves = self.gate_up == "halves"
            return grouped(("gate", "up"), *(([outputs // 2] * 2, 1) if halves else ((1, 1), outputs // 2)))
        sizes = self.qkv or self.split_sizes or ()
        if sum(sizes) * self.groups != outputs:
            times = f", {self.groups} times," if self.groups > 1 else ""
            together = f"{'+'.join(map(str, sizes))}{times} are {sum(sizes) * self.groups}"
            raise ValueError(f"{whose} has {outputs} outputs, but {together}")
        names = ("q", "k", "v") if self.qkv else [f"part{number}" for number in range(len(sizes))]
        return grouped(names, sizes, self.groups)


@dataclass(frozen=True, slots=True)
class AtomSettings:
    """By glob, in order, what was set; the first glob that matches one of a parameter's names counts."""

    by_glob: tuple[tuple[str, Word | Division], ...] = ()

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> AtomSettings:
        """Raises ValueError for a value that is no division, naming the glob, what was expected and what was found."""
        if not isinstance(settings, Mapping):
            raise ValueError(f"atoms: expected a mapping of globs to divisions; found {settings!r}")
        return cls(tuple((str(glob), _parsed(glob, value)) for glob, value in settings.items()))

    def of(self, names: Sequence[str]) -> tuple[str, Word | Division] | None:
        """The glob and the setting of the parameter with these names, or None."""
        matches = (each for each in self.by_glob if any(fnmatchcase(name, each[0]) for name in names))
        return next(matches, None)

    def makes_matrix(self, names: Sequence[str], shape: Sequence[int]) -> str | None:
        """The reason for which a parameter of more than two dimensions is to be updated as matrices, or None."""
        found = self.of(names)
        if found is None or len(shape) < 3 or 0 in shape or found[1] == "whole":
            return None
        glob, _ = found
        return f"{len(shape)}-D, set by atoms {glob!r}"


def blocks_of(
    name: str, shape: Sequence[int], transposed: bool, glob: str, setting: Word | Division
) -> tuple[Block, ...]:
    """The blocks of parameter ``name`` by a setting. Raises ValueError for one that does not fit its shape."""
    whose = f"atoms {glob!r}: {name!r} of shape {tuple(shape)}"
    if setting in ("stack", "flatten") and len(shape) < 3:
        raise ValueError(f"{whose}: {setting!r} is for parameters of three dimensions or more")
    if setting == "flatten":
        return divided(Grid.of(shape, 0), undivided(shape[0]))
    outputs = shape[-1] if transposed else shape[-2]
    parts = setting.parts(outputs, whose) if isinstance(setting, Division) else undivided(outputs)
    return divided(Grid.of(shape, len(shape) - 2), parts, transposed=transposed)


def _parsed(glob: str, value: Any) -> Word | Division:
    where = f"atoms {glob!r}"
    if isinstance(value, str):
        if value not in WORDS:
            raise ValueError(f"{where}: unknown word {value!r}; {suggestion(value, WORDS)}")
        return value
    if not isinstance(value, Mapping):
        words = ", ".join(map(repr, WORDS))
        raise ValueError(f"{where}: expected one of {words} or a mapping such as {{'heads': 12}}; found {value!r}")
    return parse(Division, value, where)
