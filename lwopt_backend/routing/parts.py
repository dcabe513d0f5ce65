"""Which outputs of a weight are one matrix, from what became of them (``follow`` has the principle)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lwopt_backend.routing.numbered import Outputs, every, first, outputs_of, places
from lwopt_backend.routing.tracks import End, Ends


class Parted(NamedTuple):
    """The outputs of each matrix in a weight, in their order; none if the ``forward`` did not show them.

    ``unclear`` if outputs are together by one step and apart by another.
    """

    parts: list[Outputs]
    unclear: bool = False


def partition(ends: Ends) -> Parted:
    """The matrices in a weight; found out once.

    The matrices of latent attention are those of DeepSeek's report (arXiv 2405.04434, 2.1): W_UQ and W_QR in the
    queries' weight, W_DKV and W_KR in the one that compresses, W_UK and W_UV in the one that expands.
    """
    if "parts" not in ends.read:
        ends.read["parts"] = _partition(ends)
    found: Parted = ends.read["parts"]
    return found


def _partition(ends: Ends) -> Parted:
    linked = Links(ends)
    apart = [(a, b) for a, b in ((linked.all_of(a), linked.all_of(b)) for a, b in ends.apart) if not a & b]
    ended = [(linked.all_of(one.outputs), one) for one in ends.ends]
    kept = [outputs for outputs, one in ended if not any(_is_between(one, outputs, pair) for pair in apart)]
    whole = every(ends.count)
    if any(_crosses(one, pair) for outputs, one in ended for pair in apart if _is_between(one, outputs, pair)):
        return Parted([], True)
    found = _exact(_largest(kept), ends.count)
    rejoined = [tuple(map(linked.all_of, pieces)) for pieces in ends.rejoined]
    left = [piece for piece in map(linked.all_of, (*kept, *ends.left)) if piece != whole]
    if not found and ends.left:
        joined = [pair for pieces in rejoined for pair in zip(pieces, pieces[1:])]
        found = _exact(_coarsest(_joined(left, joined)), ends.count)
        sizes = {part.bit_count() for part in found if part in kept}
        left_over = [part for part in found if part not in kept and part.bit_count() not in sizes]
        found = found if all(_is_named(part, ends, linked) for part in left_over) else []
    if len(found) < 2 and (latent := _latent(ends.latent[:2], rejoined, left, whole)):
        return Parted(latent)
    return Parted([part for one in found for part in (_latent(ends.latent[:2], rejoined, left, one) or [one])])


PLAIN = re.compile(r"^(mixed_|new_|fused_)|(_(states?|layers?|proj|heads?|pass|out))+$")
CALLED = {
    "q": r"q|quer(y|ies)|xq",
    "k": r"k|keys?|xk",
    "v": r"v|values?|xv",
    "gate": r"gates?",
    "up": r"ups?",
    "x": r"x|hidden",
}


def said_by(variable: str) -> str:
    """What the name of a variable says that a part is, if anything."""
    plain = PLAIN.sub("", variable)
    return next((name for name, pattern in CALLED.items() if re.fullmatch(pattern, plain, re.IGNORECASE)), "")


def _is_named(part: Outputs, ends: Ends, linked: Links) -> bool:
    """Whether a variable's name says what a part is. The forward did not come to its use, and it may be several."""
    names = (
        name for names in (ends.names, ends.added) for name, outputs in names.items() if linked.all_of(outputs) == part
    )
    return any(said_by(name) not in ("", "x") for name in names)


