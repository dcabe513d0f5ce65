"""The runtime: the only folder that talks to torch.distributed."""
