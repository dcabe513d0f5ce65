"""The error of all code of checkpoints."""

DEBUG = "LWOPT_DEBUG"  # set to 1 in the environment, tracebacks of errors are printed


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or must not be converted. The message names file, tensor, and what to do."""
