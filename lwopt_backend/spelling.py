"""Naming the nearest known name in an error."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known name most like ``name``, case aside, or None if nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[close[0]] if close else None


def suggestion(name: str, known: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """A clause for an error message: the nearest known name, or all of them."""
    known = list(known)
    close = nearest(name, known)
    return f"did you mean {spelled(close)}?" if close else f"known: {', '.join(map(repr, known))}"
