"""``traffic`` is what is sent, byte for byte: beside formulas, the tensors given to c10d, and the network's counter."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lwopt_backend.plan.buffers.arrangement import Bucket
from tests.models import UnevenLM
from tests.owned import optimizer_for, shares
from tests.ranks import RankPool
from tests.test_owned_memory import Chain
from tests.zero import ADAMW, config, engine_for
from tests.zero import train as train_engine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NETWORK = Path("/proc/net/dev")


class Watch(TorchDispatchMode):
    """Counts the bytes of every tensor that this process gives to c10d, by operation; flags, in int32, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = str(func._overloadpacket).split(".")[-1].strip("_")
            tensors = [
                t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor) and t.is_floating_point()
            ]
            self.nbytes[name] += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return func(*args, **(kwargs or {}))


def backward(model: nn.Module, step: int = 0) -> None:
    model(*shares(step, dist.get_world_size())[dist.get_rank()]).backward()


def one_step(dtype: str, **options: Any) -> dict[str, Any]:
    """What a rank sends in the second step, by all accounts, and its plan."""
    model = UnevenLM().to(DTYPES[dtype])
    optimizer = optimizer_for(model, **options)

    def step(number: int) -> None:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()

    step(0)
    before = Counter(optimizer.traffic())
    with Watch() as watch:
        step(1)
    (held,) = optimizer.core.holdings
    return {
        "sent": Counter(optimizer.traffic()) - before,
        "seen": watch.nbytes,
        "reported": [memory.sent for memory in optimizer.memory_report()],
        "buckets": list(held.plan.buckets),
        "place": held.sharers.instance.rank,
        "instances": held.plan.instances,
        "numel": sum(param.numel() for param in model.parameters()),
        "padding": held.plan.padding,
    }


def sent_by(
    buckets: list[Bucket], place: int, instances: int, g: int, p: int, owned: int, keep: bool
) -> dict[str, int]:
    """The formulas, per rank. A ring's all-reduce sends 2 (n - 1) / n of the tensor from each of n ranks."""
    ranks = len(buckets[0].parts)
    numels = [(bucket.numel, bucket.parts[place][1] - bucket.parts[place][0]) for bucket in buckets]
    gradients = sum(whole - part for whole, part in numels) * g
    returned = sum(part * (ranks - 1) for _, part in numels)
    return {
        "gradients": gradients + (returned * g if keep else 0),
        "parameters": returned * p,
        "across instances": sum(2 * part * owned * (instances - 1) // instances for _, part in numels),
    }


CASES: list[tuple[int, str, dict[str, Any]]] = [
    *(
        (ranks, dtype, {"layout": layout})
        for ranks in (1, 2, 3, 4)
        for dtype in DTYPES
        for layout in ("padded", "compact")
    ),
    (4, "float32", {"layout": "auto"}),
    (4, "float32", {"layout": "padded", "bus_alignment": True}),
    (3, "bfloat16", {"layout": "compact", "grad_dtype": "float32"}),
    *((4, "bfloat16", {"layout": "compact", "group_size": size}) for size in (1, 2)),
    *((4, "float32", {"layout": "padded", "group_size": size}) for size in (1, 2)),
    *((3, dtype, {"layout": "compact", "keep_full_grads": True}) for dtype in DTYPES),
    (4, "float32", {"layout": "padded", "keep_full_grads": True, "group_size": 2}),
    (2, "float32", {"layout": "compact", "overlap_param_gather": True}),
    (2, "float32", {"layout": "compact", "step_in_backward": True}),
]


@pytest.mark.parametrize("ranks, dtype, options", CASES, indirect=["ranks"], ids=str)
def test_a_step_sends_what_the_formulas_say(ranks: RankPool, dtype: str, options: dict[str, Any]) -> None:
    found = ranks.run(one_step, dtype, **options)
    p = DTYPES[dtype].itemsize
    g = 4 if options.get("grad_dtype") == "float32" else p
    keep = bool(options.get("keep_full_grads"))
    for step in found:
        sent = step["sent"]
        expected = sent_by(step["buckets"], step["place"], step["instances"], g, p, 4, keep)
        assert dict(sent) == {what: nbytes for what, nbytes in expected.items() if nbytes}
        assert step["seen"]["send"] == sent["gradients"] + sent["parameters"]
        n = step["instances"]
        assert 2 * step["seen"]["allreduce"] * (n - 1) // n == pytest.approx(
            sent["across instances"], abs=len(step["buckets"])
        )
        assert step["reported"][step["place"]] == sum(sent.values())
        assert set(step["seen"]) <= {"send", "recv_any_source", "recv", "allreduce"}, step["seen"]
    check_sums(found, g, p, keep, padded=options["layout"] == "padded")


