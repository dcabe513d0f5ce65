"""Parameters and gradients in this package's buffers: plain PyTorch, and DeepSpeed's ``"storage": "owned"``.

A buffer is a bucket of whole parameters, of which each rank owns a part, with its state.
"""
