"""Newton-Schulz with packages whose kernels compute one half of a symmetric product and mirror it.

Neither package is needed otherwise, so each is imported where it is first used. Their kernels have not been run by this
project's tests, which have no GPU: gram-newton-schulz was tested by its own path for CPUs, quack-kernels by a stand-in.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lwopt_backend.rules.newton_schulz import Coefficients, Triple, by_step, prepare, product, segments, table_of

KERNELS = "quack.gemm_interface"


@dataclass(frozen=True, slots=True)
class Package:
    """The modules that are used, and what they have kernels for: major compute capabilities, and their names."""

    modules: tuple[str, ...]
    capabilities: tuple[int, ...]
    devices: str


PACKAGES = {
    # MIT, 0.1.6 of July 2026: requires quack-kernels 0.5.0.
    "gram-newton-schulz": Package(("gram_newton_schulz", KERNELS), (9, 10), "Hopper and Blackwell GPUs"),
    # Apache-2.0, 0.5.0 of 2026 to 0.6.5 of September 2026.
    "quack-kernels": Package((KERNELS,), (8, 9, 10, 11, 12), "Ampere and later GPUs"),
}


def check_package(name: str, device: torch.device) -> None:
    """Raises ValueError if the package is not installed, or has no kernels for ``device``."""
    package, where = PACKAGES[name], f"ns_method is {name!r}"
    otherwise = "set ns_method to 'auto'"
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "an AMD GPU" if device.type == "cuda" else f"a device of type {device.type!r}"
        raise ValueError(f"{where}, whose kernels are for {package.devices} of NVIDIA, not for {kind}; {otherwise}")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in package.capabilities:
        raise ValueError(
            f"{where}, whose kernels are for {package.devices}, but {torch.cuda.get_device_name(device)} has compute "
            f"capability {'.'.join(map(str, capability))}; {otherwise}"
        )
    try:
        for module in package.modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{where}, but {error}; `pip install {name}`, or {otherwise}") from error


LEAST_SIDE = 256  # the kernels' tile; the product of smaller matrices takes no longer with torch's
ALIGNED = 8  # elements of 16 bits: the kernels load rows from addresses that 16 bytes divide


def quack_product(
    a: Tensor, b: Tensor, plus: Tensor | None = None, /, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """A product with a symmetric result, by quack-kernels where its kernels take the sides, else by torch."""
    sides = a.shape[-2:]
    if min(sides) < LEAST_SIDE or any(side % ALIGNED for side in sides):
        return product(a, b, plus, alpha=alpha, beta=beta)
    if a.ndim == 2:  # Ampere's kernels take batches only
        return quack_product(a[None], b[None], None if plus is None else plus[None], alpha=alpha, beta=beta)[0]
    kernels: Any = importlib.import_module(KERNELS)
    result: Tensor = kernels.gemm_symmetric(a, b, C=plus, alpha=float(alpha), beta=float(beta))  # an int is refused
    return result


def packaged_newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
    restarts: Sequence[int] | None,
    on_gram: bool,
) -> Tensor:
    """``gram_newton_schulz``, or ``newton_schulz``, by the package gram-newton-schulz, which iterates in fp16.

    Square matrices always take its standard iteration. On a CPU it runs its own path without kernels.
    """
    x, as_given = prepare(matrices, coefficients, eps, torch.float32)
    lengths = [len(segment) for segment in segments(coefficients, steps, restarts)]
    ends = tuple(sum(lengths[:count]) for count in range(1, len(lengths)))
    iterate = _iteration(_for_norm_one(coefficients, steps), ends, on_gram, x.is_cuda)
    return as_given(iterate(x).to(dtype))


def _for_norm_one(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """The coefficients by step. The package divides by the norm once more, so the first step divides by the margin."""
    (a, b, c), *rest = by_step(coefficients, steps)
    margin = table_of(coefficients).margin
    return ((a / margin, b / margin**3, c / margin**5), *rest)


@lru_cache(maxsize=64)
def _iteration(triples: tuple[Triple, ...], ends: tuple[int, ...], on_gram: bool, kernels: bool) -> Any:
    """The package's iteration, not compiled: torch.compile would compile, and keep graphs, for every shape."""
    package: Any = importlib.import_module("gram_newton_schulz")
    return package.GramNewtonSchulz(
        ns_use_kernels=kernels,
        ns_coefficients=[list(triple) for triple in triples],
        use_gram_newton_schulz=on_gram,
        gram_newton_schulz_reset_iterations=list(ends),
        compile_kwargs=None,
    )
