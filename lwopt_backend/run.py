"""Run an unmodified training script with our optimizers registered.

    deepspeed --module lwopt_backend.run train.py --deepspeed --deepspeed_config ds_config.json

The launcher puts its own ``--local_rank=N`` before the script's name; it is handed on to the script.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

USAGE = "usage: python -m lwopt_backend.run SCRIPT.py [its arguments]"


def main(arguments: list[str]) -> None:
    """Register, then run the first argument that is not an option as ``__main__`` with all the others."""
    position = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if position is None:
        raise SystemExit(f"{USAGE}\nno script was given; found only {arguments}")
    script = arguments[position]
    if not os.path.isfile(script):
        raise SystemExit(f"{USAGE}\nno such script: {script}")
    importlib.import_module("lwopt_backend.integrations.deepspeed_zero").register()
    sys.argv = [script, *arguments[:position], *arguments[position + 1 :]]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
