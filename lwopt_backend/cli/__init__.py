"""The command ``lwopt``."""

from lwopt_backend.cli.app import main

__all__ = ["main"]
