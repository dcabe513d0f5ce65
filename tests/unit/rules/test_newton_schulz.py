"""Newton-Schulz, on a matrix and on its Gram matrix: torch.optim.Muon's bits, what each table's polynomials do to
singular values, tiny and zero matrices, batches. Packages with kernels for GPUs are refused without one, and called as
expected: stand-ins compute with torch (the packages themselves: tests/peers/test_gram_newton_schulz.py)."""

import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import product
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from pytorch_optimizer.optimizer.utils.matrix import NS_COEFFICIENTS
from torch import Tensor
from torch.optim import _muon
from torch.utils.flop_counter import FlopCounterMode

from lwopt_backend.groups.registry import MATRIX_RULES, check_capture, options_of
from lwopt_backend.rules import gram_newton_schulz, muon, newton_schulz
from lwopt_backend.rules.muon import takes_gram
from lwopt_backend.rules.newton_schulz import TABLES, by_step, segments
from tests.support.references import SHAPES, SIMPLE, random, rule_of

packages: Any = import_module("lwopt_backend.rules.newton_schulz")
STEPS = {"simple": 5, "quintic": 5, "polar_express": 8, "polar_express_5": 5}  # that a table is for
WAYS = (newton_schulz, gram_newton_schulz)
Iterate = Callable[..., Tensor]


def iterated(iterate: Iterate, matrices: Tensor, dtype: torch.dtype, table: Any = SIMPLE, **options: Any) -> Tensor:
    return iterate(matrices, **{"steps": 5, "coefficients": table, "eps": 1e-7, "dtype": dtype, **options})


