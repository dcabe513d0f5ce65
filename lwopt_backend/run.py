"""Run an unmodified training script with our optimizers.

    deepspeed --module lwopt_backend.run train.py --deepspeed --deepspeed_config ds_config.json
    torchrun -m lwopt_backend.run --optimizer='{"lr": "auto", "adamw": {"lr": 3e-4}}' run_clm.py --fsdp --output_dir ...

They are registered with DeepSpeed. With ``--optimizer=``, Hugging Face's Trainer gets a ``LayerWiseOptimizer`` with
these arguments instead. The launcher puts its own ``--local_rank=N`` before the script's name; it is handed on to the
script.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from typing import Any

OPTIMIZER = "--optimizer="
USAGE = f"usage: python -m lwopt_backend.run [{OPTIMIZER}JSON] SCRIPT.py [its arguments]"


def main(arguments: list[str]) -> None:
    """Register, then run the first argument that is not an option as ``__main__`` with all the others."""
    position = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if position is None:
        raise SystemExit(f"{USAGE}\nno script was given; found only {arguments}")
    script = arguments[position]
    if not os.path.isfile(script):
        raise SystemExit(f"{USAGE}\nno such script: {script}")
    chosen = [argument for argument in arguments[:position] if argument.startswith(OPTIMIZER)]
    if chosen:
        give_to_the_trainer(chosen[-1].removeprefix(OPTIMIZER))
    else:
        importlib.import_module("lwopt_backend.integrations.deepspeed_zero").register()
    sys.argv = [script, *(each for each in arguments[:position] if each not in chosen), *arguments[position + 1 :]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


def give_to_the_trainer(text: str) -> None:
    """Every Trainer that is given no optimizer makes a ``LayerWiseOptimizer`` with the arguments in this JSON.

    "auto" as ``lr`` and ``weight_decay`` is the Trainer's ``learning_rate`` and ``weight_decay``. Raises SystemExit for
    what is not an object.
    """
    from transformers import Trainer, TrainingArguments

    from lwopt_backend.optimizer import LayerWiseOptimizer

    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise SystemExit(f"{USAGE}\n{OPTIMIZER} expected an object in JSON, found {text!r}")

    def chosen(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        if not args.fsdp:
            raise ValueError(
                f"{OPTIMIZER} needs --fsdp; under DeepSpeed, leave it out and write the "
                "optimizer into its configuration"
            )
        theirs = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        auto = {key: value for key, value in theirs.items() if arguments.get(key) == "auto"}
        return lambda: LayerWiseOptimizer, {**arguments, **auto, "sharded_later": True}

    Trainer.get_optimizer_cls_and_kwargs = staticmethod(chosen)  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1:])
