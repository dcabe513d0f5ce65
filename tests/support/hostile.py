"""Files made to harm who reads them, and damaged ones; run as a program, so that a bomb takes this process alone.

    python -m tests.support.hostile FOLDER APART SEED COUNT

First every payload in every place, or every APART-th, of samples of all formats is inspected; then COUNT bytes that are
flipped, cut and moved in the samples' files are given to every command.

Prints a line of JSON for every run that ended in another way than well or with one error in plain words, and at last
how many runs there were and how much memory was in use. One that takes longer than ``SECONDS`` also counts as such.
"""

import contextlib
import io
import json
import random
import resource
import signal
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lwopt_backend.checkpoint.deepspeed.files import NAMES
from lwopt_backend.checkpoint.files import manifest, torch_files
from tests.support.command_line import Run, lwopt, succeeds, torch_dist, torch_format

SECONDS = 10  # of the processor's time
ADDRESS_SPACE = 6 << 30  # bytes: of this process, most of which libraries reserve and do not use
START = b"\x80\x04"  # of .metadata
OF_TORCH = b"\x80\x02"
MEMO = 1 << 20  # where payloads' own places begin, after those of the file that they are put into
GROUP = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}


def samples(folder: Path) -> dict[str, Path]:
    """A checkpoint of every format, of one layer; without manifests, by which they would be refused before they are
    read."""
    found = {"megatron": torch_dist(folder / "megatron", stages=(1,))}
    found["torch"] = torch_format(folder / "torch", stages=((1,),))
    found |= {"stage0": stage0(folder / "stage0")}
    for target in ("universal", "dcp", "safetensors"):
        found[target] = folder / target
        succeeds("convert", found["megatron"], found[target], "--to", target)
    for path in folder.rglob(manifest.NAME):
        path.unlink()
    return found


def stage0(folder: Path) -> Path:
    (folder / "global_step3").mkdir(parents=True)
    (folder / "latest").write_text("global_step3")
    module = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(5)}
    moments = [{key: torch.zeros_like(t) for key in ("exp_avg", "exp_avg_sq")} for t in module.values()]
    state = {number: {"step": torch.tensor(3.0), **of_one} for number, of_one in enumerate(moments)}
    optimizer = {"state": state, "param_groups": [{**GROUP, "params": [0, 1]}]}
    optimizer[NAMES] = [list(module)]
    saved = {"module": module, "buffer_names": [], "param_shapes": None, "optimizer": optimizer, "dp_world_size": 1}
    saved |= {"lr_scheduler": {"last_batch_iteration": 2}, "global_steps": 3, "global_samples": 6, "mine": [1, 2]}
    saved |= {"ds_config": {"bf16": {"enabled": False}}, "ds_version": "0.19.8"}
    torch.save(saved, folder / "global_step3" / "mp_rank_00_model_states.pt")
    return folder


