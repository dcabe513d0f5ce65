"""Newton-Schulz and Gram Newton-Schulz, with the published coefficients, and the packages that compute them."""

from __future__ import annotations

import importlib
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

# CPUs


def multiplies_bf16() -> bool:
    """Whether this machine's CPU has instructions for products of bfloat16 matrices.

    Without AVX-512, oneDNN takes no such product, and torch's own takes 25 times as long as one in fp32 (five steps on
    128 x 512); with AVX-512 alone, oneDNN converts, and takes 3.6 times as long.
    """
    by_onednn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    converts = torch.cpu._is_avx2_supported() and not torch.cpu._is_avx512_bf16_supported()
    return bool(by_onednn and not converts)


# Coefficients of the quintic Newton-Schulz iteration, by step: published tables by name, or the user's.

Triple = tuple[float, float, float]  # a, b, c of X <- a X + b (X X^T) X + c (X X^T)^2 X
Coefficients = Triple | Sequence[Triple] | str


@dataclass(frozen=True, slots=True)
class Table:
    """Coefficients of consecutive steps, and how to use them.

    A table that ``ends`` was composed for exactly its number of steps; for others, further steps repeat the last row.
    ``margin`` multiplies the norm that matrices are divided by, so that rounding leaves no singular value above the
    polynomials' range.
    """

    triples: tuple[Triple, ...]
    ends: bool
    margin: float = 1.0


def _with_margin(triples: Sequence[Triple], margin: float) -> tuple[Triple, ...]:
    """Replace every polynomial p(x) but the last by p(x / margin)."""
    *all_but_last, last = triples
    return (*((a / margin, b / margin**3, c / margin**5) for a, b, c in all_but_last), last)


TABLES = {
    # Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024.
    "simple": Table(((3.4445, -4.7750, 2.0315),), ends=False),
    # Cesista, You and Jordan, "Squeezing 1-2% Efficiency Gains Out of Muon", 2025; also modded-nanogpt's.
    "quintic": Table(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        ends=True,
    ),
    # Amsel, Persson, Musco and Gower, "The Polar Express", arXiv 2505.16932, with its safety factor 1.01.
    "polar_express": Table(
        _with_margin(
            (
                (8.287212018145622, -23.59588651909882, 17.300387312530923),
                (4.107059111542197, -2.9478499167379084, 0.54484310829266),
                (3.9486908534822938, -2.908902115962947, 0.5518191394370131),
                (3.3184196573706055, -2.488488024314878, 0.5100489401237208),
                (2.3006520199548186, -1.6689039845747518, 0.4188073119525678),
                (1.8913014077874002, -1.2679958271945908, 0.37680408948524996),
                (1.8750014808326703, -1.2500016453583913, 0.37500016452664514),
                (1.875, -1.25, 0.375),
            ),
            1.01,
        ),
        ends=False,
        margin=1.01,
    ),
    # The same, composed for 5 steps with a safety factor of 1.02: what dion, nanochat and modded-nanogpt run.
    "polar_express_5": Table(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        ends=True,
        margin=1.02,
    ),
}


def table_of(coefficients: Coefficients) -> Table:
    """A table by name, from one triple for all steps, or from a list of one triple per step.

    Raises ValueError for anything else.
    """
    if isinstance(coefficients, str):
        if coefficients in TABLES:
            return TABLES[coefficients]
    elif _is_triple(coefficients):
        a, b, c = coefficients
        return Table(((a, b, c),), ends=False)
    elif isinstance(coefficients, Sequence) and coefficients and all(map(_is_triple, coefficients)):
        return Table(tuple((a, b, c) for a, b, c in filter(_is_triple, coefficients)), ends=True)
    raise ValueError(
        "ns_coefficients: expected three numbers, a list of ns_steps times three numbers, or one of "
        f"{', '.join(map(repr, TABLES))}; found {coefficients!r}"
    )


def _is_triple(given: object) -> TypeGuard[Triple]:
    return (
        isinstance(given, Sequence)
        and len(given) == 3
        and all(isinstance(number, (int, float)) and not isinstance(number, bool) for number in given)
    )


