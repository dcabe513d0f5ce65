"""Training steps over a slow network: ours beside its peers, and how much of our wire time is hidden.

    python benchmarks/network.py                                    4 ranks; no limit, 1 Gbit/s and 200 Mbit/s
    python benchmarks/network.py --rates 1gbit --systems ours
    python benchmarks/network.py --json network.json                write it down

Needs root on Linux, and the programs ``ip`` and ``tc``; says so and measures nothing otherwise. Each rank is a process
in a network namespace of its own, whose link to the others carries at most the given rate in each direction
(``tc qdisc ... tbf``). Collectives are gloo's, on one thread a rank.

All systems train the same small GPT in fp32 from the same weights on the same batches, several steps at a time, of
which the first is not measured: what a step leaves on the wire is part of the next. A step is forward, backward and
update; ``update`` is ``optimizer.step()`` and what waits in it. Figures are medians of the slowest rank; a system whose
steps take longer than 20 seconds is measured once. ``sent`` is what left the interface of the busiest rank, headers
included.

``hidden`` is the share of the time on the wire that no step waits for. With a limit, a step takes longer by what is not
hidden. On FSDP2, the same is taken off for the host alone (FSDP2 with SGD), whose gathers and reductions are not ours:

    hidden = 1 - (slowdown - slowdown of the host) / ((sent - sent by the host) / rate)

Both values of ``policy`` are measured, and modelled with the rate and the speed of Newton-Schulz that all ranks reach
at once, so that one sees whether ``lwopt plan`` would choose the faster one.

Where ranks have few cores, the model, Newton-Schulz and gloo compete for them, and little can be hidden. With
``--device-time`` hosts are idle while an accelerator would work: every layer sleeps so long in forward and twice in
backward, and our Newton-Schulz of its matrices sleeps as long as both, instead of computing. What is hidden then is
what the engine hides.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed_systems import ADAMW, MUON, VOCABULARY, Model, matrix_names, optimizer_entries
from fsdp2_systems import import_dion
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.integrations import deepspeed_zero
from lwopt_backend.integrations.deepspeed import engine
from lwopt_backend.plan import Machine, machine_of
from lwopt_backend.plan.cost import newton_schulz_flops
from lwopt_backend.plan.owners import modelled_time
from lwopt_backend.rules import Muon

SUBNET, DEVICE, PORT = "10.213.7", "eth0", 29517
FREE = "none"
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
HOST = "FSDP2 alone, SGD"
LATE = ", overlap_param_gather"
SLOW = 20.0  # seconds of a step that is measured once
MUON_ENTRIES = {"ours, ZeRO-2": "LayerWiseMuon", "DeepSpeed Muon, ZeRO-2": "DeepSpeed Muon, standard"}
POLICIES = {f"ours, ZeRO-2, policy {policy}": policy for policy in ("stay", "balance")}
Step = Callable[[Tensor, Tensor], float]


@dataclass
class System:
    """``step`` trains on a batch and returns the seconds of its update; ``finish`` waits for what it left to arrive.
    ``host``: whose traffic is not its own. ``modelled`` are the seconds of its matrices' update on a machine."""

    step: Step
    host: str | None = None
    ours: bool = False
    finish: Callable[[], object] = lambda: None
    modelled: Callable[[Machine], float] | None = None


@dataclass
class Figures:
    """What one rank measured of one system at one rate: seconds of steps and updates, bytes of a step."""

    step: list[float] = field(default_factory=list)
    update: list[float] = field(default_factory=list)
    sent: int = 0


