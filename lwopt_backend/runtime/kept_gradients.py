"""Mean gradients that are kept on all ranks, where only some ranks had a gradient of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lwopt_backend.runtime.bucket_buffers import BucketBuffers
from lwopt_backend.runtime.presence import Presence


def show_everywhere(buckets: Sequence[BucketBuffers], params: Sequence[Tensor]) -> None:
    """Give the mean gradient to parameters that had none on this rank, but on another. Called on all ranks."""
    for sharers in {id(bucket.sharers): bucket.sharers for bucket in buckets}.values():
        slots = [
            (bucket, slot.param) for bucket in buckets if bucket.sharers is sharers for slot in bucket.bucket.slots
        ]
        here = [params[index].grad is not None for _, index in slots]
        presence = Presence(sharers.everyone, here, params[0].device)
        for place, (bucket, index) in enumerate(slots):
            if not here[place] and presence(place):
                assert bucket.full is not None
                params[index].grad = bucket.view(bucket.full, index)
        presence.finish()
