"""torchvision beside a torch for which it was not built: two operators are declared, of which its models need one."""

import importlib.util

import torch
from torch import Tensor

# What torchvision registers for tensors without values when it is imported, whether its library was loaded or not
OPERATORS = ("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",)
OPERATORS += ("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",)
_kept: list[torch.library.Library] = []


def load() -> None:
    """Import torchvision, whose models then run; without it, nothing happens."""
    if importlib.util.find_spec("torchvision") is None or _kept:
        return
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for operator in OPERATORS:
            library.define(operator)
            library.impl(operator.partition("(")[0], best, "CPU")
        _kept.append(library)
    import torchvision.ops.boxes

    torchvision.ops.boxes._assert_has_ops = lambda: None  # `roi_align` has a form without its operator


def best(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """The best boxes, which may overlap: enough for a model that runs on zeros."""
    return scores.argsort(descending=True)[:8]