# Payloads: pickles of one object each, which find_class and the opcodes alone make dangerous, or a reader fail
def named(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def made(module: str, name: str, *arguments: bytes) -> bytes:
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


def kept(place: int) -> bytes:
    """Keeps what was made last, after what any file keeps itself."""
    return b"r" + struct.pack("<I", MEMO + place)


def used(place: int) -> bytes:
    return b"j" + struct.pack("<I", MEMO + place)


def dtype(kind: str) -> bytes:
    return made("numpy", "dtype", text(kind), b"\x89", b"\x88")


EIGHT = made("_codecs", "encode", text("AAAAAAAA"), text("latin1"))  # bytes, as protocol 2 has them


def array(kind: bytes, shape: bytes, data: bytes) -> bytes:
    first = made("numpy.core.multiarray", "_reconstruct", named("numpy", "ndarray"), b"K\x00\x85", text("b"))
    return first + b"(K\x01" + shape + kind + b"\x89" + data + b"tb"


def with_object_field() -> bytes:
    """An array of V8 whose state claims an object in it: bytes of the file become a pointer."""
    fields = b"(" + text("a") + b"t}" + text("a") + dtype("O8") + b"K\x00\x86s"
    kind = dtype("V8") + b"(K\x03" + text("|") + b"N" + fields + b"K\x08K\x01K\x1btb"
    return array(kind, b"K\x01\x85", EIGHT)


MANY = 50_000
SPACE = made("argparse", "Namespace")
PAYLOADS = {
    "a list of a range": made("builtins", "list", made("builtins", "range", number(300_000_000))),
    "a range": made("builtins", "range", number(3 * 10**9)),
    "a bytearray by its length": made("builtins", "bytearray", number(12 * 10**9)),
    "a bytearray of fewer bytes": b"\x96" + struct.pack("<Q", 12 * 10**9),
    "a frame beyond the end": b"\x95" + struct.pack("<Q", 12 * 10**9) + b"N",
    "a far place in the memo": b"Nr" + struct.pack("<I", 2**31),
    "a storage": made("torch", "UntypedStorage", number(12 * 10**9)),
    "an array by its shape": made("numpy", "ndarray", number(2**33) + b"\x85"),
    "lists within lists": b"]" * MANY + b"a" * (MANY - 1),
    "tuples within tuples": b"N" + b"\x85" * MANY,
    "tuples within tuples as a key": b"}N" + b"\x85" * MANY + b"Ns",
    "dictionaries within dictionaries": b"}K\x01" * (MANY // 3) + b"N" + b"s" * (MANY // 3),
    "a list in itself": b"]" + kept(0) + used(0) + b"a",
    "an object in itself": SPACE + kept(0) + b"}" + text("a") + used(0) + b"sb",
    "an integer of 500,000 bytes": b"\x8b" + struct.pack("<i", 500_000) + b"\x7f" * 500_000,
    "an integer of 900,000 digits": b"L" + b"9" * 900_000 + b"L\n",
    "a complex number of digits": made("builtins", "complex", text("9" * 300_000)),
    "a text again and again": text("a" * MANY) + kept(0) + b"](" + used(0) * 100_000 + b"e",
    "many objects": named("argparse", "Namespace") + kept(0) + b"(" + (used(0) + b")\x81") * 100_000 + b"t",
    "many sets": b"(" + b"\x8f" * 400_000 + b"t",
    "an array with an object field": with_object_field(),
    "an array of objects": array(dtype("O8"), b"K\x01\x85", EIGHT),
    "a dtype with another's state": dtype("i8") + b"(K\x03" + text("|") + b"NNNK\x08K\x01K\x3ftb",
    "an array of more than its bytes": array(dtype("i8"), number(2**40) + b"\x85", EIGHT),
    "an array of fewer than none": array(dtype("i8"), number(-1) + b"\x85", EIGHT),
    "a number of objects": made("numpy.core.multiarray", "scalar", named("numpy", "dtype"), EIGHT),
    "a shape beyond counting": made("torch", "Size", b"(" + number(2**62) * 2 + b"t"),
    "a list that is set by slices": b"](NNNe" + made("builtins", "slice", b"K\x00", b"K\x00") + b"]s",
    "attributes of a function": named("torch", "Size") + b"}" + text("make") + b"Nsb",
    "a registered extension": b"\x82\x01",
    "half a character": b"X\x03\x00\x00\x00\xed\xa0\x80",
    "nothing": b"",
}


class Payload:
    """What calls a function where it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def pickled(path: Path) -> bool:
    return path.suffix == ".pt" or path.name == ".metadata"


@contextlib.contextmanager
def replaced(path: Path, data: bytes | None) -> Iterator[None]:
    """With other bytes in a file, or without it."""
    kept = path.read_bytes()
    path.unlink() if data is None else path.write_bytes(data)
    yield
    path.write_bytes(kept)


def pickled_in(path: Path) -> bytes:
    """The pickle in a file of torch.save, or in one that is a pickle."""
    if not zipfile.is_zipfile(path):
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))


def with_pickle(path: Path, data: bytes) -> bytes:
    if not zipfile.is_zipfile(path):
        return data
    written = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(written, "w") as other:
        for name in archive.namelist():
            other.writestr(name, data if name.endswith("/data.pkl") else archive.read(name))
    return written.getvalue()


def places(path: Path) -> Iterator[tuple[str, Callable[[bytes], bytes]]]:
    """Where a payload goes: in place of everything, and under each key of the outermost dictionary or object."""
    first = START if path.name == ".metadata" else OF_TORCH
    yield "everything", lambda payload: first + payload + b"."
    begin, end, keys = pickled_in(path)[:-1], b"s.", []
    if path.name == ".metadata":
        begin, end, keys = begin + b"}", b"sb.", ["planner_data", "state_dict_metadata"]
    elif isinstance(saved := torch_files.load(path), dict):
        keys = [*(key for key in saved if isinstance(key, str))][:6] + ["more"]
    for key, start in [(key, begin + text(key)) for key in keys]:
        yield key, lambda payload, start=start: start + payload + end  # type: ignore[misc]


# Runs
class TooLong(BaseException):
    """Not an Exception, so that no code handles it as one."""


def too_long(*_: Any) -> None:
    raise TooLong(f"more than {SECONDS} s")


def ended(*words: object) -> Run | str:
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        return lwopt(*words)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def wrong(*words: object) -> str:
    run = ended(*words)
    return run if isinstance(run, str) else wrong_in(run)


# What CPython prints itself where it cannot allocate a bytearray, by the number of bytes that a pickle gives.
OF_PYTHON = "SystemError: deallocated bytearray object has exported buffers\n"


def wrong_in(run: Run) -> str:
    said = run.err.removeprefix(OF_PYTHON)
    if "Traceback" in said or "not enough memory" in said or run.code not in (0, 1, 2):
        return f"{run.code}: {said[:300]}"
    return "" if run.code == 0 or said.startswith("error: ") else said[:300]


def commands(path: Path) -> dict[str, tuple[object, ...]]:
    return {
        "inspect": ("inspect", path),
        "convert": ("convert", path, path.parent / "to", "--to", "dcp", "--dry-run"),
        "diff": ("diff", path, path),
    }


Harm = tuple[str, Path, Path, bytes]  # what it is, in which folder, which file, and what that holds then


def bombs(found: dict[str, Path], apart: int) -> Iterator[Harm]:
    """Every payload in every ``apart``-th place of a file of each kind."""
    every = [
        (folder, path, place, put)
        for folder in found.values()
        for path in {path.name: path for path in sorted(folder.rglob("*")) if pickled(path)}.values()
        for place, put in places(path)
    ]
    for at, (name, payload) in enumerate(PAYLOADS.items()):
        for folder, path, place, put in every[at * 37 % apart :: apart]:
            yield f"{name} in {place}", folder, path, with_pickle(path, put(payload))


def flips(found: dict[str, Path], seed: int, count: int) -> Iterator[Harm]:
    """So many damages, most of them to what says where things are."""
    generator = random.Random(seed)
    for number in range(count):
        folder = generator.choice([folder for _, folder in sorted(found.items())])
        path = generator.choice([path for path in sorted(folder.rglob("*")) if path.is_file()])
        in_pickle = path.suffix in (".pt", "") and generator.random() < 0.7 and zipfile.is_zipfile(path)
        data = bytearray(pickled_in(path) if in_pickle else path.read_bytes())
        harm(data, generator)
        yield f"damage {number}", folder, path, with_pickle(path, bytes(data)) if in_pickle else bytes(data)


def harm(data: bytearray, generator: random.Random) -> None:
    if not data:
        return
    at = generator.randrange(len(data))
    kind = generator.randrange(6)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        data[at:at] = data[max(0, at - 20) : at]
    elif kind == 2:
        del data[at : at + generator.randrange(1, 9)]
    else:
        for place in [at] + [generator.randrange(len(data)) for _ in range(generator.choice((0, 0, 3)))]:
            data[place] = generator.randrange(256) if kind < 5 else data[place] ^ 1 << generator.randrange(8)


def main(folder: str, apart: int, seed: int, count: int) -> None:
    found = samples(Path(folder))
    signal.signal(signal.SIGPROF, too_long)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    runs = 0
    for harms, names in ((bombs(found, apart), ["inspect"]), (flips(found, seed, count), [*commands(Path())])):
        for what, place, path, data in harms:
            with replaced(path, data):
                for name in names:
                    runs += 1
                    if reason := wrong(*commands(place)[name]):
                        print(json.dumps({"what": what, "file": str(path), "command": name, "wrong": reason}))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"runs": runs, "peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
