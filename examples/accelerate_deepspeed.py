"""Train a small Llama or GPT-2 with Accelerate, DeepSpeed and LayerWiseMuon.

    accelerate launch --config_file configs/accelerate_deepspeed.yaml --num_processes 2 examples/accelerate_deepspeed.py

Optimizer and schedule are the DeepSpeed configuration's, which the file of settings names; ``DummyOptim`` and
``DummyScheduler`` stand for them and fill in what is "auto". ``register()`` is the only line that is not plain
Accelerate. Without GPUs, put ``DS_ACCELERATOR=cpu`` before the command and ``--cpu`` at its end. ``--out`` gets
metrics.jsonl, a checkpoint every ``--save-every`` steps, from which ``--resume`` continues, and at the end the model.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed
from corpus import Corpus
from hugging_face import MUON, ROWS, SEED, Windows, deepspeed_on_cpus_too, deepspeed_parser, log, small_model
from torch.utils.data import DataLoader

from lwopt_backend.integrations import deepspeed_zero


def main() -> None:
    args = deepspeed_parser(__doc__).parse_args()
    deepspeed_zero.register()
    if args.cpu:
        deepspeed_on_cpus_too()
    set_seed(SEED)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulation)
    # "auto" would become 1.0: under DeepSpeed the norm in clip_grad_norm_() is not looked at.
    accelerator.deepspeed_plugin.deepspeed_config["gradient_clipping"] = args.clip
    model = small_model(args.model, args.layers, args.width)  # after Accelerator(), which sets up ZeRO-3's zero.Init
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = DummyOptim(model.parameters(), lr=MUON["lr"], weight_decay=MUON["weight_decay"])
    # Accelerate divides the number of steps by the number of processes.
    steps = args.steps * accelerator.num_processes
    scheduler = DummyScheduler(optimizer, total_num_steps=steps, warmup_num_steps=1)
    windows = args.steps * args.accumulation * ROWS * accelerator.num_processes
    loader = DataLoader(Windows(Corpus.load(args.data, args.context), windows, args.context), batch_size=ROWS)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    if args.resume:
        accelerator.load_state(str(args.resume))
        accelerator.step = 0  # micro-batches, which it counts on: a step may now have another number of them
        loader = accelerator.skip_first_batches(loader, model.global_steps * args.accumulation)
    train(accelerator, model, optimizer, scheduler, loader, args)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(args.out / "model", state_dict=weights)
    accelerator.end_training()


def train(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any, loader: Any, args: argparse.Namespace
) -> None:
    """Train on the rest of the data, a checkpoint every ``--save-every`` steps. ``model`` is DeepSpeed's engine."""
    total = torch.zeros((), device=accelerator.device)
    for batch in loader:
        rates = [group["lr"] for group in optimizer.param_groups]
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)  # at the end of an accumulation it also clips, steps and schedules
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        total += loss.detach() / args.accumulation
        if not accelerator.sync_gradients:
            continue
        step = model.global_steps
        row = {
            "step": step,
            "loss": float(accelerator.reduce(total, "mean")),
            "grad_norm": float(model.get_global_grad_norm()),
            "lr": rates,
        }
        if accelerator.is_main_process:
            log(args.out, row)
            print(row, flush=True)
        total.zero_()
        if step % args.save_every == 0 or step == args.steps:
            accelerator.save_state(str(args.out / f"checkpoint-{step}"))


if __name__ == "__main__":
    main()
