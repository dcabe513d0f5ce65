"""Checkpoints of runs in plain PyTorch: the optimizer state of owned storage, beside the model's own file."""