def with_spectrum(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """fp64 matrices with these singular values."""
    u, _, v = torch.linalg.svd(random(shape, 0).double(), full_matrices=False)
    return u @ torch.diag(values.double()) @ v


SPECTRA: dict[str, Callable[[int], Tensor] | None] = {
    "gaussian": None,
    "even in logarithm to 1e-2": lambda count: torch.logspace(0, -2, count),
    "even in logarithm to 1e-6": lambda count: torch.logspace(0, -6, count),
    "one large": lambda count: torch.cat([torch.ones(1), torch.full((count - 1,), 1e-3)]),
    "half zero": lambda count: (torch.arange(count) < count // 2).float(),
}


def matrices_of(spectrum: str, shape: tuple[int, ...]) -> Tensor:
    values = SPECTRA[spectrum]
    return with_spectrum(values(min(shape[-2:])), shape) if values else random(shape, 0).double()


# Coefficients
def check_polar_express(table: Sequence[Sequence[float]], cushion: float, margin: float = 1.0) -> None:
    """Theorem 3.1 and algorithm 1 of arXiv 2505.16932: each row is the odd polynomial of degree 5 that is nearest to
    one on the singular values that the rows before leave, of [0.001, 1] at first. It is so where it is as far below one
    at the first of them as above at its maximum, below at its minimum, and above at the last; not nearer to zero than
    ``cushion`` times the largest, and then centred around one again. All but the last are called with x / margin."""
    low, high = 1e-3, 1.0
    for step, (a, b, c) in enumerate(table, start=1):

        def p(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return a * x + b * x**3 + c * x**5

        by = margin if step < len(table) else 1.0
        root = math.sqrt(9 * b * b - 20 * a * c)
        maximum, minimum = (math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1))
        assert p(minimum) == pytest.approx(p(max(low, cushion * high) * by), abs=1e-9)
        assert p(maximum) == pytest.approx(p(high * by), abs=1e-9)
        assert p(low * by) + p(high * by) == pytest.approx(2, abs=1e-9)
        low, high = p(low), 2 - p(low)


def test_coefficients_are_published() -> None:
    """Polar Express goes on with its last row. The paper's table is composed without a margin, which is then put into
    all rows but the last."""
    assert TABLES["quintic"].triples == tuple(NS_COEFFICIENTS["quintic"])
    table = TABLES["polar_express"].triples
    check_polar_express([(a * 1.01, b * 1.01**3, c * 1.01**5) for a, b, c in table[:7]], 0.02407327424182761)
    assert table[7] == (15 / 8, -10 / 8, 3 / 8)
    check_polar_express(TABLES["polar_express_5"].triples, 0.02, 1.02)
    assert by_step("polar_express", 10)[7:] == (table[7],) * 3 and by_step("polar_express", 3) == table[:3]
    matrix = random((24, 40), 0).double()
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    done = iterated(newton_schulz, matrix, torch.float64, "polar_express", steps=10)
    torch.testing.assert_close(done, u @ v, rtol=0, atol=1e-9)


# The margin on the norm, and where five steps take singular values of 0.01 to 1 in fp64.
BANDS = {"simple": (1.0, 0.68, 1.14), "quintic": (1.0, 0.97, 1.04), "polar_express": (1.01, 0.87, 1.13)}
BANDS |= {"polar_express_5": (1.02, 0.85, 1.15)}


@pytest.mark.parametrize("table", TABLES)
def test_newton_schulz_maps_singular_values(table: str) -> None:
    """Newton-Schulz takes singular values where the polynomials of its table do."""

    def polynomials(x: Tensor) -> Tensor:
        for a, b, c in by_step(table, 5):
            x = a * x + b * x**3 + c * x**5
        return x

    margin, low, high = BANDS[table]
    values = torch.logspace(-2, 0, 40, dtype=torch.float64)
    expected = with_spectrum(polynomials(values / values.norm() / margin), (40, 64))
    for iterate in WAYS:
        done = iterated(iterate, with_spectrum(values, (40, 64)), torch.float64, table)
        torch.testing.assert_close(done, expected, rtol=0, atol=1e-9)
    full = polynomials(torch.logspace(-2, 0, 1000, dtype=torch.float64) / margin)
    assert full.min() > low and full.max() < high


# Batches; tiny, large and zero matrices
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_newton_schulz_has_the_bits_of_torch_muon_from_eps_on(shape: tuple[int, int]) -> None:
    for norm in (1.01e-7, 1e-3, 1.0, 1e15):
        matrix = random(shape, 3)
        matrix *= norm / matrix.norm()
        theirs = _muon._zeropower_via_newtonschulz(matrix.clone(), SIMPLE, 5, 1e-7)
        assert torch.equal(iterated(newton_schulz, matrix, torch.bfloat16), theirs), norm


@pytest.mark.parametrize("shape", [(5, 24, 40), (5, 40, 24), (2, 3, 1, 8), (5, 8, 1)], ids=str)
def test_newton_schulz_of_a_batch_is_that_of_its_matrices(shape: tuple[int, ...]) -> None:
    matrices = random(shape, 0)
    kept = matrices.clone()
    for iterate, table in product(WAYS, TABLES):
        together = iterated(iterate, matrices, torch.float32, table)
        one_by_one = [iterated(iterate, matrix, torch.float32, table) for matrix in matrices.flatten(0, -3)]
        torch.testing.assert_close(together, torch.stack(one_by_one).view(shape), rtol=0, atol=1e-4)
        assert torch.equal(matrices, kept)
        zero = iterated(iterate, torch.zeros(shape), torch.bfloat16, table, eps=0.0)
        assert torch.equal(zero, torch.zeros(shape).bfloat16())


def of_norm(shape: tuple[int, ...], norm: float) -> Tensor:
    """A well-conditioned matrix, as clipping may leave it."""
    u, _, v = torch.linalg.svd(random(shape, 3), full_matrices=False)
    return (u @ v) / min(shape[-2:]) ** 0.5 * norm


@pytest.mark.parametrize("norm", [1e-8, 1e-12, 1e-20, 1e-30, 1e-37, 1e25])
def test_newton_schulz_orthogonalizes_tiny_and_large_matrices(norm: float) -> None:
    shapes = [(12, 20), (20, 12), (16, 16), (1, 8), (3, 12, 20)]
    for iterate, shape, dtype in product(WAYS, shapes, (torch.bfloat16, torch.float32)):
        values = torch.linalg.svdvals(iterated(iterate, of_norm(shape, norm), dtype).float())
        usual = torch.linalg.svdvals(iterated(iterate, of_norm(shape, 1.0), dtype).float())
        torch.testing.assert_close(values, usual, rtol=0, atol=0.05)
        assert values.min() > 0.6 and values.max() < 1.25
    if norm < 1e-10:  # without the guard this is not so
        unguarded = _muon._zeropower_via_newtonschulz(of_norm((12, 20), norm), SIMPLE, 5, 1e-7)
        assert torch.linalg.svdvals(unguarded.float()).max() < 0.6


def test_a_tiny_matrix_does_not_change_the_others_of_its_batch() -> None:
    matrices = torch.stack([random((12, 20), 0), of_norm((12, 20), 1e-20), torch.zeros(12, 20), random((12, 20), 1)])
    together = iterated(newton_schulz, matrices, torch.bfloat16)
    assert torch.equal(together[[0, 3]], iterated(newton_schulz, matrices[[0, 0, 3, 3]], torch.bfloat16)[[0, 3]])
    assert together[2].abs().max() == 0 and torch.linalg.svdvals(together[1].float()).min() > 0.6


# Gram Newton-Schulz
@pytest.mark.parametrize("seed", range(20))
def test_gram_newton_schulz_is_the_same_polynomial(seed: int) -> None:
    """Gram Newton-Schulz is the same polynomial with any table and any restarts. To rounding, which a step of Jordan's
    table makes up to 3.4 times as large: p(0) is the first coefficient."""
    draw = Random(seed)
    shapes = [(48, 192), (192, 48), (31, 47), (200, 3), (7, 1), (1, 1), (3, 24, 40), (2, 3, 40, 24)]
    for spectrum, shape, dtype in product(SPECTRA, draw.sample(shapes, 3), (torch.float64, torch.float32)):
        matrices, steps = matrices_of(spectrum, shape), draw.randint(1, 7)
        plain, gram = (iterated(way, matrices, dtype, steps=steps) for way in WAYS)
        assert gram.dtype == dtype and gram.shape == matrices.shape
        torch.testing.assert_close(gram, plain, rtol=0, atol=2 * torch.finfo(dtype).eps * SIMPLE[0] ** steps)
    for table, shape in product(STEPS, draw.sample(shapes[:3] + shapes[-2:], 2)):
        matrices, by_default = random(shape, seed).double(), table_restarts(table)
        given: dict[str, Any] = {"table": table, "steps": STEPS[table], "dtype": torch.float64}
        plain, gram = (iterated(way, matrices, **given) for way in WAYS)
        for restarts in (None, (), (2,), (1, 3)):
            restarted = iterated(gram_newton_schulz, matrices, **given, restarts=restarts)
            torch.testing.assert_close(restarted, plain, rtol=0, atol=1e-9)
            assert torch.equal(restarted, gram) == (restarts in (None, by_default))


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_gram_newton_schulz_in_bf16_stays_in_the_band(spectrum: str) -> None:
    """Gram Newton-Schulz in bf16 keeps singular values in the band. None above what the coefficients allow; those that
    exact steps bring to the band are there. With 3 steps before the restart, as for torch's coefficients, some of the
    other tables end 0.5 to 2.5 above."""
    for matrix in (matrices_of(spectrum, shape) for shape in ((96, 144), (384, 96))):
        exact = iterated(newton_schulz, matrix, torch.float64)
        values = torch.linalg.svdvals(iterated(gram_newton_schulz, matrix, torch.bfloat16).double())
        assert values.max() < 1.25
        assert (values[: int((torch.linalg.svdvals(exact) > 0.65).sum())] > 0.55).all()
        for table, above in (("quintic", 0.2), ("polar_express", 0.3), ("polar_express_5", 0.3)):
            plain, gram = (iterated(way, matrix, torch.bfloat16, table).double() for way in WAYS)
            assert torch.linalg.svdvals(gram).max() < torch.linalg.svdvals(plain).max() + above, table


def table_restarts(table: str) -> tuple[int, ...]:
    lengths = [len(segment) for segment in segments(table, STEPS[table])]
    return tuple(sum(lengths[:count]) for count in range(1, len(lengths)))


def test_gram_restarts_come_before_slopes_grow_too_large() -> None:
    """By default, restarts come before slopes grow too large."""
    by_default = {"simple": (3,), "quintic": (2,), "polar_express": (2, 5), "polar_express_5": (2,)}
    assert {table: table_restarts(table) for table in STEPS} == by_default
    assert [len(segment) for segment in segments("simple", 9)] == [3, 2, 2, 2]
    assert [len(segment) for segment in segments((50.0, 1.0, 1.0), 3)] == [1, 1, 1]  # never none


# Which iteration a matrix takes, and what it costs
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (4, 30, 20), (29, 20), (20, 20), (4, 20, 80)], ids=str)
def test_ns_method_and_gram_aspect_choose_the_iteration(shape: tuple[int, ...]) -> None:
    """`ns_method` and `gram_aspect` decide which iteration a matrix takes."""
    plain, gram = (iterated(way, random(shape, 3), torch.bfloat16) for way in WAYS)
    assert not torch.equal(plain, gram)
    ratio = max(shape[-2:]) / min(shape[-2:])
    ways = [({}, plain), ({"ns_method": "standard"}, plain), ({"ns_method": "gram"}, gram)]
    ways += [({"gram_aspect": aspect}, gram if ratio >= aspect else plain) for aspect in (1.0, 1.5, 1.51)]
    ways += [({"ns_method": "auto"}, gram if shape == (4, 20, 80) else plain)]
    ways += [({"ns_method": "auto", "gram_aspect": 1.0}, gram), ({"ns_method": "gram", "gram_aspect": 9.0}, plain)]
    for options, expected in ways:
        assert torch.equal(rule_of("muon", **options).transform(random(shape, 3)), expected), options


