"""Coefficients of the quintic Newton-Schulz iteration, by step: the published tables by name, or one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

Triple = tuple[float, float, float]  # a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X
Coefficients = Triple | Sequence[Triple] | str


@dataclass(frozen=True, slots=True)
class Table:
    """Coefficients of consecutive steps, and how they are meant to be used.

    A table that ``ends`` was composed for so many steps, no more and no fewer; after another its last row goes on.
    ``margin`` multiplies the norm that matrices are divided by, so that rounding takes no singular value above what
    the polynomials are made for.
    """

    triples: tuple[Triple, ...]
    ends: bool
    margin: float = 1.0


def _with_margin(triples: Sequence[Triple], margin: float) -> tuple[Triple, ...]:
    """p(x / margin) in place of every polynomial but the last."""
    *all_but_last, last = triples
    return (*((a / margin, b / margin**3, c / margin**5) for a, b, c in all_but_last), last)


TABLES = {
    # Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.
    "simple": Table(((3.4445, -4.7750, 2.0315),), ends=False),
    # Cesista, You and Jordan, "Squeezing 1-2% Efficiency Gains Out of Muon", 2025; also modded-nanogpt's.
    "quintic": Table(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        ends=True,
    ),
    # Amsel, Persson, Musco and Gower, "The Polar Express", arXiv 2505.16932, with its safety factor 1.01.
    "polar_express": Table(
        _with_margin(
            (
                (8.287212018145622, -23.59588651909882, 17.300387312530923),
                (4.107059111542197, -2.9478499167379084, 0.54484310829266),
                (3.9486908534822938, -2.908902115962947, 0.5518191394370131),
                (3.3184196573706055, -2.488488024314878, 0.5100489401237208),
                (2.3006520199548186, -1.6689039845747518, 0.4188073119525678),
                (1.8913014077874002, -1.2679958271945908, 0.37680408948524996),
                (1.8750014808326703, -1.2500016453583913, 0.37500016452664514),
                (1.875, -1.25, 0.375),
            ),
            1.01,
        ),
        ends=False,
        margin=1.01,
    ),
    # The same, composed for 5 steps with a safety factor of 1.02: what dion, nanochat and modded-nanogpt run.
    "polar_express_5": Table(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        ends=True,
        margin=1.02,
    ),
}


def table_of(coefficients: Coefficients) -> Table:
    """By name; of one triple, which every step takes; of a list, one triple for every step.

    Raises ValueError for anything else.
    """
    if isinstance(coefficients, str):
        if coefficients in TABLES:
            return TABLES[coefficients]
    elif _is_triple(coefficients):
        a, b, c = coefficients
        return Table(((a, b, c),), ends=False)
    elif isinstance(coefficients, Sequence) and coefficients and all(map(_is_triple, coefficients)):
        return Table(tuple((a, b, c) for a, b, c in filter(_is_triple, coefficients)), ends=True)
    raise ValueError(
        "ns_coefficients: expected three numbers, a list of ns_steps times three numbers, or one of "
        f"{', '.join(map(repr, TABLES))}; found {coefficients!r}"
    )


def _is_triple(given: object) -> TypeGuard[Triple]:
    return (
        isinstance(given, Sequence)
        and len(given) == 3
        and all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in given)
    )


def by_step(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """One triple for each of ``steps`` steps. Raises ValueError where a table was made for another number of steps.

    Published implementations disagree on what follows the end of a table: Emerging-Optimizers begins anew,
    pytorch_optimizer repeats the last row, dion ignores the number of steps. So only tables whose authors say that the
    last row goes on are continued; for anything else write out as many triples as there are steps.
    """
    table = table_of(coefficients)
    count = len(table.triples)
    if table.ends and steps != count:
        named = f"{coefficients!r} is" if isinstance(coefficients, str) else "the list given is"
        raise ValueError(
            f"ns_coefficients: {named} for {count} steps, but ns_steps is {steps}; set ns_steps to {count}, or write "
            f"out {steps} times three numbers"
        )
    return (table.triples + table.triples[-1:] * (steps - count))[:steps]