# The network


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def network(ranks: int) -> Iterator[list[str]]:
    """A bridge with a namespace per rank; yields their names, and takes all down."""
    own = f"lw{os.getpid()}"
    names = [f"{own}r{rank}" for rank in range(ranks)]
    with ExitStack() as undo:
        run("ip", "link", "add", own, "type", "bridge")
        undo.callback(run, "ip", "link", "del", own)
        run("ip", "link", "set", own, "up")
        for rank, name in enumerate(names):
            run("ip", "netns", "add", name)
            undo.callback(run, "ip", "netns", "del", name)
            run("ip", "link", "add", f"{own}v{rank}", "type", "veth", "peer", "name", DEVICE, "netns", name)
            run("ip", "link", "set", f"{own}v{rank}", "master", own, "up")
            run("ip", "-n", name, "addr", "add", f"{SUBNET}.{rank + 1}/24", "dev", DEVICE)
            run("ip", "-n", name, "link", "set", DEVICE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield names


def limit(names: Sequence[str], rate: str) -> None:
    """Give every rank's link this rate."""
    for name in names:
        if rate == FREE:
            subprocess.run(["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"], capture_output=True)
        else:
            shape = ("tbf", "rate", rate, "burst", "256kb", "latency", "400ms")
            run("tc", "-n", name, "qdisc", "replace", "dev", DEVICE, "root", *shape)


def seconds_a_byte(rate: str) -> float:
    for unit, bits in BITS.items():
        if rate.endswith(unit):
            return 8 / (float(rate.removesuffix(unit)) * bits)
    raise argparse.ArgumentTypeError(f"expected {FREE!r} or a rate such as 1gbit or 200mbit, found {rate!r}")


def sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes").read_text())


# The systems


def build(name: str, layers: int, width: int, seconds: float) -> System:
    """The system of that name, ready to train; a layer's forward sleeps ``seconds``. Called on all ranks."""
    torch.manual_seed(0)
    model = Model(layers, width)
    for block in model.blocks if seconds else ():
        block.register_forward_pre_hook(lambda *args: time.sleep(seconds))
        block.register_full_backward_pre_hook(lambda *args: time.sleep(2 * seconds))
    if name in MUON_ENTRIES:
        return zero(model, optimizer_entries()[MUON_ENTRIES[name]], ours=name.startswith("ours"))
    if name in POLICIES:
        entry = optimizer_entries()["LayerWiseMuon"]
        entry["params"]["policy"] = POLICIES[name]
        return zero(model, entry, ours=True)
    overlap = name.endswith(LATE)
    if name.startswith("ours, owned"):
        options = {"group_size": dist.get_world_size(), "bucket_mb": bucket_mb(model)}
        optimizer = ours(model, **options, overlap_param_gather=overlap)
        return System(trained(model, [optimizer]), ours=True, finish=optimizer.synchronize)
    matrices = set(matrix_names(model))
    if name == "torch.optim.Muon on DDP":
        optimizers = pair(model, matrices)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb(model))
        return System(trained(wrapped, optimizers))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if name == HOST:
        return System(trained(model, [torch.optim.SGD(model.parameters(), lr=0.01)]))
    if name == "torch.optim.Muon on FSDP2":
        return System(trained(model, pair(model, matrices)), HOST)
    if name == "dion.Muon on FSDP2":
        return System(trained(model, [dion_muon(model, matrices, mesh)]), HOST)
    optimizer = ours(model)
    if "attach" in name:
        optimizer.attach(model)
    return System(trained(model, [optimizer]), HOST, ours=True, finish=optimizer.synchronize)


def bucket_mb(model: nn.Module) -> float:
    """An eighth of the model in fp32: a fraction, as the defaults are of large ones."""
    return sum(param.numel() for param in model.parameters()) / 2**18 / 8


def ours(model: nn.Module, **options: Any) -> LayerWiseOptimizer:
    return LayerWiseOptimizer(model, **MUON, elementwise={"name": "adamw", **ADAMW}, report=False, **options)


def pair(model: nn.Module, matrices: set[str]) -> list[torch.optim.Optimizer]:
    named = dict(model.named_parameters())
    others = [param for name, param in named.items() if name not in matrices]
    return [torch.optim.Muon([named[name] for name in sorted(matrices)], **MUON), torch.optim.AdamW(others, **ADAMW)]


def dion_muon(model: nn.Module, matrices: set[str], mesh: Any) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    others = [param for name, param in named.items() if name not in matrices]
    beta1, beta2 = ADAMW["betas"]
    adamw = {"lr": ADAMW["lr"], "beta1": beta1, "beta2": beta2, "epsilon": ADAMW["eps"]}
    groups = [
        {"params": [named[name] for name in named if name in matrices]},
        {"params": others, "algorithm": "adamw", "weight_decay": ADAMW["weight_decay"], **adamw},
    ]
    options = {"lr": MUON["lr"], "weight_decay": MUON["weight_decay"], "mu": MUON["momentum"], "nesterov": True}
    return import_dion().Muon(groups, distributed_mesh=mesh, use_polar_express=False, **options)


def trained(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> float:
        model(tokens, targets).backward()
        begun = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        seconds = time.perf_counter() - begun
        for optimizer in optimizers:
            optimizer.zero_grad()
        return seconds

    return step


def zero(model: nn.Module, entry: dict[str, Any], ours: bool) -> System:
    bucket = int(bucket_mb(model) * 2**18)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 2, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "optimizer": entry,
        "steps_per_print": 1_000_000,
    }
    deepspeed_engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(tokens: Tensor, targets: Tensor) -> float:
        deepspeed_engine.backward(deepspeed_engine(tokens, targets))
        begun = time.perf_counter()
        deepspeed_engine.step()
        return time.perf_counter() - begun

    def modelled(machine: Machine) -> float:
        plans = [unit.plan.matrices for unit in deepspeed_engine.optimizer.optimizer._binding.units]
        return sum(modelled_time(plan, machine).total for plan in plans if plan is not None)

    return System(step, ours=ours, modelled=modelled if ours else None)


