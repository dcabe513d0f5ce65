"""Newton-Schulz with packages that need a GPU: refused without one, and called as expected. Stand-ins compute with
torch. The package gram-newton-schulz itself runs in tests/peers/test_gram_newton_schulz.py."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lwopt_backend.groups.registry import MATRIX_RULES, MuonOptions
from lwopt_backend.rules import gram_newton_schulz, newton_schulz
from lwopt_backend.rules.newton_schulz import TABLES, by_step
from tests.cells import cells
from tests.references import random, rule_of
from tests.test_muon import STEPS

packages: Any = import_module("lwopt_backend.rules.newton_schulz")
SHAPES = [(16, 40), (40, 16), (24, 24), (3, 16, 40), (2, 2, 40, 16)]
WAYS = {True: gram_newton_schulz, False: newton_schulz}


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
        found = alpha * (A @ B) + (0 if C is None else beta * C)
        assert (found - found.mT).norm() <= (0.05 if A.dtype == torch.bfloat16 else 1e-12) * found.norm()
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


@cells(on_gram=[True, False], table=list(TABLES), shape=SHAPES)
def test_quack_makes_the_same_iteration(on_gram: bool, table: str, shape: tuple[int, ...], quack: Quack) -> None:
    options = {"steps": STEPS[table], "coefficients": table, "eps": 1e-7, "dtype": torch.float64}
    matrices = random(shape, 0).double()
    ours = WAYS[on_gram](matrices, **options, symmetric=packages.quack_product)
    torch.testing.assert_close(ours, WAYS[on_gram](matrices, **options), rtol=0, atol=1e-9)
    if not on_gram:
        assert quack.calls == 2 * STEPS[table]


@cells(shape=[(16, 40), (40, 16), (24, 24), (16, 24)], aspect=[None, 1.0, 2.0], steps=[1, 3, 5])
def test_quack_costs_what_it_saves_less(shape: tuple[int, int], aspect: float | None, steps: int, quack: Quack) -> None:
    """And takes the Gram matrix of what is not square, where half a product makes up for more of them."""
    options = {"ns_method": "quack-kernels", "gram_aspect": aspect, "ns_steps": steps}
    with FlopCounterMode(display=False) as counter:
        update = rule_of("muon", **options).transform(random(shape, 0))
    cost = MATRIX_RULES["muon"].cost(shape, MuonOptions(**options).model_dump())
    assert quack.calls > 0 and cost == counter.get_total_flops() - quack.saved
    on_gram = max(shape) >= (aspect or 1.001) * min(shape)
    way = {"ns_method": "gram" if on_gram else "standard", "ns_steps": steps}
    assert update.dtype == torch.bfloat16
    torch.testing.assert_close(update, rule_of("muon", **way).transform(random(shape, 0)), rtol=0, atol=0.05)
    plain, gram = (MATRIX_RULES["muon"].cost(shape, MuonOptions(**options | {"gram_aspect": a}).model_dump())
                   for a in (9.0, 1.0))  # fmt: skip
    assert gram <= plain


@pytest.mark.parametrize(("shape", "least"), [((12, 40), 8), ((2, 40, 12), 8), ((4, 7), 8), ((16, 40), 24)], ids=str)
def test_sides_left_to_torch(shape: tuple[int, ...], least: int, quack: Quack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LEAST_SIDE", least)
    expected = rule_of("muon", ns_method="gram").transform(random(shape, 0))
    assert torch.equal(rule_of("muon", ns_method="quack-kernels").transform(random(shape, 0)), expected)
    assert quack.calls == 0


def test_the_rule_calls_the_package_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def instead(matrices: Tensor, **options: Any) -> Tensor:
        asked.append((options["on_gram"], options["restarts"], options["dtype"], by_step(options["coefficients"], 5)))
        return matrices.bfloat16()

    monkeypatch.setattr("lwopt_backend.rules.muon.packaged_newton_schulz", instead)
    table = TABLES["simple"].triples * 5
    cases: Any = [({}, (6, 6), (False, None)), ({}, (6, 7), (True, None))]
    cases += [({"gram_aspect": 2.0}, (6, 7), (False, None))]
    cases += [({"gram_aspect": 1.0, "gram_restarts": [2]}, (2, 6, 6), (True, (2,)))]
    for options, shape, expected in cases:
        rule_of("muon", ns_method="gram-newton-schulz", **options).transform(torch.ones(shape))
        assert asked.pop() == (*expected, torch.bfloat16, table)


# Devices and installation
@pytest.mark.parametrize("name", list(packages.PACKAGES))
def test_a_package_is_refused_where_it_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_other_methods_run_anywhere() -> None:
    for method in ("standard", "gram", "auto"):
        rule_of("muon", ns_method=method).check_device(torch.device("cpu"))
        rule_of("normuon", ns_method=method).check_device(torch.device("meta"))