def check_sums(found: list[dict[str, Any]], g: int, p: int, keep: bool, *, padded: bool) -> None:
    """All ranks together: (G - 1) (g + p) P in each of the instances of G ranks, P with the padding."""
    step = found[0]
    size, numel = len(step["buckets"][0].parts), step["numel"] + step["padding"]
    total = sum(step["sent"]["gradients"] + step["sent"]["parameters"] for step in found)
    assert total == step["instances"] * (size - 1) * (g + p + (g if keep else 0)) * numel
    assert sum(step["seen"]["recv"] for step in found) == total
    assert (step["padding"] > 0) == padded
    across = sum(step["sent"]["across instances"] for step in found)
    assert across == pytest.approx(2 * (step["instances"] - 1) * 4 * numel, rel=1e-3)


def gradient_elements(stage: int | None) -> tuple[int, int]:
    """(bytes of gradients that a rank gives away, its parameters): stock ZeRO with AdamW, or ours (stage None).

    Reduced in a ring, a rank sends twice its share of what it gives to an all-reduce, and once of a reduce-scatter.
    """
    model = UnevenLM()
    numel, ranks = sum(param.numel() for param in model.parameters()), dist.get_world_size()
    if stage is None:
        optimizer = optimizer_for(model, layout="compact")
        backward(model)
        optimizer.step()
        return optimizer.traffic()["gradients"], numel
    settings = config(stage)
    settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}}
    with engine_for(settings, model) as engine, Watch() as watch:
        train_engine(engine, 1)
    return 2 * watch.nbytes["allreduce"] * (ranks - 1) // ranks, numel


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_gradients_take_half_the_bytes_of_stock_zero(ranks: RankPool, stage: int) -> None:
    ours, theirs = ranks.run(gradient_elements, None), ranks.run(gradient_elements, stage)
    numel = ours[0][1]
    assert sum(sent for sent, _ in ours) == (ranks.world_size - 1) * 4 * numel
    assert sum(sent for sent, _ in theirs) == pytest.approx(2 * (ranks.world_size - 1) * 4 * numel, rel=0.01)


# What goes over the wire


def loopback_sent() -> int:
    (line,) = [line for line in NETWORK.read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])


def wire_bytes(layout: str) -> tuple[list[tuple[int, int]], int]:
    """Per step, what the loopback device counts during it, and during an idle time as long before it; and what is
    sent by our count."""
    model = Chain(4, 384)
    optimizer = optimizer_for(model, layout=layout, include=("layers.*",), bucket_mb=1.0)
    x = torch.randn(2, 384)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()

    step()
    counted = []
    before = sum(optimizer.traffic().values())
    for _ in range(6):
        dist.barrier()
        idle, began = loopback_sent(), time.monotonic()
        time.sleep(0.1)
        start, took = loopback_sent(), time.monotonic()
        dist.barrier()  # on a busy machine others would be sending before this rank has looked
        step()
        counted.append((loopback_sent() - start, int((start - idle) / (took - began) * (time.monotonic() - took))))
    return counted, (sum(optimizer.traffic().values()) - before) // 6


@pytest.mark.skipif(not NETWORK.exists(), reason="only Linux counts the bytes of network devices in /proc")
@pytest.mark.parametrize("layout", ["padded", "compact"])
@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_the_loopback_device_counts_what_we_count(ranks: RankPool, layout: str) -> None:
    """Others on this machine may use it too: that only adds, so the quietest step is compared."""
    found = ranks.run(wire_bytes, layout)
    expected = sum(sent for _, sent in found)
    counted, noise = min(found[0][0])
    if counted == 0:
        pytest.skip("these ranks do not reach each other over the loopback device")
    assert counted >= expected
    if noise > 0.01 * expected:
        pytest.skip(f"the loopback device is busy with {noise} bytes of others")
    assert counted <= 1.05 * expected
