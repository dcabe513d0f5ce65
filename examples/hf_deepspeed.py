"""Train a small Llama or GPT-2 with the Hugging Face Trainer, DeepSpeed and LayerWiseMuon.

    deepspeed --num_accelerators 2 examples/hf_deepspeed.py --deepspeed configs/hf_deepspeed.json

The optimizer is the configuration's; ``register()`` is the only line that is not plain transformers. ``accelerate
launch --config_file configs/accelerate_deepspeed.yaml`` does as well and names the configuration itself. Without GPUs,
put ``DS_ACCELERATOR=cpu`` before the command and ``--cpu`` at its end. ``--out`` gets metrics.jsonl, the Trainer's
checkpoints, from which ``--resume`` continues, and at the end the model.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from corpus import Corpus
from hugging_face import MUON, ROWS, SEED, Windows, deepspeed_on_cpus_too, deepspeed_parser, log, small_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from lwopt_backend.integrations import deepspeed_zero


class Metrics(TrainerCallback):
    """Writes what the Trainer logs of a step to metrics.jsonl."""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            log(Path(args.output_dir), {"step": state.global_step, **logs})


def main() -> None:
    parser = deepspeed_parser(__doc__)
    parser.add_argument("--deepspeed", metavar="DS_CONFIG", help="not needed where accelerate launch has one")
    options = parser.parse_args()
    if options.deepspeed is None and os.environ.get("ACCELERATE_USE_DEEPSPEED") != "true":
        parser.error("give --deepspeed, e.g. --deepspeed configs/hf_deepspeed.json")
    deepspeed_zero.register()
    if options.cpu:
        deepspeed_on_cpus_too()
    args = TrainingArguments(
        output_dir=str(options.out),
        deepspeed=options.deepspeed,
        max_steps=options.steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=MUON["lr"],
        weight_decay=MUON["weight_decay"],
        lr_scheduler_type="linear",
        max_grad_norm=options.clip,
        train_sampling_strategy="sequential",  # the windows are drawn at random already
        save_steps=options.save_every,
        logging_steps=1,
        report_to="none",
        seed=SEED,
        **({"gradient_checkpointing": True} if options.gradient_checkpointing else {}),
    )
    windows = options.steps * options.accumulation * ROWS * args.world_size
    trainer = Trainer(
        model=small_model(options.model, options.layers, options.width),  # after args, which set up ZeRO-3's zero.Init
        args=args,
        train_dataset=Windows(Corpus.load(options.data, options.context), windows, options.context),
        callbacks=[Metrics()],
    )
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
    trainer.save_model(str(options.out / "model"))


if __name__ == "__main__":
    main()