class Links:
    """Outputs that belong together because they were summed over, or turned into each other."""

    def __init__(self, ends: Ends) -> None:
        self._count = ends.count
        self._labels: np.ndarray | None = None
        if ends.links:
            pairs = np.concatenate(ends.links, axis=1)
            labels = np.arange(ends.count)
            while True:  # the lowest output of each group spreads to all of it
                lowest = np.minimum(labels[pairs[0]], labels[pairs[1]])
                before = labels.copy()
                np.minimum.at(labels, pairs[0], lowest)
                np.minimum.at(labels, pairs[1], lowest)
                labels = labels[labels]
                if np.array_equal(labels, before):
                    break
            self._labels = labels

    def all_of(self, outputs: Outputs) -> Outputs:
        """The outputs with all those to which they are linked."""
        if self._labels is None or not outputs:
            return outputs
        chosen = np.zeros(self._count, dtype=bool)
        chosen[self._labels[places(outputs)]] = True
        bits = np.packbits(chosen[self._labels], bitorder="little")
        return int.from_bytes(bits.tobytes(), "little")


def with_links(ends: Ends) -> Ends:
    """With all outputs to which they are linked under each name."""
    linked = Links(ends)
    of_names = ({name: linked.all_of(outputs) for name, outputs in some.items()} for some in (ends.names, ends.added))
    names, added = of_names
    multiplied = [(linked.all_of(one), linked.all_of(other)) for one, other in ends.multiplied]
    activated = [linked.all_of(outputs) for outputs in ends.activated]
    return replace(ends, names=names, added=added, multiplied=multiplied, activated=activated)


def _is_between(one: End, outputs: Outputs, pair: tuple[Outputs, Outputs]) -> bool:
    """Whether a step took outputs of both sides of a pair."""
    return bool(outputs & pair[0]) and bool(outputs & pair[1])


def _crosses(one: End, pair: tuple[Outputs, Outputs]) -> bool:
    """Whether the step read outputs of both sides in one run, and not, say, queries and keys each by head."""
    if one.numbers is None:
        return False
    if one.is_one_run:
        return True
    runs = one.numbers.movedim(one.axis, -1).flatten(0, -2)
    for run in runs:
        outputs = outputs_of(run, max(pair[0].bit_length(), pair[1].bit_length(), int(run.max()) + 1))
        if outputs & pair[0] and outputs & pair[1]:
            return True
    return False


def _latent(
    sizes: Sequence[int], rejoined: Sequence[tuple[Outputs, ...]], left: Sequence[Outputs], outputs: Outputs
) -> list[Outputs]:
    """The parts of some outputs that are the two of latent attention, by their ``sizes``; none if there are none."""
    if not sizes:
        return []
    count = outputs.bit_count()
    for pieces in (*rejoined, _coarsest([piece for piece in left if piece != outputs])):
        exact = _of({piece & outputs for piece in pieces}, outputs)
        if exact and sorted(n.bit_count() * sum(sizes) for n in exact) == sorted(size * count for size in sizes):
            return exact
    return []


def _joined(sets: Sequence[Outputs], pairs: Sequence[tuple[Outputs, Outputs]]) -> list[Outputs]:
    """The sets, those that a pair has outputs of as one."""
    found = [*dict.fromkeys(sets)]
    for pair in pairs:
        both = [one for one in found if any(one & other for other in pair)]
        if both:
            together = pair[0] | pair[1]
            for one in both:
                together |= one
            found = [one for one in found if one not in both] + [together]
    return found


def _largest(sets: Iterable[Outputs]) -> list[Outputs]:
    different = [*dict.fromkeys(sets)]
    return [one for one in different if not any(one != other and one & other == one for other in different)]


def _coarsest(sets: Sequence[Outputs]) -> list[Outputs]:
    """Sets without common outputs, the largest first."""
    found: list[Outputs] = []
    for one in sorted(sets, key=int.bit_count, reverse=True):
        if not any(one & other for other in found):
            found.append(one)
    return found


def _exact(sets: Sequence[Outputs], count: int) -> list[Outputs]:
    """The sets in the order of the outputs, if each of ``count`` outputs is in one of them."""
    return _of(sets, every(count))


def _of(sets: Iterable[Outputs], outputs: Outputs) -> list[Outputs]:
    some, union = [one for one in sets if one], 0
    for one in some:
        union |= one
    exact = union == outputs and sum(map(int.bit_count, some)) == outputs.bit_count()
    return sorted(some, key=first) if exact else []
