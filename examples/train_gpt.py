"""Train a small GPT on real text, with DeepSpeed's ZeRO or with FSDP2: the same model, batches and schedule.

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed --deepspeed_config configs/zero2_muon.json
    torchrun --nproc_per_node 2 examples/train_gpt.py --engine fsdp2 --config configs/fsdp2_muon.json

What the two differ in is in deepspeed_engine.py and fsdp2_engine.py. Results are written to ``runs/<name>/``:
metrics.jsonl, loss.png and a checkpoint, from which ``--resume`` continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from corpus import Corpus
from gpt import GPT, GPTConfig
from run_folder import RunFolder

from lwopt_backend.rules.newton_schulz import multiplies_bf16

WARMUP_STEPS = 20
FINAL_LR = 0.1  # of the configured rate
LINES = 30  # at most, about steps, where there is no screen for a bar
VALIDATION_BATCHES, VALIDATION_ROWS = 8, 16
IN_FP32 = "Newton-Schulz runs in fp32 (ns_dtype), because this CPU has no products in bfloat16"


@dataclass(frozen=True)
class Start:
    """How a run with an engine is started."""

    launcher: str
    option: str  # that names the configuration
    config: str


STARTS = {
    "deepspeed": Start("deepspeed --num_accelerators 2 ...", "deepspeed_config", "configs/zero2_muon.json"),
    "fsdp2": Start("torchrun --nproc_per_node 2 ...", "config", "configs/fsdp2_muon.json"),
}


class Engine(Protocol):
    """What the loop needs of DeepSpeed or FSDP2. All methods are called on all ranks.

    - ``train_step``: one optimizer step over ``accumulation`` micro-batches; their mean loss on this rank.
    - ``optimizer``: the layer-wise one.
    - ``grad_norm``: the norm of the last step's gradients over all ranks, before clipping.
    - ``save``: a checkpoint in a folder; ``load``: the latest one there and its step, or None if there is none.
    """

    model: nn.Module
    optimizer: Any
    device: torch.device
    micro_batch: int
    accumulation: int

    def train_step(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Tensor: ...

    def grad_norm(self) -> float: ...

    def save(self, folder: Path, step: int) -> None: ...

    def load(self, folder: Path) -> int | None: ...


def make_engine(args: argparse.Namespace) -> Engine:
    """The engine of ``--engine``, the only one that is imported, on a model that is the same on every rank."""
    if args.engine == "fsdp2":
        from fsdp2_engine import FSDP2Engine as EngineClass
    else:
        from deepspeed_engine import DeepSpeedEngine as EngineClass

    def make_model() -> GPT:
        torch.manual_seed(args.seed)
        return GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context, tied_head=args.tied_head))

    with tempfile.TemporaryDirectory() as folder:
        if iterate_in_fp32(args, Path(folder)) and int(os.environ.get("RANK", 0)) == 0:
            print(IN_FP32, flush=True)
        return EngineClass(args, make_model, lambda step: schedule(args.steps, step))


def iterate_in_fp32(args: argparse.Namespace, folder: Path) -> bool:
    """Where a CPU without products in bfloat16 trains: take the configuration from a copy in ``folder`` that says so,
    unless it has an ``ns_dtype``, or no Muon. Returns whether it does."""
    path = Path(config_file(args))
    try:
        content = json.loads(path.read_text())
        options = content["optimizer"]
        options = options["params"] if options.get("type") == "LayerWiseMuon" else options
        is_muon = options is not content["optimizer"] or options["matrix"] == "muon"
    except (ValueError, KeyError, TypeError, AttributeError):
        return False  # the engine says what is wrong
    if torch.accelerator.is_available() or multiplies_bf16() or not is_muon or "ns_dtype" in options:
        return False
    options["ns_dtype"] = "float32"
    (folder / path.name).write_text(json.dumps(content))
    setattr(args, STARTS[args.engine].option, str(folder / path.name))
    return True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=list(STARTS), default="deepspeed")
    parser.add_argument("--deepspeed", action="store_true", help="taken as every DeepSpeed script takes it")
    parser.add_argument("--deepspeed_config", metavar="FILE", help="configuration of --engine deepspeed")
    parser.add_argument("--config", metavar="FILE", help="configuration of --engine fsdp2")
    parser.add_argument(
        "--data",
        metavar="FILE_OR_FOLDER",
        help="text to train on (at most 16 MiB are read); default: Python's own sources",
    )
    parser.add_argument("--name", help="the run's folder under --out; default: the name of the configuration file")
    parser.add_argument("--out", default="runs", help="where runs are written (default: runs)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the batches (default: 1)")
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop there, as if interrupted")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue from the run's checkpoint")
    parser.add_argument("--metrics", action="store_true", help="also write optimizer.metrics() of each step")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    parser.add_argument("--tied-head", action="store_true", help="share the embedding with the output head")
    parser.add_argument("--single-process", action="store_true", help="allow a run on one process")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is started."""
    start = STARTS[args.engine]
    for engine, other in STARTS.items():
        if engine != args.engine and getattr(args, other.option) is not None:
            raise SystemExit(
                f"--{other.option} is for --engine {engine}; --engine {args.engine} takes --{start.option}"
            )
    config = config_file(args)
    if config is None or not os.path.isfile(config):
        raise SystemExit(f"--{start.option} {config}: no such file; try {start.config}")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not args.single_process:
        raise SystemExit(
            "one process was started, so nothing would be sharded: on a CPU the launcher starts one unless told "
            f"otherwise; use `{start.launcher}`, or --single-process if one is what you want"
        )
    for option in ("steps", "save_every", "layers", "width", "context"):
        if getattr(args, option) < 1:
            raise SystemExit(f"--{option.replace('_', '-')}: expected at least 1, found {getattr(args, option)}")


