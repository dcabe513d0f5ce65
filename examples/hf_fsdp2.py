"""Train a small Llama with the Hugging Face Trainer, FSDP2 and LayerWiseOptimizer.

    accelerate launch --config_file configs/accelerate_fsdp2.yaml --num_processes 2 examples/hf_fsdp2.py

On CPUs, with ``--cpu`` at the end. ``torchrun --nproc_per_node 2`` does as well as ``accelerate launch``: the Trainer
has FSDP's settings here. It takes no ``optimizers=`` under FSDP, but calls what the factory in
``optimizer_cls_and_kwargs`` returns, with the model. ``--out`` gets metrics.jsonl, the Trainer's checkpoints, from
which ``--resume`` continues, and at the end the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from corpus import Corpus
from hugging_face import ADAMW, MUON, ROWS, SEED, Windows, fsdp2_parser, log, shard_on_cpus_too, small_llama
from transformers import Trainer, TrainerCallback, TrainingArguments

from lwopt_backend import LayerWiseOptimizer


class Metrics(TrainerCallback):
    """Writes what the Trainer logs of a step to metrics.jsonl."""

    def on_log(self, args: TrainingArguments, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and "loss" in logs:
            log(Path(args.output_dir), {"step": state.global_step, **logs})


def main() -> None:
    options = fsdp2_parser(__doc__).parse_args()
    if options.cpu:
        shard_on_cpus_too()
    args = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=MUON["lr"],
        weight_decay=MUON["weight_decay"],
        lr_scheduler_type="linear",
        max_grad_norm=options.clip,
        train_sampling_strategy="sequential",  # the windows are drawn at random already
        fsdp=True,
        fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
        save_steps=options.save_every,
        logging_steps=1,
        report_to="none",
        use_cpu=options.cpu,
        seed=SEED,
    )
    windows = options.steps * options.accumulation * ROWS * args.world_size
    rules = {
        "matrix": {"name": "muon", "ns_dtype": options.ns_dtype, **MUON},
        "elementwise": {"name": "adamw", **ADAMW},
    }
    trainer = Trainer(
        model=small_llama(options.layers, options.width),
        args=args,
        train_dataset=Windows(Corpus.load(options.data, options.context), windows, options.context),
        callbacks=[Metrics()],
        optimizer_cls_and_kwargs=(lambda: LayerWiseOptimizer, {**rules, "sharded_later": True}),
    )
    trainer.train(resume_from_checkpoint=str(options.resume) if options.resume else None)
    weights = trainer.accelerator.get_state_dict(trainer.model)
    if trainer.is_world_process_zero():
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(options.out / "model", state_dict=weights)


if __name__ == "__main__":
    main()
