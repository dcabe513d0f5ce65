"""The supported and the tested versions of other packages. pyproject.toml, pages, scripts and messages say the same."""

from __future__ import annotations

import functools
import os
import re
import warnings
from dataclasses import dataclass


@dataclass(frozen=True)
class Versions:
    """``supported``: what pip accepts. ``tested``: the releases that a command of the Makefile runs tests with, oldest
    first; ``command`` runs all of them, or those that `make test` leaves out."""

    supported: str
    tested: tuple[str, ...]
    command: str


VERSIONS = {
    "torch": Versions(">=2.9", ("2.9.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0"), "make test-versions ARGS=torch"),
    # Older ones lack zero_parameter_alignment; newer ones may have moved what integrations/deepspeed replaces.
    "deepspeed": Versions(">=0.19.7,<0.20", ("0.19.7", "0.19.8"), "make test-versions ARGS=deepspeed"),
    "transformers": Versions(">=5,<6", ("5.23.0", "5.24.0"), "make test-peers ARGS=hugging_face"),
    "accelerate": Versions(">=1.15", ("1.15.0",), "make test-peers ARGS=hugging_face"),
    "trl": Versions(">=1.16,<2", ("1.16.0",), "make test-peers ARGS=trl"),
    "peft": Versions(">=0.18", ("0.21.2",), "make test-peers ARGS=trl"),
    "lightning": Versions(">=2.6,<3", ("2.6.6",), "make test-peers ARGS=lightning"),
    "torchtitan": Versions("==0.3.0", ("0.3.0",), "make test-peers ARGS=torchtitan"),
    "verl": Versions("==0.9.1", ("0.9.1",), "make test-peers ARGS=verl"),
    "nemo-automodel": Versions("==0.7.0", ("0.7.0",), "make test-peers ARGS=automodel"),
    "llamafactory": Versions("==0.9.5", ("0.9.5",), "make test-peers ARGS=llamafactory"),
    "pytorch-optimizer": Versions(">=4.1,<5", ("4.1.0",), "make test-peers ARGS=pytorch_optimizer"),
    "emerging-optimizers": Versions(">=0.3,<0.4", ("0.3.0",), "make test-peers ARGS=emerging"),
}


def requirement(package: str) -> str:
    """The requirement for pip, e.g. ``"torch>=2.9"``."""
    return package + VERSIONS[package].supported


def is_first_rank() -> bool:
    """Whether this process is the first of those that a launcher started, or alone."""
    return os.environ.get("RANK", "0") == "0"


@functools.cache
def warn_if_newer(package: str, found: str) -> None:
    """Warn, once a process and on rank 0 only, of a release later than the newest tested one. Patches are not later."""
    newest = VERSIONS[package].tested[-1]
    if _minor(found) > _minor(newest) and is_first_rank():
        warnings.warn(
            f"expected {package} {newest} or older, the newest that lwopt_backend was tested with, found {found}; run "
            f"`make test` in a checkout of lwopt_backend with it, or install {package}=={newest}",
            stacklevel=2,
        )


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
