"""kill -9 of one rank and of all, at any moment of every way to write: the last checkpoint loads, or the new one."""

import contextlib
import functools
import hashlib
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers
from tests.faults.campaign import SEED, count
from tests.support.engines import Cell, Engine, ExactLM, running
from tests.support.plain import BUCKET_MB
from tests.support.ranks import RankFailed, RankPool, gathered

SAVES = 6  # of a writer that is not killed
WAYS = {
    "plain": Cell("plain"),
    "fsdp2": Cell("fsdp2", form="nested"),
    **{name: Cell(name) for name in ("zero 0", "zero 1", "zero 2", "zero 3", "owned 0", "owned 1", "owned 2")},
    "modules": Cell("modules"),
}
truth_of: dict[str, list[str]] = {}  # of the ranks that load


@functools.cache
def group_of(name: str) -> Any:
    return dist.new_group()


class Modules(Engine):
    """Two plain modules; weights are saved with the state."""

    def __init__(self) -> None:
        model = ExactLM()
        halves = {"layers": model.layers, "gate": model.gate}
        optimizers = {
            name: LayerWiseOptimizer(half, lr=0.02, bucket_mb=BUCKET_MB, report=False, process_group=group_of(name))
            for name, half in halves.items()
        }
        for param in (*model.embedding.parameters(), *model.lm_head.parameters()):
            param.requires_grad_(False)
        super().__init__(Cell("plain"), model, ModuleOptimizers(optimizers))

    def step(self, micro_batches: list[Any]) -> list[float]:
        self.model(*micro_batches[0]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return []

    def weights(self) -> dict[str, torch.Tensor]:
        for optimizer in self.optimizer.modules.values():
            optimizer.synchronize()
        return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def save(self, folder: str) -> None:
        self.optimizer.save_state_dict(folder)

    def load(self, folder: str) -> None:
        self.optimizer.load_state_dict_from(folder)


@contextlib.contextmanager
def engine_of(way: str) -> Iterator[Engine]:
    if way == "modules":
        yield Modules()
    else:
        with running(WAYS[way], ExactLM()) as engine:
            yield engine


def place(way: str, folder: str, number: int) -> str:
    """This package replaces a save, and DeepSpeed makes a new folder; torch cannot replace one safely."""
    return f"{folder}/{number}" if way == "fsdp2" else f"{folder}/saved"


def write(way: str, folder: str) -> None:
    with engine_of(way) as engine:
        for number in range(SAVES):
            engine.train(range(number, number + 1))
            dist.barrier()
            Path(folder, f"began {number}").touch()
            engine.save(place(way, folder, number))
            dist.barrier()
            Path(folder, f"wrote {number}").touch()


def digest(engine: Engine) -> str:
    """The digest of the weights; for modules, whose checkpoints have none, of the state on all ranks."""
    if isinstance(engine, Modules):
        stores = [optimizer.state_store() for optimizer in engine.optimizer.modules.values()]
        mine = [t.clone() for store in stores for piece in store.pieces() for _, t in sorted(piece.tensors.items())]
        tensors = [tensor for of_rank in gathered(mine) for tensor in of_rank]
    else:
        tensors = [tensor for _, tensor in sorted(engine.weights().items())]
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def truth(way: str) -> list[str]:
    with engine_of(way) as engine:
        found = []
        for number in range(SAVES + 1):
            engine.train(range(number, number + 1))
            found.append(digest(engine))
        return found


def loaded(way: str, folder: str, number: int) -> list[str]:
    """What is loaded, and, where weights are loaded with the state, what it is after another step."""
    with engine_of(way) as engine:
        engine.load(place(way, folder, number))
        found = [digest(engine)]
        if not isinstance(engine, Modules):
            number = truth_of[way].index(found[0]) + 1
            engine.train(range(number, number + 1))
            found.append(digest(engine))
        return found


def remember(way: str) -> list[str]:
    truth_of[way] = truth(way)
    return truth_of[way]


@pytest.fixture
def writers() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


class Writing:
    """A function that writes on separate ranks, again and again, until they are killed."""

    def __init__(self, pool: RankPool, generator: random.Random) -> None:
        self.pool, self.generator = pool, generator
        self.longest = 0.0  # seconds from the first write on

    def run(self, folder: Path, function: Any, *arguments: Any, kill: bool = True) -> None:
        """Kill one rank or all at some moment after the first write began."""
        thread = threading.Thread(target=self._run, args=(function, *arguments))
        thread.start()
        while thread.is_alive() and not (folder / "began 0").exists():
            time.sleep(0.002)
        began = time.monotonic()
        thread.join(self.generator.random() * self.longest if kill else None)
        if not kill:
            self.longest = time.monotonic() - began
        processes = list(self.pool.processes)
        if self.generator.random() < 0.5:
            self.generator.choice(processes).kill()
            thread.join(0.2)
        for process in processes:
            process.kill()
        thread.join()
        self.pool.close()

    def _run(self, function: Any, *arguments: Any) -> None:
        with contextlib.suppress(RankFailed):
            self.pool.run(function, *arguments)


@pytest.mark.parametrize("way", WAYS)
def test_after_a_kill_the_old_or_new_save_loads(ranks: RankPool, writers: RankPool, tmp_path: Path, way: str) -> None:
    states, writing = ranks.run(remember, way)[0], Writing(writers, random.Random(SEED))
    newer = 0
    for attack in range(-1, count(50)):  # before the first, one that is not killed
        folder = tmp_path / str(attack)
        folder.mkdir()
        writing.run(folder, write, way, str(folder), kill=attack >= 0)
        began, wrote = (len(list(folder.glob(f"{mark} *"))) for mark in ("began", "wrote"))
        assert attack >= 0 or wrote == SAVES
        whole = [number for number in range(began) if Path(place(way, str(folder), number), ".metadata").exists()]
        last = max(whole, default=0) if way == "fsdp2" else 0
        pointer = folder / "saved" / "latest"  # DeepSpeed empties it before it writes
        if way.split()[0] in ("zero", "owned") and wrote == 0 and not pointer.exists():
            continue  # it loads nothing then, and warns
        if pointer.exists() and not pointer.read_text():
            assert all("latest is empty" in said for said in ranks.errors(loaded, way, str(folder), last))
            pointer.write_text(f"global_step{wrote}")
        try:
            found = ranks.run(loaded, way, str(folder), last)[0]
        except RankFailed as failure:
            torn = next(str(error) for error in failure.errors if error)
            assert wrote == 0 and str(folder) in torn, f"{way}, attack {attack}, seed {SEED}: {wrote} saved, {torn}"
        else:
            number = states.index(found[0])
            assert number in (wrote - 1, wrote), f"{way}, attack {attack}, seed {SEED}: {wrote} saved, {number} loaded"
            assert found[1:] in ([], [states[number + 1]]), f"{way}, attack {attack}, seed {SEED}: its state differs"
            newer += number == wrote
        shutil.rmtree(folder)
    print(f"{way}: {count(50)} kills in {writing.longest:.2f} s of writing, {newer} had the new one, seed {SEED}")