def cost_of(shape: tuple[int, int], options: dict[str, Any]) -> int:
    return MATRIX_RULES["muon"].cost(shape, options_of("muon", options))


def cost_and_flops(shape: tuple[int, int], **options: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        rule_of("muon", **options).transform(torch.ones(shape))
    cost = cost_of(shape, options)
    assert cost == counter.get_total_flops() and isinstance(cost, int)
    return cost


@pytest.mark.parametrize("shape", [(16, 16), (16, 20), (24, 16), (16, 64), (64, 16)], ids=str)
def test_cost_of_a_matrix_is_newton_schulzs_flops(shape: tuple[int, int]) -> None:
    """The cost of a matrix is the flops that Newton-Schulz runs."""
    for steps in (1, 2, 3, 4, 5, 6, 9):
        plain, all_gram, some_gram = (cost_and_flops(shape, gram_aspect=a, ns_steps=steps) for a in (None, 1.0, 1.5))
        assert some_gram in (plain, all_gram) and some_gram <= plain
        assert cost_and_flops(shape, ns_method="auto", ns_steps=steps) in (plain, all_gram)
        assert cost_and_flops(shape, ns_method="gram", ns_steps=steps) == all_gram
    for table, restarts in product(STEPS, [None, (1,), (1, 2, 4)]):
        given = {"ns_coefficients": table, "ns_steps": STEPS[table], "gram_restarts": restarts}
        cost_and_flops(shape, gram_aspect=1.5, **given)


def test_auto_takes_gram_newton_schulz_from_an_aspect_on() -> None:
    """The aspect from which "auto" takes it falls with the size. The Gram matrix saves 4 ssl - 6 sss flops a step and
    moves 4 sl elements less, 10 ss more. So large matrices take it from l = 1.5 s on, small ones from 2.5 s; at s =
    1024, an H100 with 590 flops an element moved, from 1.866 s."""
    aspects = [1 + number / 100 for number in range(301)]
    begins = []
    for short in (16, 1024, 16384, 2**20):
        takes = [takes_gram((round(aspect * short), short), "auto", None) for aspect in aspects]
        assert takes == sorted(takes), "from one aspect on"
        begins.append(aspects[takes.index(True)])
    assert begins == pytest.approx([2.47, 1.87, 1.54, 1.51], abs=0.015)


# Packages with kernels
OF_KERNELS = [(16, 40), (40, 16), (24, 24), (3, 16, 40), (2, 2, 40, 16)]


class Quack:
    """gemm_symmetric of quack-kernels; ``saved`` counts the multiplications that it saves."""

    calls = 0
    saved = 0

    def gemm_symmetric(
        self, A: Tensor, B: Tensor, C: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:  # A is (L, M, K), B (L, K, M)
        batch, rows, inner = A.shape
        assert B.shape == (batch, inner, rows) and (C is None or C.shape == (batch, rows, rows))
        for given in (A, B) if C is None else (A, B, C):
            strides = given.stride()[-2:]
            assert min(strides) == 1 and max(strides) % 8 == 0 and given.data_ptr() % 16 == 0
        assert type(alpha) is float and type(beta) is float
        self.calls, self.saved = self.calls + 1, self.saved + batch * rows * rows * inner
        product = alpha * (A.double() @ B.double())
        plus = torch.zeros_like(product) if C is None else beta * C
        found = (product + plus).to(A.dtype)  # rounded once, as by a kernel
        # A, B, C and the result are rounded, and with them an element and its mirror image; summands may cancel.
        limit = 1e-12 if A.dtype == torch.float64 else 4 * torch.finfo(A.dtype).eps
        assert (found - found.mT).norm() <= limit * (product.norm() + plus.norm())
        return found


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Quack:
    """Its kernels take any sides here that 8 divides."""
    standing_in: Any = ModuleType(packages.KERNELS)
    found = Quack()
    standing_in.gemm_symmetric = found.gemm_symmetric
    monkeypatch.setitem(sys.modules, packages.KERNELS, standing_in)
    monkeypatch.setattr(packages, "LEAST_SIDE", 8)
    return found


@pytest.mark.parametrize("table", TABLES)
def test_quack_kernels_make_the_same_iteration(table: str, quack: Quack) -> None:
    options = {"steps": STEPS[table], "coefficients": table, "eps": 1e-7, "dtype": torch.float64}
    for iterate, shape in product(WAYS, OF_KERNELS):
        matrices, before = random(shape, 0).double(), quack.calls
        ours = iterate(matrices, **options, symmetric=packages.quack_product)
        torch.testing.assert_close(ours, iterate(matrices, **options), rtol=0, atol=1e-9)
        assert iterate is gram_newton_schulz or quack.calls == before + 2 * STEPS[table]


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 24), (16, 24)], ids=str)
def test_quack_kernels_cost_what_they_save_less(shape: tuple[int, int], quack: Quack) -> None:
    """And take the Gram matrix of what is not square, where half a product makes up for more of them."""
    for aspect, steps in product((None, 1.0, 2.0), (1, 3, 5)):
        options = {"ns_method": "quack-kernels", "gram_aspect": aspect, "ns_steps": steps}
        quack.calls = quack.saved = 0
        with FlopCounterMode(display=False) as counter:
            update = rule_of("muon", **options).transform(random(shape, 0))
        assert quack.calls > 0 and cost_of(shape, options) == counter.get_total_flops() - quack.saved
        on_gram = max(shape) >= (aspect or 1.001) * min(shape)
        way = {"ns_method": "gram" if on_gram else "standard", "ns_steps": steps}
        assert update.dtype == torch.bfloat16
        exact = iterated(newton_schulz, random(shape, 0), torch.float64, steps=steps)
        ours, torchs = ((each - exact).norm() for each in (update, rule_of("muon", **way).transform(random(shape, 0))))
        assert ours < 4 * torchs < 0.2 * exact.norm(), "they round as often, in another order"
        assert cost_of(shape, {**options, "gram_aspect": 1.0}) <= cost_of(shape, {**options, "gram_aspect": 9.0})


