"""Bad settings of every host and command: refused by name before training, or accepted and right."""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import hypothesis
import pytest
import torch
import typer
from hypothesis import strategies as some
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lwopt_backend import LayerWiseOptimizer
from lwopt_backend.cli import app
from lwopt_backend.config.foreign import ADVICE, GRANTED, MEANT
from lwopt_backend.config.hosts import FSDP2Config, OwnedConfig, ZeROConfig
from lwopt_backend.groups.optimizer_classes import class_named
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, MATRIX_RULES, rule_of
from lwopt_backend.groups.registry import arguments as arguments_in
from lwopt_backend.plan.cost import CLUSTERS
from tests import fsdp2, hostile, zero
from tests.command_line import torch_dist
from tests.faults.campaign import SEED, count, in_raw_words, raw
from tests.ranks import RankPool
from tests.references import CLASSES, PlainRule, elementwise_optimizer

MOST_FLOPS = 200  # iterations of Newton-Schulz that a test waits for


class Tiny(nn.Module):
    """A matrix, a fused one, a convolution's and vectors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.conv = nn.Embedding(7, 6), nn.Conv1d(6, 6, 3, padding=1)
        self.up, self.out = nn.Linear(6, 18), nn.Linear(18, 6, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.out(self.up(self.conv(x.transpose(1, 2)).transpose(1, 2))).square().mean()


TOKENS = torch.arange(7).view(1, 7)
NAMES = [name for name, _ in Tiny().named_parameters()]

# What is given
scalars = some.one_of(
    some.none(),
    some.booleans(),
    some.integers(-2, 9),
    some.sampled_from([10**6, 2**31, 2**64, -(2**63), 10**400, 1e308, 5e-324, -0.0, 1e-8, 0.1, 0.95, 2.5]),
    some.floats(),
    some.sampled_from(["auto", "float32", "whole", "*", "", "1", "2e-2", "true", "nan", "\0", "ä" * 50, "[", "a.b"]),
    some.sampled_from([*MATRIX_RULES, *ELEMENTWISE_RULES, "torch.optim.Adam", "torch.optim", ".", "os.system"]),
    some.sampled_from(NAMES),
    some.text(max_size=4),
)
keys = some.sampled_from(["name", "lr", "class", "params", "heads", "qkv", "matrix"]) | some.text(max_size=3)
anything = some.recursive(
    scalars, lambda inner: some.lists(inner, max_size=5) | some.dictionaries(keys, inner, max_size=3), max_leaves=8
)
Known = dict[str, some.SearchStrategy[Any]]  # by option, values that it may well have


def fitting(annotation: Any, default: Any) -> some.SearchStrategy[Any]:
    """Values that an option may well have."""
    kinds = [part for part in (annotation, *get_args(annotation))]
    words = [word for part in kinds if get_origin(part) is Literal for word in get_args(part)]
    found = [some.just(default)] + ([some.sampled_from(words)] if words else [])
    if bool in kinds:
        found.append(some.booleans())
    if int in kinds:
        found.append(some.integers(1, 9))
    if float in kinds:
        found.append(some.floats(0, 1))
    return some.one_of(found)


def options_of(model: Any) -> Known:
    return {key: fitting(field.annotation, field.default) for key, field in model.model_fields.items()}


def options_of_rule(name: str) -> Known:
    given = {"class": "torch.optim.Adam"} if name == "torch_optimizer" else {}
    return options_of({**MATRIX_RULES, **ELEMENTWISE_RULES}[name].model(given, ""))


@some.composite
def picked(draw: Any, known: Known) -> dict[str, Any]:
    """Some of these options, of which often one has another value, and seldom one is not known."""
    names = draw(some.lists(some.sampled_from(sorted(known)), max_size=5, unique=True))
    found = {key: draw(known[key]) for key in names}
    if names and draw(some.booleans()):
        found[draw(some.sampled_from(names))] = draw(anything)
    if draw(some.integers(0, 14)) == 7:
        wrong = draw(some.sampled_from([*MEANT, *GRANTED, *ADVICE, "", "lrr", "Momentum", *OwnedConfig.model_fields]))
        found[wrong] = draw(anything)
    return found


@some.composite
def section(draw: Any, rules: Any) -> Any:
    name = draw(some.sampled_from(sorted(rules)))
    if draw(some.booleans()):
        return name
    of_class = {"class": "torch.optim.RMSprop"} if name == "torch_optimizer" else {}
    return {"name": name, **of_class, **draw(picked(options_of_rule(name)))}


OVERRIDES = some.lists(
    some.fixed_dictionaries(
        {"params": some.sampled_from(["*", "up.*", ["out.weight", "conv.*"], "none"]) | anything},
        optional={"matrix": section(MATRIX_RULES), "elementwise": section(ELEMENTWISE_RULES)},
    ),
    max_size=2,
)
ATOMS = some.dictionaries(
    some.sampled_from(["*", "up.weight", "conv.*", "nothing"]),
    some.sampled_from(["whole", "stack", "flatten", {"heads": 3}, {"qkv": [6, 6, 6], "groups": 1}, {"heads": 0}])
    | some.dictionaries(some.sampled_from(["heads", "qkv", "groups", "split_sizes"]), anything, max_size=2),
    max_size=2,
)
GROUP = picked(options_of_rule("muon") | {"adamw": picked(options_of_rule("adamw"))})


def given_to(model: Any, *, flat: bool = False, **further: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    """The options of a host, with sections of rules, or Muon's and AdamW's outside them."""
    known = {**options_of(model), "atoms": ATOMS, "overrides": OVERRIDES, **further}
    globs = some.sampled_from(["*", "embed.*", ["out.*", "conv.*"], "none", "[", ""])
    known |= {"include": globs, "exclude": globs, "report": some.just(False)}
    if flat:
        known |= options_of_rule("muon") | {"adamw": picked(options_of_rule("adamw"))}
    else:
        known |= {"matrix": section(MATRIX_RULES), "elementwise": section(ELEMENTWISE_RULES)}
        known |= {"lr": some.floats(0, 1), "weight_decay": some.floats(0, 1)}
    return picked(known)


NONE = some.none()
IN_PYTHON = {
    "elementwise_lr": some.floats(0, 1),
    "momentum": some.floats(0, 0.999),
    "adamw": picked(options_of_rule("adamw")),
    "groups": some.lists(GROUP, min_size=1, max_size=2),  # which become params
    "process_group": NONE,
    "expert_params": some.sampled_from([(), "out.*", ["up.*"]]),
    "expert_process_group": NONE,
    "expert_group_size": NONE | some.integers(1, 3),
}


# What comes of it
def too_long(given: Any) -> bool:
    """Whether it may be right but take more time than a test has."""
    if isinstance(given, dict):
        return any(key == "ns_steps" and number(value) or too_long(value) for key, value in given.items())
    return isinstance(given, (list, tuple)) and any(map(too_long, given))


def number(value: Any) -> bool:
    return isinstance(value, int) and value > MOST_FLOPS


def judged(host: str, given: Any) -> tuple[str, str]:
    """How settings end, "refused" or "accepted", and what is wrong with that, if anything."""
    copied = copy.deepcopy(given)
    with contextlib.ExitStack() as stack:
        try:
            step = stack.enter_context(HOW[host](copied))
        except Exception as error:
            return "refused", raw(error) or unnamed(str(error), given)
        try:
            step()
        except Exception as error:
            return "accepted", f"accepted, then {raw(error) or repr(error)}"
    return "accepted", ""


def judged_all(host: str, examples: list[Any]) -> list[tuple[str, str]]:
    return [judged(host, given) for given in examples]


def unnamed(told: str, given: Any) -> str:
    """What is told, if it has no option in quotes, no key and no value of what is given."""
    named = re.search(r"'\w+'", told) or any(text in told for text in texts(given))
    return "" if named else f"nothing is named: {told}"


def texts(given: Any) -> Iterator[str]:
    yield repr(given)
    if isinstance(given, dict):
        yield from (repr(key)[1:-1] for key in given if key != "")
    for value in given.values() if isinstance(given, dict) else given if isinstance(given, list) else ():
        yield from texts(value)


def arguments(model: nn.Module, given: dict[str, Any]) -> dict[str, Any]:
    """Those of LayerWiseOptimizer, with every second parameter in a separate group."""
    groups = given.pop("groups", None)
    params = list(model.parameters())
    if isinstance(groups, list) and groups:
        of_groups = [{"params": params[number :: len(groups)]} for number in range(len(groups))]
        given["params"] = [{**own, **more} if isinstance(more, dict) else more for own, more in zip(of_groups, groups)]
    return {"report": False, **given}


class Alone:
    """One process that trains the whole matrices of a model by what an optimizer's param groups say."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self.model = copy.deepcopy(model)
        self.start = copy.deepcopy(self.model.state_dict())
        self.optimizers: list[Any] = []
        self.comparable = True
        for group in optimizer.param_groups:
            params: list[Any] = [self.model.get_parameter(names[id(param)]) for param in group["params"]]
            options = arguments_in(group)
            section = {"name": rule_of(group), **options}
            if rule_of(group) in CLASSES:
                cls = class_named(options.pop("class")) if "class" in options else CLASSES[rule_of(group)]
                self.optimizers.append(cls(params, **options))
            elif rule_of(group) in MATRIX_RULES:
                self.optimizers.append(PlainRule(params, section))
            elif section.pop("weight_decay_form", "own") == "cautious":
                self.comparable = False  # tested elsewhere
            else:
                self.optimizers.append(elementwise_optimizer(params, section))

    def check(self, model: nn.Module) -> None:
        """Train likewise, and compare."""
        if not self.comparable:
            return
        for _ in range(2):
            self.model(TOKENS).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.model.zero_grad()
        for name, param in self.model.named_parameters():
            ours, moved = model.get_parameter(name), (param - self.start[name]).norm()
            apart = (ours - param).norm()
            assert apart <= 0.05 * moved + 1e-6 or not moved.isfinite(), (name, float(apart), float(moved))


