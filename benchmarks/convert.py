"""What conversion, saving and loading cost, beside DeepSpeed's converter and torch's own functions.

    python -m benchmarks.convert
    python -m benchmarks.convert --gigabytes 0.3 3 --rounds 3 --json results.json

Checkpoints are of a model with 12.6 M parameters a layer. AdamW has trained it for one step under DeepSpeed, on 4 ranks
in bf16 with fp32 masters (14 bytes a parameter); torch_dist has the same tensors in Megatron's form. Layer-wise Muon
trains it on 2 ranks in fp32, in plain PyTorch and on FSDP2. The commands take turns, and each figure is the median of
``--rounds``: CPU seconds of all processes, the peak of their anonymous memory, what they read, and the size of the
checkpoint over seconds on the clock. Everything is read from the page cache. Saving and loading is timed on the slower
rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks import record

Figures = dict[str, float]
WIDTH, BYTES = 1024, 14  # of the model's matrices, and of a parameter in a checkpoint
UNIVERSAL, MEGATRON = "lwopt convert --to universal", "Megatron, torch_dist"
EVERY = 0.02  # seconds between two looks at a command


class Layers(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        shapes = {"q": 1, "k": 1, "v": 1, "o": 1, "up": 4, "down": 4}
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(WIDTH, rows * WIDTH, bias=False) for name, rows in shapes.items()})
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return torch.stack([matrix(x).square().mean() for layer in self.layers for matrix in layer.values()]).sum()


def on_ranks(count: int, function: Callable[..., None], *args: Any) -> None:
    port = str(20_000 + os.getpid() % 20_000)
    mp.spawn(joined, args=(count, port, function, *args), nprocs=count)


def joined(rank: int, count: int, port: str, function: Callable[..., None], *args: Any) -> None:
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()}, DS_ACCELERATOR="cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    function(*args)
    dist.destroy_process_group()


# Conversion


def trained_by_deepspeed(layers: int, stage: int, folder: str) -> None:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=Layers(layers), config=settings)
    engine.backward(engine(torch.randn(1, WIDTH, dtype=torch.bfloat16)))
    engine.step()
    engine.save_checkpoint(folder, tag="step")


def written_as_megatron_does(layers: int, folder: Path) -> None:
    """AdamW's torch_dist checkpoint of a model without experts, fully reshardable, with a key for all layers."""
    shapes = {"self_attention.linear_qkv": (3, 1), "self_attention.linear_proj": (1, 1)}
    shapes |= {"mlp.linear_fc1": (4, 1), "mlp.linear_fc2": (1, 4)}
    state: dict[str, Any] = {}
    for name, (rows, columns) in shapes.items():
        weight = torch.randn(layers, rows * WIDTH, columns * WIDTH)
        key = f"decoder.layers.{name}.weight"
        state[key] = weight.bfloat16()
        kept = {"param": state[key].float(), "exp_avg": weight, "exp_avg_sq": weight.abs()}
        state |= {f"optimizer.state.{of}.{key}": tensor for of, tensor in kept.items()}
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "is_expert_parallel": False, "step": 1}
    group |= {"weight_decay": 0.1, "wd_mult": 1.0}
    sizes = dict.fromkeys((f"{of}_model_parallel_size" for of in ("tensor", "pipeline", "expert")), 1)
    arguments = {**sizes, "data_parallel_size": 2, "num_layers": layers, "num_experts": None, "swiglu": False}
    arguments |= {"untie_embeddings_and_output_weights": True, "optimizer": "adam", "transformer_impl": "local"}
    common = {"args": argparse.Namespace(**arguments), "checkpoint_version": 3.0, "iteration": 1}
    common |= {"optimizer": {"optimizer": {"param_groups": [group]}}}
    common |= {"content_metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}
    folder.mkdir()
    torch.save(common, folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    planner = DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(state, checkpoint_id=folder, planner=planner, no_dist=True)


def measured(command: list[str]) -> Figures:
    """What a command costs, with the processes that it starts."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment(), text=True)
    errors = threading.Thread(target=lambda: failed.append(process.stderr.read() if process.stderr else ""))
    failed, read, peak = list[str](), dict[int, int](), 0
    errors.start()
    root = psutil.Process(process.pid)
    while True:
        anonymous = 0
        with contextlib.suppress(psutil.Error):
            for one in (root, *root.children(recursive=True)):
                with contextlib.suppress(psutil.Error, OSError):
                    read[one.pid] = one.io_counters().read_chars
                    anonymous += one.memory_info().rss - one.memory_info().shared
        peak = max(peak, anonymous)
        pid, status, used = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        time.sleep(EVERY)
    process.returncode = os.waitstatus_to_exitcode(status)
    errors.join()
    if process.returncode > 1:  # `lwopt diff` ends with 1 where it finds differences
        raise RuntimeError(f"{command} ended with {process.returncode}:\n{failed[0][-2000:]}")
    seconds = time.perf_counter() - began
    cpu = used.ru_utime + used.ru_stime
    return {"cpu s": cpu, "anonymous GiB": peak / 2**30, "read GB": sum(read.values()) / 1e9, "s": seconds}


def environment() -> dict[str, str]:
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def conversions(of: str, folder: Path) -> dict[str, list[str]]:
    """By what they do, the commands; the first one's output is what some of the others read."""
    lwopt = [sys.executable, "-c", "from lwopt_backend.cli import main; main()"]
    if of == MEGATRON:
        return {UNIVERSAL: [*lwopt, "convert", str(folder / "source"), str(folder / "ours"), "--to", "universal"]}
    theirs = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    source, ours, other = folder / "source", folder / "ours", folder / "other"
    return {
        UNIVERSAL: [*lwopt, "convert", str(source), str(ours), "--to", "universal"],
        "ds_to_universal": [*theirs, "--input_folder", str(source / "step"), "--output_folder", str(other)],
        "lwopt convert --to safetensors": [*lwopt, "convert", str(source), str(folder / "st"), "--to", "safetensors"],
        "lwopt inspect": [*lwopt, "inspect", str(source)],
        "lwopt diff": [*lwopt, "diff", str(source), str(ours)],
    }


def converted(gigabytes: float, of: str, rounds: int, folder: Path) -> list[dict[str, Any]]:
    layers, source = max(1, round(gigabytes * 1e9 / BYTES / (12 * WIDTH**2))), folder / "source"
    folder.mkdir()
    if of == MEGATRON:
        written_as_megatron_does(layers, source)
    else:
        on_ranks(4, trained_by_deepspeed, layers, int(of[-1]), str(source))
    files = [path for path in source.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files) / 1e9
    commands, found = conversions(of, folder), dict[str, list[Figures]]()
    for path in files:  # into the page cache
        path.read_bytes()
    for _ in range(rounds):
        for output in ("ours", "other", "st"):
            shutil.rmtree(folder / output, ignore_errors=True)
        for name, command in commands.items():
            found.setdefault(name, []).append(measured(command))
    shutil.rmtree(folder)
    rows = []
    for name, figures in found.items():
        medians = {key: statistics.median(one[key] for one in figures) for key in figures[0]}
        seconds = medians.pop("s")
        rows.append({"what": name, "of": of, "GB": size, **medians, "MB/s": 1e3 * size / seconds})
    return rows


# Saving and loading


def saved_and_loaded(engine: str, layers: int, rounds: int, folder: str, results: str) -> None:
    from lwopt_backend import LayerWiseOptimizer
    from lwopt_backend.integrations import fsdp2

    model = Layers(layers)
    if engine == "fsdp2":
        torch.distributed.fsdp.fully_shard(model)
    made = fsdp2.LayerWiseOptimizer if engine == "fsdp2" else LayerWiseOptimizer
    optimizer = made(model, matrix={"name": "muon", "lr": 0.02}, report=False)
    model(torch.randn(1, WIDTH)).backward()
    optimizer.step()
    dist.barrier()

    def state() -> dict[str, Any]:
        pair = state_dict.get_state_dict(model, optimizer)
        return dict(zip(("model", "optimizer"), pair))

    turns: dict[str, Callable[[str], object]] = {
        "dcp.save": lambda folder: dcp.save(state(), checkpoint_id=folder),
        "dcp.load": lambda folder: dcp.load(state(), checkpoint_id=folder),
    }
    if engine == "plain":
        turns["save_state_dict"] = optimizer.save_state_dict
        turns["load_state_dict_from"] = optimizer.load_state_dict_from
        turns["load_state_dict_from, check=False"] = partial(optimizer.load_state_dict_from, check=False)
    found: dict[str, list[Figures]] = {name: [] for name in turns}
    for number in range(rounds):
        for name, turn in turns.items():
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            turn(f"{folder}/{'ours' if '_' in name else 'torch'} {number}")
            found[name].append({"cpu s": time.process_time() - cpu, "s": time.perf_counter() - began})
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    if dist.get_rank() == 0:
        Path(results).write_text(json.dumps(of_ranks))


def kept(engine: str, gigabytes: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    layers = max(1, round(gigabytes * 1e9 / 8 / (12 * WIDTH**2)))  # weights and momentum, in fp32
    folder.mkdir()
    on_ranks(2, saved_and_loaded, engine, layers, rounds, str(folder), str(folder / "results"))
    of_ranks = json.loads((folder / "results").read_text())
    size = 8 * layers * 12 * WIDTH**2 / 1e9
    shutil.rmtree(folder)
    rows = []
    for name in of_ranks[0]:
        cpu, seconds = (
            max(statistics.median(one[key] for one in of_rank[name]) for of_rank in of_ranks) for key in ("cpu s", "s")
        )
        rows.append({"what": name, "of": engine, "GB": size, "cpu s": cpu, "MB/s": 1e3 * size / seconds})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", nargs="+", type=float, default=[0.3, 3.0], help="of a checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    figures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size in options.gigabytes:
            for of in ("ZeRO 2", "ZeRO 3", MEGATRON):
                figures += converted(size, of, options.rounds, Path(folder, "conversion"))
            for engine in ("plain", "fsdp2"):
                figures += kept(engine, size, options.rounds, Path(folder, "kept"))
    for row in figures:
        print("  ".join(f"{value:.3g} {key}" if isinstance(value, float) else value for key, value in row.items()))
    if options.json:
        record.write(options.json, figures)


if __name__ == "__main__":
    main()