def test_auto_takes_the_kernels_that_it_finds(quack: Quack, monkeypatch: pytest.MonkeyPatch) -> None:
    """By shape, as the Gram matrix, which with them saves 3 ssl - 3 sss flops a step: at s = 1024 from 1.652 s on. The
    plan's cost is that without them, so that a plan is the same wherever it is made."""
    monkeypatch.setattr(muon, "has_package", lambda name, device: name == "quack-kernels")
    for shape, calls in (((16, 40), 16), ((24, 24), 10), ((12, 40), 0)):
        quack.calls, options = 0, {"ns_method": "auto"}
        update, cost = rule_of("muon", **options).transform(random(shape, 0)), cost_of(shape, options)
        assert quack.calls == calls
        on_gram = takes_gram(shape, "auto", None, symmetric=calls > 0)
        ways = {"ns_method": "quack-kernels" if calls else "standard", "gram_aspect": 1.0 if on_gram else 99.0}
        assert torch.equal(update, rule_of("muon", **ways).transform(random(shape, 0)))
        assert cost == cost_of(shape, {"gram_aspect": 1.0 if takes_gram(shape, "auto", None) else None})
    quack.calls = 0
    rule_of("muon", ns_method="auto", ns_dtype="float32").transform(random((24, 24), 0))
    assert quack.calls == 0
    takes = [takes_gram((1024, 1024 + more), "auto", None, symmetric=True) for more in range(1024)]
    assert takes == sorted(takes) and 1024 + takes.index(True) == pytest.approx(1.652 * 1024, abs=1)
    with pytest.raises(ValueError, match="takes quack-kernels here, whose kernels nobody has captured"):
        check_capture(rule_of("muon", ns_method="auto"), torch.device("cpu"))


