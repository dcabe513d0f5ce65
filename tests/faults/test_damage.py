"""Flipped, cut, zeroed, swapped, doubled, deleted, mixed files of every format: refused, or without consequence."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import SEED, count
from tests.support.command_line import succeeds, torch_dist, torch_format
from tests.support.damage import random_damage, save
from tests.support.ranks import RankPool

# Damages of which another checkpoint may come, unnoticed, as long as a format's writer makes no manifest: tensors of
# one shape change places, runs are mixed, options change in DCP's metadata, and safetensors has no checksums. A format
# that has a manifest has no row: all damage is refused then, or without consequence.
WITHOUT_A_MANIFEST = {
    "plain": {"flipped", "zeroed", "mixed"},
    "zero 0": {"mixed"},
    "zero 2": {"swapped", "doubled", "mixed"},
    "zero 3": {"swapped", "doubled", "mixed"},
    "owned 1": {"mixed"},
    "universal": {"swapped", "doubled", "mixed"},
    "dcp": {"flipped", "zeroed", "mixed"},
    "safetensors": {"flipped", "zeroed", "mixed"},
}
NATIVE = ("plain", "zero 0", "zero 2", "zero 3", "owned 1")
FORMATS = (*WITHOUT_A_MANIFEST, "megatron", "megatron torch")


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    folder = tmp_path_factory.mktemp("saved")

    def find(form: str) -> list[Path]:
        if form.startswith("megatron"):
            write = torch_dist if form == "megatron" else torch_format
            return [write(folder / form)] * 2
        found, engine = [], form if form in NATIVE else "zero 2"
        for seed in (0, 5):
            native = folder / f"{engine} {seed}"
            if not native.exists():
                rank_pools[2].run(save, engine, str(native), seed)
            if form not in NATIVE:
                succeeds("convert", native, folder / f"{form} {seed}", "--to", form)
            found.append(folder / f"{form} {seed}")
        return found

    return find


@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_noticed_or_of_no_consequence(saved: Callable[[str], list[Path]], tmp_path: Path, form: str) -> None:
    """Each damage leaves the same checkpoint, by `lwopt diff`, or one error in words."""
    may_differ = frozenset(WITHOUT_A_MANIFEST.get(form, ()))
    noticed, silent = random_damage(*saved(form), tmp_path, SEED, count(500), may_differ=may_differ)
    print(f"{form}: of {count(500)} damages {noticed} noticed, silently another checkpoint {silent}, seed {SEED}")
