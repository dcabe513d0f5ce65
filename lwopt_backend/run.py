"""Run an unmodified training script with this package's optimizers.

    deepspeed --module lwopt_backend.run train.py --deepspeed --deepspeed_config ds_config.json
    torchrun -m lwopt_backend.run --optimizer='{"lr": "auto", "adamw": {"lr": 3e-4}}' run_clm.py --fsdp --output_dir ...

The script finds them registered with DeepSpeed. With ``--optimizer=``, Hugging Face's Trainer gets a
``LayerWiseOptimizer`` with these arguments instead. This is for scripts that stay as they are; your own passes
``optimizer_cls_and_kwargs`` to its Trainer. Only the script imports transformers, after it has set its environment
variables. The launcher puts its own ``--local_rank=N`` before the script's name; the script gets it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lwopt_backend.config.options import install_command

if TYPE_CHECKING:
    from transformers import TrainingArguments

OPTIMIZER = "--optimizer="
TRAINER = "transformers.trainer"  # where transformers defines it
USAGE = f"usage: python -m lwopt_backend.run [{OPTIMIZER}JSON] SCRIPT.py [its arguments]"


def main(arguments: list[str]) -> None:
    """Register, then run the first argument that is no option as ``__main__``, with the remaining arguments."""
    position = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if position is None:
        raise SystemExit(f"{USAGE}\nexpected a script, found only {arguments}")
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
    """Make every Trainer without an optimizer use a ``LayerWiseOptimizer`` with the arguments in this JSON.

    "auto" as ``lr`` and ``weight_decay`` is the Trainer's ``learning_rate`` and ``weight_decay``. Imports neither
    torch nor transformers: the Trainer is changed when the script imports it. Raises SystemExit for what is not an
    object, and where transformers is not installed.
    """
    try:
        arguments = json.loads(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise SystemExit(f"{USAGE}\n{OPTIMIZER} expected an object in JSON, found {text!r}")
    if importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            f"{OPTIMIZER} is for Hugging Face's Trainer, but transformers is missing: {install_command('transformers')}"
        )

    def chosen(args: TrainingArguments, model: Any = None) -> tuple[Any, dict[str, Any]]:
        if not args.fsdp:
            raise ValueError(
                f"{OPTIMIZER} needs --fsdp; under DeepSpeed, leave it out and write the "
                "optimizer into its configuration"
            )
        from lwopt_backend.optimizer import LayerWiseOptimizer

        theirs = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
        auto = {key: value for key, value in theirs.items() if arguments.get(key) == "auto"}
        return lambda: LayerWiseOptimizer, {**arguments, **auto, "sharded_later": True}

    def change(trainer: ModuleType) -> None:
        trainer.Trainer.get_optimizer_cls_and_kwargs = staticmethod(chosen)

    if TRAINER in sys.modules:
        change(sys.modules[TRAINER])
    else:
        sys.meta_path.insert(0, WhenImported(TRAINER, change))


@dataclass(frozen=True)
class WhenImported(MetaPathFinder):
    """In ``sys.meta_path``, calls ``then`` with the module of this name as soon as it has been imported."""

    name: str
    then: Callable[[ModuleType], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == self.name else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    main(sys.argv[1:])
