"""What training loops do (``loops.py``), on every engine."""

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.utils import safe_set_full_fp32_param
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim.lr_scheduler import ExponentialLR

from lwopt_backend import ModuleOptimizers
from tests.support import fsdp2, references
from tests.support.loops import (
    LOSS_SCALE,
    MODULES,
    NAMES,
    Invalid,
    Loop,
    Net,
    Pass,
    factors_of,
    is_of_deepspeed,
    module_of,
    sharers,
)
from tests.support.references import full_weights
from tests.support.zero import engine_for, settings_for

OPTIONS: dict[str, dict[str, Any]] = {
    "plain, lazy": {"overlap_param_gather": True},
    "plain, kept": {"keep_full_grads": True},
    "plain, late": {"overlap_grad_reduce": False, "layout": "compact"},
    "plain, copies": {"group_size": 1},
}


class Ranked(Loop):
    """Plain PyTorch or FSDP2."""

    def __init__(self, engine: str, **_: Any) -> None:
        super().__init__(engine)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=LOSS_SCALE)
        self.make(self.made_model())

    def made_model(self) -> nn.Module:
        model = Net()
        if self.engine.startswith("fsdp2"):
            for part in model.children() if self.engine == "fsdp2, units" else ():
                fully_shard(part, mesh=fsdp2.mesh_of())
            fully_shard(model, mesh=fsdp2.mesh_of())
        return model

    def make(self, model: nn.Module) -> None:
        self.model = model
        made: Any = fsdp2.layer_wise(model, on_nonfinite="skip", **OPTIONS.get(self.engine, {}))
        self.optimizers, self.schedulers = [made], []
        for name in self.frozen:
            self.freeze(name, True)

    def weights(self) -> dict[str, Tensor]:
        self.optimizers[0].synchronize()
        return fsdp2.weights_of(self.model)

    def called(self, factors: dict[str, float]) -> list[Tensor]:
        """The losses of this rank."""
        return [self.model(factors)] if factors else []

    def passes(self, passes: list[Pass], how: str = "") -> None:
        for number, one in enumerate(passes):
            synced = how != "apart" and (how == "each" or number == len(passes) - 1)
            with contextlib.ExitStack() as contexts:
                fsdp2.set_sync(self.model, synced)
                if not synced and not self.engine.startswith("fsdp2"):
                    contexts.enter_context(self.optimizers[0].no_sync())
                with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                    losses = self.called(factors_of(one, dist.get_rank()))
                for loss in losses:
                    (self.scaled_loss(loss) if how == "scaled" else loss).backward()

    def scaled_loss(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss)

    def schedule(self) -> None:
        """A scheduler adds a key to the groups, which ``dcp.load`` would look for in a folder that has none."""
        self.schedulers = self.schedulers or [ExponentialLR(self.optimizers[0], 0.5)]
        super().schedule()

    def unscale(self) -> None:
        self.scaler.unscale_(self.optimizers[0])

    def norm(self, order: float = 2.0) -> float:
        return float(self.optimizers[0].grad_norm(norm_type=order))

    def zeros(self) -> int:
        return int(self.optimizers[0].count_zeros())

    def clip(self, order: float) -> None:
        if (norm := self.norm(order)) > LOSS_SCALE:
            self.optimizers[0].clip_grad_norm_(norm / 2, order)

    def step(self, how: str = "") -> None:
        contexts: dict[str, Any] = {
            "autocast": torch.autocast("cpu", torch.bfloat16),
            "inference": torch.inference_mode(),
        }
        if how == "scaled":
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
            return
        with contexts.get(how, contextlib.nullcontext()):
            self.optimizers[0].step()

    def again(self) -> str:
        try:
            self.optimizers[0].step()
        except RuntimeError as error:
            return "refused" if "zero_grad" in str(error) else str(error)
        return "stepped"

    def closure(self, passes: list[Pass]) -> None:
        self.optimizers[0].step(lambda: self.passes(passes))

    def clear(self, whose: str, set_to_none: bool) -> None:
        for each in (*self.optimizers, self.model) if whose == "both" else [self.model]:
            each.zero_grad(set_to_none=set_to_none)

    def wrong(self, edit: str) -> str:
        """An edit that the next step refuses on all ranks, and that is undone."""
        groups = self.groups() if self.engine.startswith("modules") else self.optimizers[0].param_groups
        before = [(group, [*group["params"]]) for group in groups]
        other = nn.Parameter(torch.ones(3, 3))
        edits: dict[str, Callable[[], object]] = {
            "move": lambda: groups[-1]["params"].append(groups[0]["params"].pop()),
            "append": lambda: groups[0]["params"].append(other),
            "replace": lambda: groups[-1]["params"].__setitem__(0, other),
            "repeat": lambda: groups[-1]["params"].append(groups[-1]["params"][0]),
            "add group": lambda: groups.append({**groups[0], "params": [other]}),
            "remove group": lambda: groups.pop(),
        }
        edits[edit]()
        try:
            self.optimizers[0].step()
            said = "stepped"
        except (RuntimeError, ValueError) as error:
            said = "refused" if "param_groups: expected" in str(error) else str(error)
        groups[:] = [group for group, _ in before]
        for group, params in before:
            group["params"][:] = params
        self.clear("both", True)
        return said

    def reset(self, names: list[str]) -> None:
        self.optimizers[0].reset_state(names)

    def evaluate(self) -> None:
        super().evaluate()
        self.reshard()

    def edit(self) -> None:
        self.reshard()
        super().edit()

    def swap(self) -> None:
        self.reshard()
        super().swap()

    def reshard(self) -> None:
        """A pass without gradients leaves FSDP2's root gathered, and its parameters are then other ones."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()

    def anew(self) -> None:
        self.reshard()
        model = self.model
        self.end()
        self.make(model)

    # Checkpoints

    def save(self, way: str, folder: str) -> None:
        optimizer, self.saved, self.scheduled = self.optimizers[0], (way, folder), bool(self.schedulers)
        state = self.by_name(way)
        if way == "folder":
            optimizer.save_state_dict(folder)
        elif way == "number":
            dcp.save({"model": self.model, "optimizer": optimizer}, checkpoint_id=folder)
        elif way in ("nested", "flat"):
            dcp.save(state, checkpoint_id=folder)
        elif way == "full":
            self.file(folder, state if dist.get_rank() == 0 else {})
        elif way == "pieces":
            self.file(folder, self.whole())
        else:
            self.saved = way, copy.deepcopy(self.whole())

    def load(self, anew: bool) -> None:
        if anew:
            self.end()
            self.make(self.made_model())
        elif self.schedulers and not self.scheduled and self.saved[0] in ("number", "nested", "flat"):
            raise Invalid  # as of torch.optim: DCP looks for a scheduler's key, which the folder lacks
        self.take(*self.saved)

    def take(self, way: str, kept: Any) -> None:
        self.reshard()
        if way == "folder":
            self.optimizers[0].load_state_dict_from(kept)
        elif way == "number":
            dcp.load({"model": self.model, "optimizer": self.optimizers[0]}, checkpoint_id=kept)
        elif way in ("nested", "flat", "full"):
            state = self.by_name(way)
            if way == "full":
                state = torch.load(f"{kept}/0.pt") if dist.get_rank() == 0 else {"model": {}, "optimizer": {}}
            else:
                dcp.load(state, checkpoint_id=kept)
            state_dict.set_model_state_dict(self.model, state["model"], options=forms(way))
            state_dict.set_optimizer_state_dict(self.model, self.optimizers[0], state["optimizer"], options=forms(way))
        else:
            found = torch.load(f"{kept}/{dist.get_rank()}.pt") if way == "pieces" else copy.deepcopy(kept)
            self.model.load_state_dict(found["model"])
            self.optimizers[0].load_state_dict(found["optimizer"])

    def by_name(self, way: str) -> dict[str, Any]:
        if way not in ("nested", "flat", "full"):
            return {}
        self.reshard()
        model, optimizer = state_dict.get_state_dict(self.model, self.optimizers[0], options=forms(way))
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> dict[str, Any]:
        self.reshard()
        return {"model": self.model.state_dict(), "optimizer": self.optimizers[0].state_dict()}

    def file(self, folder: str, state: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(state, f"{folder}/{dist.get_rank()}.pt")
        dist.barrier()

    def leave(self, folder: str) -> None:
        """Save for another engine, or other ranks."""
        self.save("nested" if self.engine.startswith("fsdp2") else "folder", folder)

    def enter(self, folder: str) -> None:
        self.take("nested" if self.engine.startswith("fsdp2") else "folder", folder)

    def end(self) -> None:
        del self.optimizers, self.schedulers, self.model
        gc.collect()


def forms(way: str) -> state_dict.StateDictOptions:
    full = dict.fromkeys(("full_state_dict", "cpu_offload", "broadcast_from_rank0"), way == "full")
    return state_dict.StateDictOptions(flatten_optimizer_state_dict=way == "flat", **full)


@functools.cache
def groups_of(*modules: tuple[int, ...]) -> list[Any]:
    """A process group for each module. Called on all ranks."""
    return [dist.new_group([*ranks]) for ranks in modules]


class OfModules(Ranked):
    """ModuleOptimizers of two modules, each on its ranks: both plain, or one of them on FSDP2."""

    def made_model(self) -> nn.Module:
        ranks = [sharers(self.engine, dist.get_world_size(), module) for module in MODULES]
        self.process_groups = dict(zip(MODULES, groups_of(*ranks)))
        model = nn.ModuleDict()
        for (module, parts), members in zip(MODULES.items(), ranks):
            if dist.get_rank() in members:
                model[module] = Net(*parts)
        if self.engine == "modules, mixed" and "language" in model:
            fully_shard(model["language"], mesh=DeviceMesh.from_group(self.process_groups["language"], "cpu"))
        return model

    def make(self, model: nn.Module) -> None:
        assert isinstance(model, nn.ModuleDict)
        self.model = model
        optimizers: dict[str, Any] = dict.fromkeys(MODULES)
        for name, module in model.items():
            given = {} if isinstance(module, FSDPModule) else {"process_group": self.process_groups[name]}
            optimizers[name] = fsdp2.layer_wise(module, **given)
        made = ModuleOptimizers(optimizers)
        self.optimizers, self.schedulers = [made], []
        for name in self.frozen:
            self.freeze(name, True)

    def params(self) -> dict[str, Any]:
        return {name.partition(".")[2]: param for name, param in self.model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        return {name: fsdp2.whole(param) for name, param in self.params().items()}

    def called(self, factors: dict[str, float]) -> list[Tensor]:
        """Of each module here, in their order."""
        losses = []
        for name, module in self.model.named_children():
            mine = {each: factor for each, factor in factors.items() if module_of(each) == name}
            losses += [module(mine)] if mine else []
        return losses

    def scaled_loss(self, loss: Tensor) -> Tensor:
        return loss * LOSS_SCALE

    def unscale(self) -> None:
        self.optimizers[0].scale_grads(1 / LOSS_SCALE)

    def step(self, how: str = "") -> None:
        super().step("" if how == "scaled" else how)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.called(dict.fromkeys(NAMES, 1.0))
        self.reshard()

    def reshard(self) -> None:
        for module in self.model.children():
            if isinstance(module, FSDPModule):
                module.reshard()

    def reset(self, names: list[str]) -> None:
        super().reset([f"{module_of(name)}.{name}" for name in names])

    def save(self, way: str, folder: str) -> None:
        optimizers, self.saved, self.scheduled = self.optimizers[0], (way, folder), bool(self.schedulers)
        self.reshard()
        if way == "copy":
            self.saved = way, copy.deepcopy(self.whole())
            return
        self.file(f"{folder}/weights", self.weights())
        if way == "folder":
            optimizers.save_state_dict(f"{folder}/optimizer")
        else:
            dcp.save({"optimizer": optimizers}, checkpoint_id=f"{folder}/optimizer")

    def take(self, way: str, kept: Any) -> None:
        self.reshard()
        if way == "copy":
            super().take(way, kept)
            return
        weights = dict[str, Tensor]()
        for file in Path(kept, "weights").iterdir():
            weights |= torch.load(file)
        for module in self.model.children():
            fsdp2.set_weights(module, weights)
        if way == "folder":
            self.optimizers[0].load_state_dict_from(f"{kept}/optimizer")
        else:
            dcp.load({"optimizer": self.optimizers[0]}, checkpoint_id=f"{kept}/optimizer")


class OnDeepSpeed(Loop):
    def __init__(self, engine: str, *, accumulation: int, limit: float, converted: bool) -> None:
        super().__init__(engine)
        self.storage, _, stage = engine.partition(" ")
        self.stage, self.accumulation, self.limit = int(stage), accumulation, limit
        self.found: float | None = None
        self.make(Net(), converted)

    def make(self, model: nn.Module, converted: bool) -> None:
        settings = settings_for(self.storage, self.stage, accumulation=self.accumulation)
        settings["optimizer"] = references.layer_wise("muon", storage=self.storage)
        settings |= {"gradient_clipping": self.limit, "checkpoint": {"load_universal": converted}}
        self.converted = converted
        if self.stage in (1, 2) and self.storage == "zero":  # or DeepSpeed looks for no NaN
            settings["zero_optimization"]["compute_grad_norm"] = True
        self.ends = contextlib.ExitStack()
        self.made = self.ends.enter_context(engine_for(settings, model))
        self.model, self.optimizers, self.schedulers = self.made.module, [self.made.optimizer], []
        for name in self.frozen:
            self.freeze(name, True)

    def weights(self) -> dict[str, Tensor]:
        return full_weights(self.made)

    def passes(self, passes: list[Pass], how: str = "") -> None:
        for one in passes:
            mine = factors_of(one, dist.get_rank())
            self.made.backward(self.made({name: factor * len(passes) for name, factor in mine.items()}))
            self.made.step()  # it divides by the number of passes
        if self.limit:
            self.found = float(self.made.get_global_grad_norm())

    def evaluate(self) -> None:
        with torch.no_grad():
            self.made(dict.fromkeys(NAMES, 1.0))

    def edit(self) -> None:
        if self.stage == 0 or self.storage == "owned":
            super().edit()
            return
        for name, tensor in self.weights().items():
            safe_set_full_fp32_param(self.params()[name], 0.5 * tensor)

    def reset(self, names: list[str]) -> None:
        (self.made.optimizer if self.storage == "owned" else self.made.basic_optimizer).reset_state(names)

    def anew(self) -> None:
        model = Net()
        model.load_state_dict(self.weights())
        self.end()
        self.make(model, False)

    def save(self, way: str, folder: str) -> None:
        self.saved = folder
        self.made.save_checkpoint(folder)

    def load(self, anew: bool) -> None:
        if anew or self.converted:
            self.end()
            self.make(Net(), False)
        self.made.load_checkpoint(self.saved)

    def leave(self, folder: str) -> None:
        self.save("", folder)

    def enter(self, folder: str) -> None:
        self.made.load_checkpoint(folder)

    def end(self) -> None:
        self.ends.close()


@contextlib.contextmanager
def running(engine: str, **how: Any) -> Iterator[Any]:
    """A loop on that engine."""
    kinds: dict[bool, Any] = {is_of_deepspeed(engine): OnDeepSpeed, engine.startswith("modules"): OfModules}
    side = kinds.get(True, Ranked)(engine, **how)
    try:
        yield side
    finally:
        side.end()