@contextlib.contextmanager
def plain(given: dict[str, Any]) -> Iterator[Callable[[], None]]:
    model = Tiny()
    optimizer = LayerWiseOptimizer(model, **arguments(model, given))

    alone = None if "atoms" in given else Alone(model, optimizer)

    def step() -> None:
        for _ in range(2):
            model(TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        if alone is not None:
            alone.check(model)

    yield step


@contextlib.contextmanager
def on_fsdp2(given: dict[str, Any]) -> Iterator[Callable[[], None]]:
    model = fully_shard(Tiny(), mesh=fsdp2.mesh_of())
    optimizer = LayerWiseOptimizer(model, **arguments(model, given))

    def step() -> None:
        model(TOKENS).backward()
        optimizer.step()

    yield step


@contextlib.contextmanager
def under_deepspeed(given: dict[str, Any]) -> Iterator[Callable[[], None]]:
    settings = zero.config(given["stage"], rows=1)
    settings["optimizer"] = {"type": given["type"], "params": {"report": False, **given["params"]}}
    with zero.engine_for(settings, Tiny()) as engine:

        def step() -> None:
            engine.backward(engine(TOKENS))
            engine.step()

        yield step


HOW = {"plain PyTorch": plain, "FSDP2": on_fsdp2, "DeepSpeed": under_deepspeed}
deepspeed = some.fixed_dictionaries(
    {
        "type": some.sampled_from(["LayerWise", "LayerWiseMuon"]),
        "params": given_to(ZeROConfig, flat=True) | given_to(ZeROConfig),
        "stage": some.integers(0, 3),
    }
)
GIVEN = {"plain PyTorch": given_to(OwnedConfig, **IN_PYTHON), "FSDP2": given_to(FSDP2Config, **IN_PYTHON)}
GIVEN |= {"DeepSpeed": deepspeed}


def drawn(strategy: some.SearchStrategy[Any], number: int) -> list[Any]:
    found: list[Any] = []
    checks = list(hypothesis.HealthCheck)

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=number, database=None, deadline=None, suppress_health_check=checks)
    @hypothesis.given(strategy)
    def draw(example: Any) -> None:
        if not too_long(example):
            found.append(example)

    draw()
    return found[:number]


