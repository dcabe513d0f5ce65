"""The tensors of a state dict: of each, this rank's part, which torch.distributed.checkpoint saves and loads."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.engines.buffers.saves import Save


class PartialTensor(Tensor):
    """A tensor in a state dict, of which this rank has some boxes: views of its stepped pieces.

    ``torch.distributed.checkpoint`` saves and loads it on any number of ranks; ``torch.save`` saves this rank's boxes.
    It can be detached, copied and moved to another device; any other operation raises TypeError.

    - ``shape``: the whole tensor's.
    - ``boxes``: tensors by the place of their first element; empty on a rank that owns none of it.
    - ``refused``: why it cannot be saved together with other ranks' pieces; empty if it can.
    - ``of``: the rank that owns them, and the number of ranks; empty if nobody asks.
    - ``save``: the state dict that has them, until it is copied.
    """

    boxes: dict[tuple[int, ...], Tensor]
    refused: str
    of: tuple[int, ...]
    save: Save | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        boxes: Mapping[tuple[int, ...], Tensor],
        refused: str = "",
        of: tuple[int, ...] = (),
        save: Save | None = None,
    ) -> PartialTensor:
        device = next((box.device for box in boxes.values()), torch.device("cpu"))
        made: PartialTensor = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        made.boxes, made.refused, made.of, made.save = dict(boxes), refused, of, save
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PartialTensor(shape={tuple(self.shape)}, boxes={self.boxes})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.save is not None:
            self.save.begin()
        return PartialTensor, (tuple(self.shape), self.dtype, self.boxes, self.refused, self.of)

    def __deepcopy__(self, memo: dict[int, Any]) -> PartialTensor:
        """Of no ``save``: a thread may save a copy, at any time."""
        boxes = copy.deepcopy(self.boxes, memo)
        memo[id(self)] = made = PartialTensor(self.shape, self.dtype, boxes, self.refused, self.of)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        aten, partial = torch.ops.aten, args[0]
        if func is aten.new_empty.default:  # torch's asynchronous save then sets its attributes
            return PartialTensor(args[1], (kwargs or {}).get("dtype") or partial.dtype, {}, partial.refused)
        if func not in (aten.detach.default, aten.clone.default, aten._to_copy.default):
            raise TypeError(
                f"expected a whole tensor for {func}, found {len(partial.boxes)} boxes of it on this rank; use .boxes"
            )
        boxes = {place: func(box, *args[1:], **(kwargs or {})) for place, box in partial.boxes.items()}
        dtype = (kwargs or {}).get("dtype") or partial.dtype
        save = None if func is aten.clone.default else partial.save  # as of a deep copy
        return PartialTensor(partial.shape, dtype, boxes, partial.refused, partial.of, save)

    def __create_write_items__(self, key: str, value: object) -> list[Any]:
        from lwopt_backend.checkpoint.dcp.saving import write_item

        return [write_item(key, self.shape, self.dtype, chunk) for chunk in self.__create_chunk_list__()]

    def __create_chunk_list__(self) -> list[Any]:
        from lwopt_backend.checkpoint.dcp.saving import ChunkStorageMetadata

        self.check()
        return [ChunkStorageMetadata(torch.Size(place), box.shape) for place, box in self.boxes.items()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        return self.boxes[tuple(index.offset)]

    @property
    def is_whole(self) -> bool:
        return sum(box.numel() for box in self.boxes.values()) == self.numel()

    def whole(self) -> Tensor:
        """The whole tensor, from its boxes, which ``is_whole``."""
        found = torch.empty(self.shape, dtype=self.dtype)
        for place, box in self.boxes.items():
            found[tuple(slice(begin, begin + size) for begin, size in zip(place, box.shape))] = box
        return found

    def check(self) -> None:
        """Raises ValueError if it cannot be saved together with other ranks' pieces."""
        if self.refused:
            raise ValueError(self.refused)


# Also by the names that it has in earlier state dicts (``engines/owned/state.py``, and ``state.py`` here).
NAMES = ("lwopt_backend.engines.owned.state.Pieces", "lwopt_backend.engines.buffers.state.PartialTensor")
torch.serialization.add_safe_globals([PartialTensor, *((PartialTensor, name) for name in NAMES)])