def all_names() -> list[str]:
    fsdp2 = [HOST, *(f"ours, FSDP2{more}" for more in ("", ", attach"))]
    fsdp2.append("torch.optim.Muon on FSDP2")
    dion = [] if isinstance(import_dion(), str) else ["dion.Muon on FSDP2"]
    owned = ["ours, owned", f"ours, owned{LATE}", "torch.optim.Muon on DDP"]
    return [*fsdp2, *dion, *owned, *MUON_ENTRIES, *POLICIES]


# One rank


def run_rank(options: argparse.Namespace) -> None:
    """All systems at all rates on one rank, called on all of them; rank 0 sets rates, prints and writes."""
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # DeepSpeed's Muon would compile for a minute
    warnings.simplefilter("ignore")  # torch renames collectives that DeepSpeed and DDP call
    logging.disable(logging.WARNING)
    engine.compile_nothing()
    rank, ranks = options.rank, options.ranks
    environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "DS_ACCELERATOR": "cpu"}
    os.environ.update({key: str(value) for key, value in environ.items()}, GLOO_SOCKET_IFNAME=DEVICE)
    deepspeed_zero.register()
    meeting = f"tcp://{SUBNET}.1:{PORT}"
    deepspeed.init_distributed("gloo", False, verbose=False, init_method=meeting, rank=rank, world_size=ranks)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    if options.device_time:
        Muon.transform = functools.partialmethod(sleeping, 3 * options.device_time / (12 * options.width**2))
    systems = {n: build(n, options.layers, options.width, options.device_time) for n in options.systems}
    found = {rate: {name: Figures() for name in systems} for rate in options.rates}
    for system in systems.values():
        take(system, options, 0)  # warms up
        system.finish()
    for rate in options.rates:
        dist.barrier()
        if rank == 0:
            limit(options.namespaces, rate)
        dist.barrier()
        for name, system in systems.items():
            measure(system, options, found[rate][name])
            if rank == 0:
                print(f"{rate}: {name}", file=sys.stderr, flush=True)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, found)
    speed = flops_per_second(options.width)
    if rank == 0:
        limit(options.namespaces, FREE)
        show(options, systems, gathered, speed)
    dist.barrier()
    os._exit(0)  # taking down gloo's groups now and then waits for ranks that went


def sleeping(rule: Muon, seconds: float, matrices: Tensor) -> Tensor:
    """In place of Newton-Schulz: ``seconds`` an element, and the norm is one."""
    time.sleep(seconds * matrices.numel())
    return (matrices / matrices.norm().clamp(min=rule.eps)).to(rule.iterates_in)


