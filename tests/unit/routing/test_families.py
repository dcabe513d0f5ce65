"""In every family of transformers, a linear is divided where its forward takes its outputs apart, and nowhere else."""

import warnings

import pytest

from tests.support.families import FAMILIES, family

FEW = ("bamba", "deepseek_v3", "gpt2", "gpt_neox", "lfm2", "phi3", "qwen3_next", "t5")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.full) for n in FAMILIES])
def test_linears_are_divided_as_their_family_does(name: str) -> None:
    """Linears are divided as a family's forward divides their outputs."""
    with warnings.catch_warnings(action="ignore"):
        try:
            found = family(name)
        except Exception as error:  # of a package that is not installed, or a configuration without defaults
            pytest.skip(f"cannot be built: {error!r}"[:150])
    assert not [verdict for verdict in found.verdicts if verdict.fault and not verdict.said]
    assert name not in FEW or "unseen" not in {verdict.is_ for verdict in found.verdicts}
