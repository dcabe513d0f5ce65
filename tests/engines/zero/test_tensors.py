"""deepspeed.utils.safe_get_* and safe_set_*: the right tensors, and what is not there is an error on all ranks."""

from typing import Any

import pytest
import torch
from deepspeed import utils
from torch import Tensor

from tests.support.cells import cells
from tests.support.models import UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.zero import Reference, batch_shares, engine_for, settings_for, train

STORAGES: dict[str, dict[str, Any]] = {"zero": {"storage": "zero"}, "padded": {"storage": "owned", "layout": "padded"}}
STORAGES |= {"compact": {"storage": "owned", "layout": "compact"}, "instances": {"storage": "owned", "group_size": 1}}
OF_A_MATRIX = "^parameter 'gate.weight': expected a key in 'momentum_buffer', found 'exp_avg'"
OF_OTHERS = "^parameter 'lm_head.weight': expected a key in 'exp_avg', 'exp_avg_sq', found {!r}"
EARLY = "^parameter 'gate.weight' has no 'momentum_buffer' before the first step; take a step"
NO_GRADIENT = "^parameter 'gate.weight': expected a gradient at its owner, found none; ask between the"
CELLS = [*(("zero", s, "fp32") for s in (1, 2, 3)), ("zero", 1, "bf16+fp32"), *(("owned", s, "fp32") for s in range(3))]


class Tensors:
    """Those of one parameter, or this rank's part of them at stage 3: an equal part, with padding at the end."""

    def __init__(self, name: str, param: Any, single: Reference, local: bool) -> None:
        self.name, self.param, self.single, self.where = name, param, single, "local" if local else "full"
        self.theirs = single.model.get_parameter(name)

    def part(self, whole: Tensor) -> Tensor:
        if self.where == "full":
            return whole.detach()
        numel = self.param.ds_tensor.numel()
        return whole.detach().flatten()[torch.distributed.get_rank() * numel :][:numel]

    def assert_read(self, what: str, theirs: Tensor, *key: str) -> None:
        ours, theirs = getattr(utils, f"safe_get_{self.where}_{what}")(self.param, *key), self.part(theirs)
        assert torch.equal(ours if self.where == "full" else ours[: theirs.numel()], theirs), self.name

    def assert_weights_and_states(self) -> None:
        self.assert_read("fp32_param", self.theirs)
        for key, state in self.single.state_of(self.name).items():
            self.assert_read("optimizer_state", state, key)

    def write(self, what: str, theirs: Tensor, value: Tensor, *key: str) -> None:
        """Here and on one process."""
        theirs.data.copy_(value)
        mine = self.part(value)
        if self.where == "local":
            mine = torch.nn.functional.pad(mine, (0, self.param.ds_tensor.numel() - mine.numel()))
        getattr(utils, f"safe_set_{self.where}_{what}")(self.param, mine, *key)

    def write_all(self, generator: torch.Generator) -> None:
        self.write("fp32_param", self.theirs, torch.randn(self.theirs.shape, generator=generator))
        self.write("grad", self.theirs.grad, torch.randn(self.theirs.shape, generator=generator))
        for key, state in self.single.state_of(self.name).items():
            self.write("optimizer_state", state, torch.rand(state.shape, generator=generator), key)


def backward(engine: Any, single: Reference, step: int) -> None:
    """All ranks on all rows, so that the mean of their gradients is the single process's, bit for bit."""
    engine.backward(engine(*batch_shares(step, 1)[0]))
    single.model(*batch_shares(step, 1)[0]).backward()


@on_ranks()
@cells(lambda kind, stage, **_: stage > 0 if kind == "zero" else stage < 3, ranks=[2, 4], kind=STORAGES, stage=range(4))
def test_full_tensors_can_be_read_and_written(kind: str, stage: int) -> None:
    """Tensors are those of a single process, and what is written is stepped with. After two steps, in a third, and
    after it; at stage 3 whole ones and parts are read, and parts are written."""
    single, generator = Reference(), torch.Generator().manual_seed(7)
    with engine_for(settings_for(stage=stage, **STORAGES[kind])) as engine:
        train(engine, 2, same_rows=True)
        single.train(2)
        named = list(engine.module.named_parameters())
        whole = [Tensors(name, param, single, False) for name, param in named]
        parts = [Tensors(name, param, single, True) for name, param in named] if stage == 3 else []
        for tensors in (*whole, *parts):
            tensors.assert_weights_and_states()
        backward(engine, single, 2)
        for tensors in (*whole, *parts):
            tensors.assert_read("grad", tensors.theirs.grad)
        for tensors in parts or whole:
            tensors.write_all(generator)
            assert kind == "zero" or torch.equal(tensors.param, tensors.theirs)
        engine.step()
        single.step()
        for tensors in whole:
            tensors.assert_weights_and_states()


@on_ranks(2)
@pytest.mark.parametrize(("storage", "stage", "precision"), CELLS)
def test_what_is_not_there_is_an_error_on_all_ranks(storage: str, stage: int, precision: str) -> None:
    """Also of ten elements, which one rank stores at stages 1 and 2. At stage 3 all ranks raise DeepSpeed's own."""

    def assert_missing(error: type[Exception], message: str, name: str, key: str) -> None:
        param, shape = engine.module.get_parameter(name), UnevenLM().get_parameter(name).shape
        expected: Any = (KeyError, f"^'{key}'$") if stage == 3 else (error, message)
        with pytest.raises(expected[0], match=expected[1]):
            utils.safe_get_full_optimizer_state(param, key)
        with pytest.raises(expected[0], match=expected[1]):
            utils.safe_set_full_optimizer_state(param, torch.zeros(shape), key)

    with engine_for(settings_for(storage, stage, precision)) as engine:
        if storage == "zero":
            assert_missing(RuntimeError, EARLY, "gate.weight", "momentum_buffer")
        else:
            with pytest.raises(RuntimeError, match=NO_GRADIENT):
                utils.safe_get_full_grad(engine.module.gate.weight)
        train(engine, 1, same_rows=True)
        assert_missing(ValueError, OF_A_MATRIX, "gate.weight", "exp_avg")
        assert_missing(ValueError, OF_OTHERS.format("momentum_buffer"), "lm_head.weight", "momentum_buffer")
