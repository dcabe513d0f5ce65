"""Flipped, cut, zeroed, swapped, doubled, deleted, mixed files of every format: refused, or without consequence."""

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.command_line import lwopt, succeeds, torch_dist, torch_format
from tests.engines import Cell, ExactLM, running
from tests.faults.campaign import SEED, count
from tests.ranks import RankPool

NATIVE = {"plain": "plain", "zero 0": "zero 0", "zero 2": "zero 2", "zero 3": "zero 3", "owned 1": "owned 1"}
FORMATS = (*NATIVE, "universal", "dcp", "safetensors", "megatron", "megatron torch")
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

Data = dict[Path, bytes]  # by the paths within a folder
Kind = Callable[[random.Random, Data, Data], Data]  # what of the files is another then; the third are of another run


def one(generator: random.Random, data: Data) -> Path:
    return generator.choice(sorted(path for path, content in data.items() if content))


def flipped(generator: random.Random, data: Data, other: Data) -> Data:
    path = one(generator, data)
    content = bytearray(data[path])
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return {path: bytes(content)}


def cut(generator: random.Random, data: Data, other: Data) -> Data:
    path = one(generator, data)
    return {path: data[path][: generator.randrange(len(data[path]))]}


def zeroed(generator: random.Random, data: Data, other: Data) -> Data:
    path = one(generator, data)
    content = bytearray(data[path])
    begin = generator.randrange(len(content))
    end = min(len(content), begin + generator.choice((16, 512, 4096)))
    content[begin:end] = bytes(end - begin)
    return {path: bytes(content)}


def pair(generator: random.Random, data: Data) -> tuple[Path, Path]:
    first = one(generator, data)
    others = [path for path in sorted(data) if path.suffix == first.suffix and path != first]
    return first, generator.choice(others or [first])


def swapped(generator: random.Random, data: Data, other: Data) -> Data:
    first, second = pair(generator, data)
    return {first: data[second], second: data[first]}


def doubled(generator: random.Random, data: Data, other: Data) -> Data:
    first, second = pair(generator, data)
    return {second: data[first]}


def deleted(generator: random.Random, data: Data, other: Data) -> Data:
    return {one(generator, data): b"gone"}


def mixed(generator: random.Random, data: Data, other: Data) -> Data:
    """Some of another run's, of the same names, but not all that are different there."""
    differ = sorted(path for path in data if path in other and data[path] != other[path])
    chosen = generator.sample(differ, generator.randrange(1, len(differ))) if len(differ) > 1 else []
    return {path: other[path] for path in chosen}


KINDS: tuple[Kind, ...] = (flipped, cut, zeroed, swapped, doubled, deleted, mixed)


@contextlib.contextmanager
def damaged(folder: Path, kind: Kind, changes: Data, whole: Data) -> Iterator[None]:
    for path, content in changes.items():
        (folder / path).unlink() if kind is deleted else (folder / path).write_bytes(content)
    yield
    for path in changes:
        (folder / path).write_bytes(whole[path])


def save(engine: str, folder: str, seed: int) -> None:
    with running(Cell(engine), ExactLM(seed=seed)) as trained:
        trained.train(range(1))
        trained.save(folder)


@pytest.fixture(scope="module")
def saved(rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    folder = tmp_path_factory.mktemp("saved")

    def find(form: str) -> list[Path]:
        if form.startswith("megatron"):
            write = torch_dist if form == "megatron" else torch_format
            return [write(folder / form)] * 2
        found = []
        for seed in (0, 5):
            native = folder / f"{NATIVE.get(form, 'zero 2')} {seed}"
            if not native.exists():
                rank_pools[2].run(save, NATIVE.get(form, "zero 2"), str(native), seed)
            if form not in NATIVE:
                succeeds("convert", native, folder / f"{form} {seed}", "--to", form)
            found.append(native if form in NATIVE else folder / f"{form} {seed}")
        return found

    return find


def contents(folder: Path) -> Data:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("form", FORMATS)
def test_damage_is_noticed_or_of_no_consequence(saved: Callable[[str], list[Path]], tmp_path: Path, form: str) -> None:
    """Each damage leaves the same checkpoint, by `lwopt diff`, or one error in words."""
    generator, (whole, other) = random.Random(SEED), saved(form)
    folder = Path(shutil.copytree(whole, tmp_path / "damaged"))
    data, of_other = contents(whole), contents(other)
    weights = ["--weights"] if form == "safetensors" else []
    silent, noticed, number = Counter[str](), 0, count(500)
    for attack in range(number):
        kind = KINDS[attack % len(KINDS)]
        changes = {path: new for path, new in kind(generator, data, of_other).items() if new != data[path]}
        with damaged(folder, kind, changes, data):
            run = lwopt("diff", whole, folder, *weights)
        what = f"{form}, {kind.__name__} {[*map(str, changes)]}, attack {attack}, seed {SEED}: {run.err or run.out}"
        assert run.code in (0, 1, 2) and "Traceback" not in run.err, what
        noticed += run.code == 2
        if run.code == 1:
            silent[kind.__name__] += 1
            assert kind.__name__ in WITHOUT_A_MANIFEST.get(form, set()), what
    print(f"{form}: of {number} damages {noticed} noticed, silently another checkpoint {dict(silent)}, seed {SEED}")
