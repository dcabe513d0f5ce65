"""Train a small Llama with Accelerate, FSDP2 and LayerWiseOptimizer.

    accelerate launch --config_file configs/accelerate_fsdp2.yaml --num_processes 2 examples/accelerate_fsdp2.py

On CPUs, with ``--cpu`` at the end. The optimizer is made before ``prepare``, which shards its parameters: that is what
``sharded_later=True`` says. Everything else is plain Accelerate. ``--out`` gets metrics.jsonl, a checkpoint every
``--save-every`` steps, from which ``--resume`` continues, and at the end the model as ``save_pretrained`` writes it.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from corpus import Corpus
from hugging_face import ADAMW, MUON, ROWS, SEED, Windows, fsdp2_parser, log, shard_on_cpus_too, small_llama
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lwopt_backend import LayerWiseOptimizer


def main() -> None:
    args = fsdp2_parser(__doc__).parse_args()
    if args.cpu:
        shard_on_cpus_too()
    set_seed(SEED)
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.accumulation)
    model = small_llama(args.layers, args.width)
    optimizer = LayerWiseOptimizer(
        model, "muon", **MUON, elementwise={"name": "adamw", **ADAMW}, ns_dtype=args.ns_dtype, sharded_later=True
    )
    windows = args.steps * args.accumulation * ROWS * accelerator.num_processes
    loader = DataLoader(Windows(Corpus.load(args.data, args.context), windows, args.context), batch_size=ROWS)
    # Not prepared: Accelerate would step it once per process.
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / args.steps)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(scheduler)
    if args.resume:
        accelerator.load_state(str(args.resume))
        accelerator.step = 0  # micro-batches, which it counts on: a step may now have another number of them
        loader = accelerator.skip_first_batches(loader, scheduler.last_epoch * args.accumulation)
    train(accelerator, model, optimizer, scheduler, loader, args)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out / "model", state_dict=weights)
    accelerator.end_training()


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: LambdaLR,
    loader: Any,
    args: argparse.Namespace,
) -> None:
    """Train on the rest of the data, a checkpoint every ``--save-every`` steps."""
    total = torch.zeros((), device=accelerator.device)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            total += loss.detach() / args.accumulation
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            optimizer.zero_grad()
        if not accelerator.sync_gradients:
            continue
        rates = [group["lr"] for group in optimizer.param_groups]
        scheduler.step()
        step = scheduler.last_epoch
        row = {"step": step, "loss": float(accelerator.reduce(total, "mean")), "grad_norm": float(norm), "lr": rates}
        if accelerator.is_main_process:
            log(args.out, row)
            print(row, flush=True)
        total.zero_()
        if step % args.save_every == 0 or step == args.steps:
            accelerator.save_state(str(args.out / f"checkpoint-{step}"))


if __name__ == "__main__":
    main()