def flops_per_second(width: int) -> float:
    """Of Newton-Schulz on the widest matrices, on the slowest rank while all compute."""
    matrix, rule, times = torch.randn(width, 4 * width), Muon(), []
    for _ in range(4):
        dist.barrier()
        begun = time.perf_counter()
        rule.transform(matrix)
        times.append(time.perf_counter() - begun)
    slowest = torch.tensor(statistics.median(times[1:]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return newton_schulz_flops((width, 4 * width)) / slowest.item()


def measure(system: System, options: argparse.Namespace, into: Figures) -> None:
    """A step that is not measured, then others. No barrier is between them: it would wait for what is on the wire."""
    slowest = torch.tensor(take(system, options, 0)[0])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    rounds = 1 if slowest > SLOW else options.rounds
    before = sent_bytes()
    for turn in range(rounds):
        step, update = take(system, options, turn)
        into.step.append(step)
        into.update.append(update)
    system.finish()
    dist.barrier()
    into.sent = (sent_bytes() - before) // rounds


def take(system: System, options: argparse.Namespace, step: int) -> tuple[float, float]:
    """The seconds of a step and of its update."""
    generator = torch.Generator().manual_seed(options.ranks * step + options.rank)
    tokens = torch.randint(VOCABULARY, (1, options.tokens + 1), generator=generator)
    begun = time.perf_counter()
    update = system.step(tokens[:, :-1], tokens[:, 1:])
    return time.perf_counter() - begun, update


def show(options: argparse.Namespace, systems: dict[str, System], gathered: Sequence[Any], speed: float) -> None:
    """Tables by rate; ``gathered[rank][rate][name]``. ``speed`` is that of Newton-Schulz, in flops per second."""
    console = Console(width=130 if not Console().is_terminal else None, highlight=False)
    rows = []
    slowest: dict[tuple[str, str], tuple[float, float, int]] = {}
    for rate in options.rates:
        for name in systems:
            ranks = [of_rank[rate][name] for of_rank in gathered]
            step, update = (max(statistics.median(getattr(f, key)) for f in ranks) for key in ("step", "update"))
            slowest[rate, name] = step, update, max(f.sent for f in ranks)
    for rate in options.rates:
        table = Table(title=f"{options.ranks} ranks, {rate if rate != FREE else 'no limit'}", title_justify="left")
        table.add_column("system", no_wrap=True)
        for heading in ("step, ms", "to ours", "update, ms", "to ours", "sent, MB", "hidden"):
            table.add_column(heading, justify="right")
        first = next((name for name, system in systems.items() if system.ours), next(iter(systems)))
        for name, system in systems.items():
            step, update, sent = slowest[rate, name]
            share = hidden(slowest, rate, name, system)
            ratios = step / slowest[rate, first][0], update / slowest[rate, first][1]
            table.add_row(
                name,
                f"{1e3 * step:.0f}",
                f"{ratios[0]:.2f}",
                f"{1e3 * update:.0f}",
                f"{ratios[1]:.2f}",
                f"{sent / 1e6:.1f}",
                "" if share is None else f"{share:.0%}",
            )
            figures = {"step": step, "update": update, "sent": sent, "hidden": share}
            rows.append({"rate": rate, "system": name, **figures})
        console.print(table)
        if set(POLICIES) <= set(systems):
            console.print(policies(rate, systems, slowest, speed))
    console.print(f"{options.layers} layers of width {options.width}; to ours: to {first!r}.")
    if options.json:
        setting = {key: getattr(options, key) for key in ("ranks", "layers", "width", "tokens", "rounds")}
        options.json.write_text(json.dumps({**setting, "torch": torch.__version__, "rows": rows}, indent=2) + "\n")


def policies(
    rate: str, systems: dict[str, System], slowest: dict[tuple[str, str], tuple[float, float, int]], speed: float
) -> str:
    """The seconds of an update by ``policy``, modelled for this network and measured, and which is faster by either."""
    machine = replace(machine_of("cpu"), flops_per_second=speed)
    if rate != FREE:
        machine = replace(machine, bytes_per_second=1 / seconds_a_byte(rate))
    modelled, measured = {}, {}
    for name, policy in POLICIES.items():
        of = systems[name].modelled
        assert of is not None
        modelled[policy], measured[policy] = of(machine), slowest[rate, name][1]
    chosen, faster = (min(times, key=lambda policy: times[policy]) for times in (modelled, measured))
    times = "; ".join(f"{p}: {1e3 * modelled[p]:.0f} ms modelled, {1e3 * measured[p]:.0f} measured" for p in modelled)
    return f"policy: {times}. 'auto' takes {chosen!r}, measured {faster!r} is faster."


def hidden(slowest: dict[Any, tuple[float, float, int]], rate: str, name: str, system: System) -> float | None:
    """The share of the wire time that steps do not wait for; None if it is not known."""
    parts = [name, *([system.host] if system.host else [])]
    if rate == FREE or not system.ours or not all((r, part) in slowest for part in parts for r in (rate, FREE)):
        return None
    slowdowns = [slowest[rate, part][0] - slowest[FREE, part][0] for part in parts]
    sent = [slowest[rate, part][2] for part in parts]
    own_slowdown, own_sent = slowdowns[0] - sum(slowdowns[1:]), sent[0] - sum(sent[1:])
    return 1 - own_slowdown / (own_sent * seconds_a_byte(rate))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", nargs="+", default=[FREE, "1gbit", "200mbit"])
    parser.add_argument("--systems", nargs="+", default=[""], metavar="TEXT", help="those whose names contain a text")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384, help="of the model")
    parser.add_argument("--tokens", type=int, default=256, help="of a rank's batch")
    parser.add_argument("--rounds", type=int, default=4, help="measured steps")
    parser.add_argument("--device-time", type=float, default=0.0, help="seconds of a layer's forward; 0: it computes")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--namespaces", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for rate in options.rates:
        try:
            assert rate == FREE or seconds_a_byte(rate)
        except (argparse.ArgumentTypeError, ValueError) as error:
            parser.error(f"--rates: {error}")
    options.systems = [n for n in all_names() if n == HOST or any(text in n for text in options.systems)]
    if options.rank is not None:
        run_rank(options)
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if os.geteuid() or missing:
        why = f"the programs {' and '.join(missing)} are missing" if missing else "it needs root"
        raise SystemExit(f"Nothing was measured: {why} (network namespaces with shaped links)")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # namespaces go, as with Ctrl-C
    with network(options.ranks) as names:
        command = [sys.executable, __file__, *sys.argv[1:], "--namespaces", *names, "--rank"]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, str(rank)], env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
            for rank, name in enumerate(names)
        ]
        try:
            codes = [process.wait() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
