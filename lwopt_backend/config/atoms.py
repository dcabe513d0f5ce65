"""The option ``atoms``: how a weight of several matrices is divided into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from lwopt_backend.config.options import Count, parse, suggestion
from lwopt_backend.plan.atoms import Parts, equal, grouped, undivided
from lwopt_backend.rules.protocol import option

# The setting ``atoms``: which matrices are in a parameter, by globs on names::
#
#     {"*.attn.c_attn.weight": {"qkv": [768, 768, 768]},          q, k and v one after the other
#      "*.linear_qkv.weight": {"qkv": [512, 128, 128], "groups": 8},   again and again for each query group
#      "*.o_proj.weight": {"heads": 12}, "*.gate_up_proj": {"gate_up": "interleaved"},
#      "*.w_in.weight": {"split_sizes": [1024, 64]},
#      "*.conv.weight": "flatten", "*.experts.w1": "stack", "*.fused.weight": "whole",
#      "w_qkv": {"split_sizes": [64, 64, 64], "stored": "inputs_first"}}
#
# Sizes are numbers of outputs, however the matrix is stored, and apply to every matrix of a stack.

Word = Literal["whole", "stack", "flatten"]
WORDS: tuple[Word, ...] = ("whole", "stack", "flatten")
STORED = {"inputs_first": True, "outputs_first": False}


@dataclass(frozen=True)
class Division:
    """How the outputs of a matrix are divided; exactly one of the first four is given."""

    split_sizes: tuple[Count, ...] | None = option(None, "consecutive parts with these numbers of outputs", "dion's")
    heads: int | None = option(None, "number of heads; each head is an equal part", "dion's num_heads", ge=1)
    qkv: tuple[Count, Count, Count] | None = option(
        None, "outputs of q, k and v; with groups, those of one group", "Megatron's split_qkv"
    )
    gate_up: Literal["halves", "interleaved"] | None = option(
        None, "'halves': gate, then up; 'interleaved': gate, up, gate, up, ..."
    )
    groups: int = option(1, "number of times that qkv or split_sizes repeat", "Megatron's query groups", ge=1)
    stored: Literal["inputs_first", "outputs_first"] | None = option(
        None, "'inputs_first' for a weight that is used as x @ w, (inputs, outputs); None: as it is found"
    )

    @property
    def transposed(self) -> bool | None:
        """Whether it says that the matrix is stored as (inputs, outputs)."""
        return None if self.stored is None else STORED[self.stored]

    def __post_init__(self) -> None:
        """Raises ValueError unless one form is given, and groups fit it."""
        forms = [key for key in ("split_sizes", "heads", "qkv", "gate_up") if getattr(self, key) is not None]
        if not forms and self.stored is not None and self.groups == 1:
            return
        if len(forms) != 1 or self.split_sizes == ():
            found = " and ".join(map(repr, forms)) or "none"
            raise ValueError(f"expected one of 'split_sizes', 'heads', 'qkv', 'gate_up', with sizes; found {found}")
        if self.groups > 1 and forms[0] in ("heads", "gate_up"):
            raise ValueError(f"expected 'groups' with 'qkv' or 'split_sizes' only, found it with {forms[0]!r}")

    def parts(self, outputs: int, whose: str) -> Parts:
        """The parts of ``outputs`` outputs. Raises ValueError, beginning with ``whose``, if they do not add up."""
        if self.heads is not None or self.gate_up is not None:
            count = self.heads or 2
            if outputs % count:
                raise ValueError(f"{whose}: expected {count} equal parts, found {outputs} outputs; correct the number")
            if self.heads is not None:
                return equal(count, outputs // count, "head")
            halves = self.gate_up == "halves"
            return grouped(("gate", "up"), *(([outputs // 2] * 2, 1) if halves else ((1, 1), outputs // 2)))
        sizes = self.qkv or self.split_sizes or ()
        if not sizes:
            return undivided(outputs)
        if sum(sizes) * self.groups != outputs:
            found = f"{'+'.join(map(str, sizes))}{f', {self.groups} times' if self.groups > 1 else ''}"
            raise ValueError(f"{whose}: expected sizes whose sum is its {outputs} outputs, found {found}; correct them")
        names = ("q", "k", "v") if self.qkv else [f"part{number}" for number in range(len(sizes))]
        return grouped(names, sizes, self.groups)

    def fits(self, outputs: int) -> bool:
        """Whether the sizes add up to so many outputs."""
        try:
            return bool(self.parts(outputs, ""))
        except ValueError:
            return False


@dataclass(frozen=True, slots=True)
class AtomSettings:
    """Settings by glob, in order; the first glob that matches one of a parameter's names applies.

    Without one, what the model's own modules declare applies: ``declared``, by a parameter's name, with its source.
    """

    by_glob: tuple[tuple[str, Word | Division], ...] = ()
    declared: Mapping[str, tuple[str, Word | Division]] = field(default_factory=dict)

    @classmethod
    def parse(cls, settings: Mapping[str, Any], source: str = "atoms") -> AtomSettings:
        """Raises ValueError, with the ``source``, for a value that is not a division."""
        if not isinstance(settings, Mapping):
            raise ValueError(f"{source}: expected a mapping of globs to divisions; found {settings!r}")
        found: list[tuple[str, Word | Division]] = []
        for glob, value in settings.items():
            where, words = f"{source} {glob!r}", ", ".join(map(repr, WORDS))
            if isinstance(value, Mapping):
                found.append((str(glob), parse(Division, value, where)))
            elif value in WORDS:
                found.append((str(glob), value))
            elif isinstance(value, str):
                raise ValueError(f"{where}: unknown word {value!r}; {suggestion(value, WORDS)}")
            else:
                form = f"one of {words} or a mapping such as {{'heads': 12}}"
                raise ValueError(f"{where}: expected {form}; found {value!r}")
        return cls(tuple(found))

    @classmethod
    def checked(cls, settings: dict[str, Any]) -> dict[str, Any]:
        """``settings`` unchanged. Raises ValueError as ``parse`` does."""
        cls.parse(settings)
        return settings

    def of(self, names: Sequence[str]) -> tuple[str, Word | Division] | None:
        """Where the setting for the parameter with these names is from, and the setting; or None."""
        for glob, setting in self.by_glob:
            if any(fnmatchcase(name, glob) for name in names):
                return f"atoms {glob!r}", setting
        return next((self.declared[name] for name in names if name in self.declared), None)

    def transposed(self, names: Sequence[str]) -> bool | None:
        """Whether a setting says that the parameter is stored as (inputs, outputs); None if none does."""
        found = self.of(names)
        return found[1].transposed if found is not None and isinstance(found[1], Division) else None

    def makes_matrix(self, names: Sequence[str], shape: Sequence[int]) -> str | None:
        """The reason why a parameter of more than two dimensions is updated as matrices, or None."""
        found = self.of(names)
        if found is None or len(shape) < 3 or 0 in shape or found[1] == "whole":
            return None
        return f"{len(shape)}-D, set by {found[0]}"