def config_file(args: argparse.Namespace) -> str | None:
    return getattr(args, STARTS[args.engine].option)


def schedule(steps: int, step: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    progress = min(1.0, step / max(1, steps))
    return warm * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress)))


class Training:
    """One run: the engine, its data and its folder."""

    def __init__(self, args: argparse.Namespace, corpus: Corpus) -> None:
        self.args = args
        self.corpus = corpus
        self.engine = make_engine(args)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        name = args.name or Path(config_file(args)).stem
        self.folder = RunFolder(Path(args.out) / name, is_writer=self.rank == 0)

    def run(self) -> None:
        step = self._begin()
        if self.args.metrics:
            self.engine.optimizer.record_metrics()
        last = min(self.args.steps, self.args.stop_after or self.args.steps)
        tokens = self.engine.micro_batch * self.engine.accumulation * self.world_size * self.args.context
        shown = {"initial": step, "total": self.args.steps, "unit": "step", "mininterval": 1.0}
        bar = tqdm(range(step, last), **shown, disable=True if self.rank else None)  # None: but for a screen
        lines = range(0) if self.rank or not bar.disable else range(0, last, max(1, self.args.steps // LINES))
        for step in bar:
            started = time.perf_counter()
            rates = [group["lr"] for group in self.engine.optimizer.param_groups]
            loss = self._mean(self.engine.train_step(self._batches(step)))
            speed = tokens / (time.perf_counter() - started)
            taken = self.engine.optimizer.metrics() if self.args.metrics else {}
            taken |= {"lr": rates, "grad_norm": self.engine.grad_norm(), "tokens_per_s": round(speed)}
            self.folder.log({"step": step + 1, "loss": loss, **taken})
            told = {"loss": f"{loss:.3f}", "lr": f"{rates[0]:.2g}", "tokens_per_s": f"{speed:.0f}"}
            bar.set_postfix(told, refresh=False)
            if step in lines:
                line = ", ".join(f"{key}={value}" for key, value in told.items())
                print(f"step {step + 1} of {self.args.steps}: {line}", file=sys.stderr, flush=True)
            if (step + 1) % self.args.save_every == 0 or step + 1 == last:
                self.engine.save(self.folder.checkpoint, step + 1)
        self._end(last)

    def _begin(self) -> int:
        """The step to go on from. A new run is validated first, a resumed one has been."""
        if self.args.resume:
            return self._resume()
        self.folder.begin(self._settings())
        self.folder.log({"step": 0, "validation_loss": self._validate()})
        return 0

    def _resume(self) -> int:
        saved, wanted = self.folder.settings(), self._settings()
        if saved not in (None, wanted):
            raise SystemExit(f"--resume: the checkpoint is of a run with {saved}, this one has {wanted}")
        step = self.engine.load(self.folder.checkpoint) if saved else None
        if step is None:
            raise SystemExit(f"--resume: no checkpoint in {self.folder.checkpoint}; start the run without --resume")
        self.folder.keep_until(step)
        return step

    def _batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the step's global batch."""
        micro = self.engine.micro_batch
        for part in range(self.engine.accumulation):
            first = (part * self.world_size + self.rank) * micro
            yield self.corpus.train_batch(step, range(first, first + micro), self.args.context, self.args.seed)

    @torch.no_grad()
    def _validate(self) -> float:
        self.engine.model.eval()
        batches = list(self.corpus.validation_batches(VALIDATION_BATCHES, VALIDATION_ROWS, self.args.context))
        total = torch.zeros((), device=self.engine.device)
        for first in range(0, VALIDATION_BATCHES, self.world_size):
            number = first + self.rank
            # A rank without a batch of its own runs one too, and does not count it: FSDP2 gathers weights on all ranks.
            batch = batches[min(number, VALIDATION_BATCHES - 1)]
            loss = self.engine.model(*(rows.to(self.engine.device) for rows in batch))
            total += loss if number < VALIDATION_BATCHES else 0
        self.engine.model.train()
        return self._mean(total) * self.world_size / VALIDATION_BATCHES

    def _mean(self, value: Tensor) -> float:
        """Over all ranks."""
        dist.all_reduce(value)
        return value.item() / self.world_size

    def _settings(self) -> dict[str, Any]:
        return {
            key: getattr(self.args, key)
            for key in ("engine", "layers", "width", "context", "tied_head", "steps", "seed")
        }

    def _end(self, step: int) -> None:
        self.folder.log({"step": step, "validation_loss": self._validate()})
        self.folder.finish()


def main() -> None:
    args = parse_arguments()
    check(args)
    try:
        corpus = Corpus.load(args.data, args.context)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if int(os.environ.get("RANK", 0)) == 0:
        train, validation = len(corpus.train), len(corpus.validation)
        print(f"{train:,} bytes to train on and {validation:,} to validate on, from {corpus.source}", flush=True)
    Training(args, corpus).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