@pytest.mark.parametrize(("shape", "least"), [((12, 40), 8), ((2, 40, 12), 8), ((4, 7), 8), ((16, 40), 24)], ids=str)
def test_sides_that_quack_kernels_leave_to_torch(
    shape: tuple[int, ...], least: int, quack: Quack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "LEAST_SIDE", least)
    expected = rule_of("muon", ns_method="gram").transform(random(shape, 0))
    assert torch.equal(rule_of("muon", ns_method="quack-kernels").transform(random(shape, 0)), expected)
    assert quack.calls == 0


def test_muon_calls_the_package_gram_newton_schulz_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def instead(matrices: Tensor, **options: Any) -> Tensor:
        asked.append((options["on_gram"], options["restarts"], options["dtype"], by_step(options["coefficients"], 5)))
        return matrices.bfloat16()

    monkeypatch.setattr("lwopt_backend.rules.muon.packaged_newton_schulz", instead)
    cases: Any = [({}, (6, 6), (False, None)), ({}, (6, 7), (True, None))]
    cases += [({"gram_aspect": 2.0}, (6, 7), (False, None))]
    cases += [({"gram_aspect": 1.0, "gram_restarts": [2]}, (2, 6, 6), (True, (2,)))]
    for options, shape, expected in cases:
        rule_of("muon", ns_method="gram-newton-schulz", **options).transform(torch.ones(shape))
        assert asked.pop() == (*expected, torch.bfloat16, (SIMPLE,) * 5)


@pytest.mark.parametrize("name", list(packages.PACKAGES))
def test_a_package_with_kernels_is_refused_where_it_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, cuda = rule_of("muon", ns_method=name), torch.device("cuda", 0)
    kinds = packages.PACKAGES[name].devices

    def refusal(device: torch.device) -> str:
        with pytest.raises(ValueError, match=f"^ns_method is '{name}'.*set ns_method to 'auto'$") as caught:
            rule.check_device(device)
        return str(caught.value)

    assert f"expected {kinds} by NVIDIA for its kernels, found a device of type 'cpu'" in refusal(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    assert f"expected {kinds} for its kernels, found Tesla T4 with compute capability 7.5" in refusal(cuda)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "found an AMD GPU" in refusal(cuda)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for module in packages.PACKAGES[name].modules:
        monkeypatch.setitem(sys.modules, module, None)
        assert module in refusal(cuda) and f"`pip install {name}`" in refusal(cuda)
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    rule.check_device(cuda)
    for method in ("standard", "gram", "auto"):  # which run anywhere
        rule_of("normuon", ns_method=method).check_device(torch.device("meta"))
