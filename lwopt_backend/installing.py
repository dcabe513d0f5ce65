"""How messages tell users to install an optional package."""

from __future__ import annotations

import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

DISTRIBUTION = "lwopt-backend"


def install_command(package: str, version: str = "") -> str:
    """The command that installs ``package``, by default in the versions that this project's extras ask for.

    It names the package itself and not the extra: ``pip install "lwopt-backend[hf]"`` would look for this project on
    an index, which is wrong for a checkout.
    """
    requirement = f"{package}{version}" if version else _required(package)
    return f"pip install {shlex.quote(requirement)}"


def _required(package: str) -> str:
    """The requirement as the installed metadata has it; the bare name where this project is not installed."""
    try:
        found = [text.partition(";")[0].strip() for text in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:  # imported by path
        return package
    return {re.split(r"[^\w.-]", text)[0]: text for text in found}[package]
