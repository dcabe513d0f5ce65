"""Train a small GPT on real text under the `deepspeed` launcher.

    deepspeed --num_accelerators 2 examples/train_gpt.py --deepspeed --deepspeed_config configs/zero2_muon.json

The only line that is not plain DeepSpeed is ``deepspeed_zero.register()``. Results are written to ``runs/<name>/``:
metrics.jsonl, loss.png and a checkpoint, from which ``--resume`` continues.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import deepspeed
from corpus import Corpus
from gpt import GPT, GPTConfig
from run_folder import RunFolder

from lwopt_backend.integrations import deepspeed_zero

SEED = 1
WARMUP_STEPS = 20
FINAL_LR = 0.1  # of the configured rate
VALIDATION_BATCHES, VALIDATION_ROWS = 8, 16


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data",
        metavar="FILE_OR_FOLDER",
        help="text to train on (at most 16 MiB are read); default: Python's own sources",
    )
    parser.add_argument("--name", help="the run's folder under --out; default: the name of the configuration file")
    parser.add_argument("--out", default="runs", help="where runs are written (default: runs)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--stop-after", type=int, metavar="STEP", help="save and stop there, as if interrupted")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue from the run's checkpoint")
    parser.add_argument("--layers", type=int, default=GPTConfig.layers)
    parser.add_argument("--width", type=int, default=GPTConfig.width)
    parser.add_argument("--context", type=int, default=GPTConfig.context)
    parser.add_argument("--tied-head", action="store_true", help="share the embedding with the output head")
    parser.add_argument("--single-process", action="store_true", help="allow a run on one process")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work, before anything is started."""
    if args.deepspeed_config is None or not os.path.isfile(args.deepspeed_config):
        raise SystemExit(f"--deepspeed_config {args.deepspeed_config}: no such file; try configs/zero2_muon.json")
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 and not args.single_process:
        raise SystemExit(
            "one process was started, so nothing would be sharded: on a CPU the launcher starts one unless told "
            "otherwise; use `deepspeed --num_accelerators 2 ...`, or --single-process if one is what you want"
        )
    for option in ("steps", "save_every", "layers", "width", "context"):
        if getattr(args, option) < 1:
            raise SystemExit(f"--{option.replace('_', '-')}: expected at least 1, found {getattr(args, option)}")


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
        torch.manual_seed(SEED)
        model = GPT(GPTConfig(layers=args.layers, width=args.width, context=args.context, tied_head=args.tied_head))
        self.engine, *_ = deepspeed.initialize(
            args=args,
            model=model,
            model_parameters=model.parameters(),
            lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: schedule(args.steps, step)),
        )
        self.rank, self.world_size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
        name = args.name or Path(args.deepspeed_config).stem
        self.folder = RunFolder(Path(args.out) / name, is_writer=self.rank == 0)

    def run(self) -> None:
        step = self._begin()
        last = min(self.args.steps, self.args.stop_after or self.args.steps)
        tokens = self.engine.train_batch_size() * self.args.context
        show = {
            "initial": step,
            "total": self.args.steps,
            "unit": "step",
            "mininterval": 1.0,
            "disable": self.rank != 0,
        }
        bar = tqdm(range(step, last), **show)
        for step in bar:
            started = time.perf_counter()
            rates = self.engine.get_lr()
            loss = self._train_step(step)
            speed = tokens / (time.perf_counter() - started)
            norm = float(self.engine.get_global_grad_norm())
            self.folder.log(
                {"step": step + 1, "loss": loss, "lr": rates, "grad_norm": norm, "tokens_per_s": round(speed)}
            )
            bar.set_postfix(loss=f"{loss:.3f}", lr=f"{rates[0]:.2g}", tokens_per_s=f"{speed:.0f}", refresh=False)
            if (step + 1) % self.args.save_every == 0 or step + 1 == last:
                self._save(step + 1)
        self._end(last)

    def _begin(self) -> int:
        """The step to go on from. A new run is validated first, a resumed one has been."""
        if self.args.resume:
            path, state = self.engine.load_checkpoint(str(self.folder.checkpoint))
            if path is None:
                raise SystemExit(f"--resume: no checkpoint in {self.folder.checkpoint}; start the run without --resume")
            if state["shape"] != self._shape():
                raise SystemExit(
                    f"--resume: the checkpoint is of a run with {state['shape']}, this one has {self._shape()}"
                )
            self.folder.keep_until(state["step"])
            return state["step"]
        self.folder.clear()
        self.folder.log({"step": 0, "validation_loss": self._validate()})
        return 0

    def _train_step(self, step: int) -> float:
        """One optimizer step over all micro-batches; the loss averaged over micro-batches and ranks."""
        micro, accumulation = self.engine.train_micro_batch_size_per_gpu(), self.engine.gradient_accumulation_steps()
        total = torch.zeros((), device=self.engine.device)
        for part in range(accumulation):
            first = (part * self.world_size + self.rank) * micro
            batch = self.corpus.train_batch(step, range(first, first + micro), self.args.context, SEED)
            loss = self.engine(*(rows.to(self.engine.device) for rows in batch))
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / accumulation
        return self._mean(total)

    @torch.no_grad()
    def _validate(self) -> float:
        self.engine.eval()
        batches = self.corpus.validation_batches(VALIDATION_BATCHES, VALIDATION_ROWS, self.args.context)
        total = torch.zeros((), device=self.engine.device)
        for number, batch in enumerate(batches):
            if number % self.world_size == self.rank:
                total += self.engine.module(*(rows.to(self.engine.device) for rows in batch))
        self.engine.train()
        return self._mean(total) * self.world_size / VALIDATION_BATCHES

    def _mean(self, value: torch.Tensor) -> float:
        deepspeed.comm.all_reduce(value)
        return value.item() / self.world_size

    def _save(self, step: int) -> None:
        self.engine.save_checkpoint(
            str(self.folder.checkpoint), tag=f"step{step}", client_state={"step": step, "shape": self._shape()}
        )

    def _shape(self) -> dict[str, int]:
        return {key: getattr(self.args, key) for key in ("layers", "width", "context", "tied_head", "steps")}

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
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 has renamed; once per process is once too often.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    deepspeed_zero.register()
    deepspeed.init_distributed()
    if deepspeed.comm.get_rank() == 0:
        train, validation = len(corpus.train), len(corpus.validation)
        print(f"{train:,} bytes to train on and {validation:,} to validate on, from {corpus.source}")
    Training(args, corpus).run()


if __name__ == "__main__":
    main()