# Commands
WORDS = some.one_of(
    some.sampled_from(
        ["auto", "owned", "zero2", "zero3", "fsdp2", "float32", "bfloat16", "gpt", "h100-8x-ib", "flops"]
    ),
    some.sampled_from(
        ["1", "2", "4", "7", "64", "0", "-1", "2.5", "1e-3", "nan", "inf", "1e999", str(10**30), "", " "]
    ),
    some.sampled_from(["matrix=soap", "matrix={name: muon, lr: [}", "layout=1", "=", "a=b", "atoms={a: 1}", "lr=.nan"]),
    some.sampled_from(["cluster.yaml", "shapes.json", "config.json", "megatron", "nothing/there", ".", "/", "ä"]),
    some.sampled_from(
        ["*", "[", "a.*", "dcp", "universal", "megatron", "safetensors", "torch.optim.Adam", "os.system"]
    ),
    some.text(max_size=4).filter(lambda text: not text.startswith("-") and "\0" not in text),
)
content = some.recursive(
    some.one_of(scalars, some.sampled_from(["a.weight", [4, 3], [0, 3], ["a", [4, 3]], "llama", "LlamaForCausalLM"])),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)
CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
CONFIG |= {"vocab_size": 11, "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
FILES = {"config.json": CONFIG, "shapes.json": [["a.weight", [4, 3]], ["b.weight", [8, 4]]]}
FILES |= {"cluster.yaml": dataclasses.asdict(CLUSTERS["h100-8x-ib"])}
OPTIONS_OF = {name: list(each.params) for name, each in typer.main.get_command(app).commands.items()}
FITS = {
    "plan": [["--world-size", "4", "--hf", "config.json"], ["--world-size", "4", "--shapes", "shapes.json"]],
    "rules": [[], ["muon"]],
    "inspect": [["megatron"]],
    "convert": [["megatron", "to", "--to", target] for target in ("dcp", "universal", "safetensors")],
    "diff": [["megatron", "megatron"]],
}


@some.composite
def command(draw: Any) -> dict[str, Any]:
    name = draw(some.sampled_from([*FITS, "plan", "plan"]))
    files = dict(FILES)
    if name == "plan" and draw(some.booleans()):
        harmed = draw(some.sampled_from(sorted(FILES)))
        files[harmed] = draw(altered(FILES[harmed]))
    words = [draw(WORDS) if draw(some.integers(0, 11)) == 5 else word for word in draw(some.sampled_from(FITS[name]))]
    if name == "plan":
        words += ["--json", *draw(some.sampled_from([[], ["--cluster", "cluster.yaml"]]))]
    for option in draw(some.lists(some.sampled_from(OPTIONS_OF[name]), max_size=3)):
        if option.param_type_name == "option" and "--help" not in option.opts:
            words.append(option.opts[-1])
            words += [] if option.is_flag else [draw(fitting_text(option) | WORDS)]
    return {"words": [name, *words], "files": files}


def fitting_text(option: Any) -> some.SearchStrategy[str]:
    kinds = (option.type_descriptor.annotation, *get_args(option.type_descriptor.annotation))
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    return some.sampled_from(words or ["1", "2", "4", "*"])


@some.composite
def altered(draw: Any, value: Any) -> Any:
    if isinstance(value, dict) and value and draw(some.integers(0, 9)):
        key = draw(some.sampled_from(sorted(value)))
        return {**value, key: draw(altered(value[key]))}
    if isinstance(value, list) and value and draw(some.integers(0, 3)):
        at = draw(some.integers(0, len(value) - 1))
        return [*value[:at], draw(altered(value[at])), *value[at + 1 :]]
    return draw(content)


def misfit(folder: Path, given: dict[str, Any]) -> str:
    for name, value in given["files"].items():
        (folder / name).write_text(json.dumps(value))
    shutil.rmtree(folder / "to", ignore_errors=True)
    run = hostile.ended(*given["words"])
    if isinstance(run, str):
        return run
    typers = run.err.startswith("Usage: ")  # which words its refusals itself
    return "" if typers else in_raw_words(run.err) if run.code == 2 else hostile.wrong_in(run)


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint, which is the current one."""
    torch_dist(tmp_path / "megatron")
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGPROF, hostile.too_long)
    return tmp_path


@pytest.mark.parametrize("host", GIVEN)
def test_settings_of_a_host_are_refused_by_name_or_train_as_they_say(ranks: RankPool, host: str) -> None:
    examples, endings = drawn(GIVEN[host], count(500)), Counter[str]()
    for at in range(0, len(examples), 10):
        part = examples[at : at + 10]
        for given, *found in zip(part, *ranks.run(judged_all, host, part, timeout=300), strict=True):
            endings[found[0][0]] += 1
            assert len({ending for ending, _ in found}) == 1, f"{given}: ranks differ: {found} (seed {SEED})"
            assert not any(wrong for _, wrong in found), f"{given}: {found} (seed {SEED})"
    print(f"{host}: {dict(endings)}, seed {SEED}")


def test_commands_say_in_words_what_is_wrong_or_go_well(beside: Path) -> None:
    for given in drawn(command(), count(500)):
        assert not (wrong := misfit(beside, given)), f"{given}: {wrong} (seed {SEED})"
