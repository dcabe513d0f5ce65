"""Imported last by the process that ranks are forked from: what all of them would do first."""

import gc
import importlib

import deepspeed
import torch

importlib.import_module("lwopt_backend.integrations.deepspeed_zero").register()
deepspeed.utils.logger.setLevel("WARNING")
torch.use_deterministic_algorithms(True, warn_only=True)  # so that torch fills what nobody has written with NaN
# DeepSpeed's stage 3 collects garbage and makes text of its parameters in every engine, which would take half a second.
torch.set_printoptions(threshold=8, edgeitems=1)
# Whoever collects garbage looks through what was imported, and so copies the pages of memory that ranks share.
gc.collect()
gc.freeze()
