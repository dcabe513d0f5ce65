"""What becomes of the files of a checkpoint, and random damage, of which nothing or the same checkpoint must come."""

import contextlib
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.support.command_line import lwopt
from tests.support.engines import Cell, ExactLM, running

Data = dict[Path, bytes]  # by the paths within a folder
Changes = dict[Path, bytes | None]  # None: the file is gone
Kind = Callable[[random.Random, Path, Data, Data], Changes]  # what becomes of a file; the second data are another run's


def contents(folder: Path) -> Data:
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def flipped(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    content = bytearray(data[path])
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    return {path: bytes(content)}


def cut(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    return {path: data[path][: generator.randrange(len(data[path]))]}


def zeroed(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    content = bytearray(data[path])
    begin = generator.randrange(len(content))
    end = min(len(content), begin + generator.choice((16, 512, 4096)))
    content[begin:end] = bytes(end - begin)
    return {path: bytes(content)}


def one_like(generator: random.Random, path: Path, data: Data) -> Path:
    """Another file of its kind, if there is one of its size."""
    others = [one for one in sorted(data) if one.suffix == path.suffix and one != path]
    alike = [one for one in others if len(data[one]) == len(data[path]) and data[one] != data[path]]
    return generator.choice(alike or others or [path])


def doubled(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    return {path: data[one_like(generator, path, data)]}


def swapped(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    second = one_like(generator, path, data)
    return {path: data[second], second: data[path]}


def deleted(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    return {path: None}


def mixed(generator: random.Random, path: Path, data: Data, other: Data) -> Changes:
    """Some of another run's, of the same names, but not all that are different there."""
    differ = sorted(path for path in data if path in other and data[path] != other[path])
    chosen = generator.sample(differ, generator.randrange(1, len(differ))) if len(differ) > 1 else []
    return {path: other[path] for path in chosen}


RANDOM: tuple[Kind, ...] = (flipped, cut, zeroed, swapped, doubled, deleted, mixed)


@contextlib.contextmanager
def harmed(folder: Path, changes: Changes, whole: Data) -> Iterator[None]:
    for path, content in changes.items():
        (folder / path).unlink() if content is None else (folder / path).write_bytes(content)
    yield
    for path in changes:
        (folder / path).write_bytes(whole[path])


def save(engine: str, folder: str, seed: int) -> None:
    with running(Cell(engine), ExactLM(seed=seed)) as trained:
        trained.train(range(1))
        trained.save(folder)


def random_damage(
    whole: Path,
    other: Path,
    scratch: Path,
    seed: int,
    number: int,
    *,
    kinds: tuple[Kind, ...] = RANDOM,
    suffixes: tuple[str, ...] = (),
    may_differ: frozenset[str] = frozenset(),
) -> tuple[int, Counter[str]]:
    """How many of that many damages to files of these suffixes `lwopt diff` notices, and of which kinds another
    checkpoint came, which only these may make."""
    generator, folder = random.Random(seed), Path(shutil.copytree(whole, scratch / "damaged"))
    data, of_other = contents(whole), contents(other)
    harmable = [path for path, content in data.items() if content and (not suffixes or path.suffix in suffixes)]
    silent, noticed = Counter[str](), 0
    for attack in range(number):
        kind = kinds[attack % len(kinds)]
        made = kind(generator, generator.choice(harmable), data, of_other)
        changes = {path: new for path, new in made.items() if new != data[path]}
        with harmed(folder, changes, data):
            run = lwopt("diff", whole, folder, *(["--weights"] if any(whole.glob("*.safetensors")) else []))
        what = f"{whole}, {kind.__name__} {[*map(str, changes)]}, attack {attack}, seed {seed}: {run.err or run.out}"
        assert run.code in (0, 1, 2) and "Traceback" not in run.err, what
        noticed += run.code == 2
        if run.code == 1:
            silent[kind.__name__] += 1
            assert kind.__name__ in may_differ, what
    return noticed, silent