def by_step(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """One triple for each of ``steps`` steps. Raises ValueError if a table was made for a different number of steps.

    Published implementations disagree on steps after the end of a table: Emerging-Optimizers starts over,
    pytorch_optimizer repeats the last row, dion ignores the number of steps. So only tables whose authors say that the
    last row repeats are continued; for others, write out as many triples as there are steps.
    """
    table = table_of(coefficients)
    count = len(table.triples)
    if table.ends and steps != count:
        named = f"{coefficients!r} is" if isinstance(coefficients, str) else "the list given is"
        raise ValueError(
            f"ns_coefficients: {named} for {count} steps, but ns_steps is {steps}; set ns_steps to {count}, or write "
            f"out {steps} times three numbers"
        )
    return (table.triples + table.triples[-1:] * (steps - count))[:steps]


IMMEDIATE = {"cpu"}  # devices on which a call returns when its work is done: nothing to batch or to wait for


class Product(Protocol):
    """``alpha`` a b, and ``beta`` times ``plus`` if that is given, of one matrix or of a batch; in any layout.

    Iterations use a different one from ``product`` for symmetric results.
    """

    def __call__(
        self, a: Tensor, b: Tensor, plus: Tensor | None = None, /, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor: ...


def product(a: Tensor, b: Tensor, plus: Tensor | None = None, /, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """torch's; without ``plus``, ``alpha`` is one."""
    if plus is None:
        return a @ b
    return (torch.addmm if a.ndim == 2 else torch.baddbmm)(plus, a, b, beta=beta, alpha=alpha)


LEAST_NORM = 1e-15  # in float32 and bfloat16, the squares of all elements that count do not underflow


def newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
    symmetric: Product = product,
    aol: bool = False,
) -> Tensor:
    """Push the singular values of every matrix in (..., rows, columns) towards one.

    X <- a X + (b A + c A^2) X with A = X X^T, starting from X / ||X||_F, on the transposed matrix if rows > columns
    (Keller Jordan, "Muon", 2024); a, b and c may differ from step to step. Computed and returned in ``dtype``. With one
    triple, the operations are those of torch.optim.Muon, so one matrix yields the same bits. The input is not changed.
    With ``aol`` the iteration starts from ``almost_orthogonal``. Raises ValueError for a wrong number of coefficients.
    """
    x, as_given = prepare(matrices, coefficients, eps, dtype)
    for step, (a, b, c) in enumerate(by_step(coefficients, steps)):
        gram = symmetric(x, x.mT)
        if aol and not step:
            x, gram = almost_orthogonal(x, gram, table_of(coefficients).margin)
        x = product(symmetric(gram, gram, gram, beta=b, alpha=c), x, x, beta=a)
    return as_given(x)


def prepare(
    matrices: Tensor, coefficients: Coefficients, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The start of the iteration (cast, 2-D or 3-D, rows <= columns, norm one), and a function to restore the shape."""
    x = matrices.to(dtype)
    batch = x.shape[:-2]
    x = x.flatten(0, -3) if len(batch) > 1 else x  # addmm and baddbmm take 2-D and 3-D tensors
    tall = x.size(-2) > x.size(-1)
    x = normalize(x.mT if tall else x, eps, table_of(coefficients).margin)

    def as_given(result: Tensor) -> Tensor:
        result = result.mT if tall else result
        return result.unflatten(0, batch) if len(batch) > 1 else result

    return x, as_given


def normalize(x: Tensor, eps: float, margin: float = 1.0) -> Tensor:
    """Divide every matrix of 2-D or 3-D ``x`` by its Frobenius norm times ``margin``.

    torch.optim.Muon divides by at least ``eps``, so a matrix that gradient clipping made tiny may start too small to
    end near one. If the norm is below that, or overflows, the matrix is first divided by its largest element; otherwise
    by one, which changes no bit. Zero stays zero, a non-finite matrix becomes NaN. Never synchronizes.
    """
    norm = _norm(x)
    bounded = norm.clamp(max(eps, LEAST_NORM), torch.finfo(x.dtype).max)
    guarded = bounded != norm
    if x.device.type not in IMMEDIATE or guarded.any():  # only there is reading free
        largest = torch.linalg.vector_norm(x, math.inf, dim=(-2, -1), keepdim=x.ndim > 2)
        x = x / torch.where(guarded, largest.clamp(min=torch.finfo(x.dtype).tiny), 1)
        bounded = _norm(x).clamp(min=LEAST_NORM)  # the original norm where nothing was divided
    return x / (bounded if margin == 1 else bounded * margin)


def almost_orthogonal(x: Tensor, gram: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    """X and X X^T with every row of X divided by the root of its row's sum of |X X^T|, times ``margin``.

    No singular value is then above one over the margin, and most are nearer to one than in X / ||X||_F: AOL, arXiv
    2208.03160. Turbo-Muon, arXiv 2512.04632, uses it in place of the norm, with one step fewer.
    """
    sums = gram.abs().sum(-1, keepdim=True, dtype=torch.float32)
    rows = (sums.clamp_(min=torch.finfo(torch.float32).tiny).rsqrt_() / margin).to(x.dtype)  # of zeros: stay zeros
    return x * rows, gram * rows * rows.mT


def _norm(x: Tensor) -> Tensor:
    """One matrix takes the 2-D path: its norm is reduced in torch.optim.Muon's order, unlike a batched norm."""
    norm: Tensor = x.norm() if x.ndim == 2 else torch.linalg.matrix_norm(x, keepdim=True)
    return norm


FIRST_SLOPES, LATER_SLOPES = 45.0, 31.0  # largest products of slopes at zero within a segment


def gram_newton_schulz(
    matrices: Tensor,
    *,
    steps: int,
    coefficients: Coefficients,
    eps: float,
    dtype: torch.dtype,
    restarts: Sequence[int] | None = None,
    symmetric: Product = product,
    aol: bool = False,
) -> Tensor:
    """``newton_schulz`` up to rounding, from products of s x s matrices; s is the shorter side.

    Every step multiplies X by a polynomial of R = X X^T, so the product Q of several steps follows from R alone, and X
    is multiplied once (Zhang, Amsel, Chen and Dao, "Gram Newton-Schulz", 2026). It takes fewer flops if the longer side
    is over 1.5 times the shorter, otherwise more. ``restarts`` are the steps after which X and R are recomputed.
    """
    x, as_given = prepare(matrices, coefficients, eps, dtype)
    for number, triples in enumerate(segments(coefficients, steps, restarts)):
        gram = symmetric(x, x.mT)
        if aol and not number:
            x, gram = almost_orthogonal(x, gram, table_of(coefficients).margin)
        x = product(_product_of_steps(gram, triples, symmetric), x)
    return as_given(x)


def segments(coefficients: Coefficients, steps: int, restarts: Sequence[int] | None = None) -> list[tuple[Triple, ...]]:
    """The coefficients of the steps from one restart to the next.

    Rounding makes small eigenvalues of R wrong, even negative, and every step multiplies them by the square of its
    slope at zero, a. By default a segment therefore ends before the product of its slopes would exceed a bound. The
    bound of the first is larger, because the restart repairs its errors. For 5 steps, that is 3 and 2 with Jordan's
    coefficients, 2 and 3 with the other tables. On ill-conditioned matrices in bfloat16, the largest singular value
    then ends at most 0.02 above the plain iteration's with Jordan's coefficients, and 0.2 with the others. Segments of
    3 and 2 for all would end 0.6 to 2.5 above it with the others; without a restart there is no bound.
    """
    triples = by_step(coefficients, steps)
    if restarts is None:
        restarts, begin, bound = [], 0, FIRST_SLOPES
        while (begin := begin + _steps_within(bound, triples[begin:])) < steps:
            restarts.append(begin)
            bound = LATER_SLOPES
    bounds = [0, *(restart for restart in restarts if restart < steps), steps]
    return [triples[begin:end] for begin, end in zip(bounds, bounds[1:])]


def _steps_within(bound: float, triples: Sequence[Triple]) -> int:
    """The number of first steps whose slopes have a product within the bound; at least one."""
    products: Iterable[float] = itertools.accumulate((abs(a) for a, _, _ in triples), operator.mul)
    return max(1, sum(product <= bound for product in products))


def _product_of_steps(gram: Tensor, triples: Sequence[Triple], symmetric: Product) -> Tensor:
    """Q of (..., s, s), the product of these steps: they take X, with X X^T = ``gram``, to Q X.

    A step takes X to P X and R to P R P with P = a I + Z, Z = b R + c R^2; polynomials of one matrix commute.
    """
    of_steps = None
    for number, (a, b, c) in enumerate(triples, start=1):
        z = symmetric(gram, gram, gram, beta=b, alpha=c)
        if number < len(triples):  # R is not needed after the last step
            half = symmetric(z, gram, gram, beta=a)
            gram = symmetric(half, z, half, beta=a)
        if of_steps is None:
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            of_steps = z
        else:
            of_steps = symmetric(z, of_steps, of_steps, beta=a)
    assert of_steps is not None
    return of_steps


# Packages whose kernels compute one half of a symmetric product and mirror it. Each is imported on first use, because
# neither is needed otherwise. Both take equal flops; gram-newton-schulz needs the other one and iterates in fp16, so
# ns_method "auto" takes quack-kernels. No test of this project has run their kernels on a GPU: gram-newton-schulz is
# tested by its path for CPUs, quack-kernels by a stand-in.

KERNELS = "quack.gemm_interface"


@dataclass(frozen=True, slots=True)
class Package:
    """The modules to import, and the devices of their kernels: major compute capabilities, and their names."""

    modules: tuple[str, ...]
    capabilities: tuple[int, ...]
    devices: str


QUACK = "quack-kernels"
PACKAGES = {
    # MIT, 0.1.6 of July 2026: requires quack-kernels 0.5.0.
    "gram-newton-schulz": Package(("gram_newton_schulz", KERNELS), (9, 10), "Hopper and Blackwell GPUs"),
    # Apache-2.0, 0.5.0 of 2026 to 0.6.5 of September 2026.
    QUACK: Package((KERNELS,), (8, 9, 10, 11, 12), "Ampere and later GPUs"),
}


def check_package(name: str, device: torch.device) -> None:
    """Raises ValueError if the package is not installed, or has no kernels for ``device``."""
    package, where = PACKAGES[name], f"ns_method is {name!r}"
    otherwise = "set ns_method to 'auto'"
    if device.type != "cuda" or torch.version.hip is not None:
        kind = "an AMD GPU" if device.type == "cuda" else f"a device of type {device.type!r}"
        raise ValueError(f"{where}: expected {package.devices} by NVIDIA for its kernels, found {kind}; {otherwise}")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] not in package.capabilities:
        raise ValueError(
            f"{where}: expected {package.devices} for its kernels, found {torch.cuda.get_device_name(device)} with "
            f"compute capability {'.'.join(map(str, capability))}; {otherwise}"
        )
    try:
        for module in package.modules:
            importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{where}: {error}; run `pip install {name}`, or {otherwise}") from error


@lru_cache(maxsize=64)
def has_package(name: str, device: torch.device) -> bool:
    """Whether the package is installed and has kernels for ``device``; found out once in a process."""
    try:
        check_package(name, device)
    except ValueError:
        return False
    return True


LEAST_SIDE = 256  # the kernels' tile; the product of smaller matrices takes no longer with torch's
ALIGNED = 8  # elements of 16 bits: the kernels load rows from multiples of 16 bytes


def quack_takes(shape: Sequence[int]) -> bool:
    """Whether quack-kernels' kernels take a product with sides of ``shape``."""
    return min(shape) >= LEAST_SIDE and not any(side % ALIGNED for side in shape)


def quack_product(
    a: Tensor, b: Tensor, plus: Tensor | None = None, /, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """A product with a symmetric result, by quack-kernels where its kernels take the sides, otherwise by torch."""
    if not quack_takes(a.shape[-2:]):
        return product(a, b, plus, alpha=alpha, beta=beta)
    if a.ndim == 2:  # Ampere's kernels take batches only
        return quack_product(a[None], b[None], None if plus is None else plus[None], alpha=alpha, beta=beta)[0]
    kernels: Any = importlib.import_module(KERNELS)
    result: Tensor = kernels.gemm_symmetric(a, b, C=plus, alpha=float(alpha), beta=float(beta))  # an int is an error
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
    """The coefficients by step. The package also divides by the norm, so the first step divides by the margin."""
    (a, b, c), *rest = by_step(coefficients, steps)
    margin = table_of(coefficients).margin
    return ((a / margin, b / margin**3, c / margin**5), *rest)


@lru_cache(maxsize=64)
def _iteration(triples: tuple[Triple, ...], ends: tuple[int, ...], on_gram: bool, kernels: bool) -> Any:
    """The package's iteration, uncompiled: torch.compile would compile, and keep graphs, for every shape."""
    package: Any = importlib.import_module("gram_newton_schulz")
    return package.GramNewtonSchulz(
        ns_use_kernels=kernels,
        ns_coefficients=[list(triple) for triple in triples],
        use_gram_newton_schulz=on_gram,
        gram_newton_schulz_reset_iterations=list(ends),
        compile_kwargs=None,
    )
