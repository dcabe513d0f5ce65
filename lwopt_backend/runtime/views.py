"""Views of a local tensor that a plan tells of; they share its memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lwopt_backend.plan.block_views import Span, View, box_views
from lwopt_backend.plan.blocks import Block


def flat_views(flat: Tensor, views: Sequence[View]) -> list[Tensor]:
    """Views into a rank's flat tensor, of one dimension, such as ``BlockPartition.views`` gives."""
    (stride,) = flat.stride()
    return [_view(flat, View(v.offset * stride, v.sizes, tuple(stride * s for s in v.strides))) for v in views]


def local_views(local: Tensor, block: Block, shape: Sequence[int], box: Sequence[Span]) -> list[Tensor]:
    """What ``local``, a rank's ``box`` of a parameter of ``shape``, holds of a block, as it lies in memory.

    Together they are the rank's fragment of the block row by row. Of two local tensors with other strides the views
    have the same shapes. Raises ValueError as ``box_views`` does.
    """
    return [_view(local, view) for view in box_views(block, shape, box, local.stride())]


def _view(tensor: Tensor, view: View) -> Tensor:
    return tensor.as_strided(view.sizes, view.strides, tensor.storage_offset() + view.offset)
