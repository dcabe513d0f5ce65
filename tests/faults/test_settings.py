"""Bad settings of every host and command: refused by name before training, or accepted and trained with."""

import contextlib
import copy
import dataclasses
import json
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
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
from lwopt_backend.config.hosts import FSDP2Config, PlainConfig, ZeROConfig
from lwopt_backend.config.options import Option, options_in
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, MATRIX_RULES, known_of
from lwopt_backend.plan.cost import CLUSTERS
from tests.faults.campaign import SEED, count, in_raw_words, raw
from tests.support import fsdp2, hostile, zero
from tests.support.command_line import torch_dist
from tests.support.ranks import RankPool

MOST_STEPS = 200  # iterations of Newton-Schulz that a test waits for


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

# What is given: options of the schemas, each with a value that fits, or with anything
NUMBERS = [10**6, 2**31, 2**64, -(2**63), 10**400, 1e308, 5e-324, -0.0, 1e-8, 0.1, 0.95, 2.5]
TEXTS = ["auto", "float32", "whole", "*", "up.*", "out.weight", "", "1", "2e-2", "true", "nan", "\0", "ä" * 50, "["]
TEXTS += [*MATRIX_RULES, *ELEMENTWISE_RULES, "torch.optim.Adam", "torch.optim", ".", "os.system"]
scalars = some.none() | some.booleans() | some.integers(-2, 9) | some.floats() | some.text(max_size=4)
scalars |= some.sampled_from([*NUMBERS, *TEXTS])
KEYS = ["name", "lr", "class", "params", "heads", "qkv", "groups", "matrix", "*", "conv.*"]
keys = some.sampled_from(KEYS) | some.text(max_size=3)
anything = some.recursive(
    scalars, lambda inner: some.lists(inner, max_size=5) | some.dictionaries(keys, inner, max_size=3), max_leaves=8
)
Known = dict[str, some.SearchStrategy[Any]]  # by option


def fitting(annotation: Any, default: Any) -> some.SearchStrategy[Any]:
    """Values that an option may well have."""
    kinds = [annotation, *get_args(annotation)]
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    of_kind = {bool: some.booleans(), int: some.integers(1, 9), float: some.floats(0, 1)}
    return some.one_of(some.sampled_from([default, *words]), *(of_kind[kind] for kind in of_kind if kind in kinds))


def options_of(known: Mapping[str, Option]) -> Known:
    return {key: fitting(option.kind, option.default) for key, option in known.items()}


def options_of_rule(name: str) -> Known:
    given = {"class": "torch.optim.Adam"} if name == "torch_optimizer" else {}
    return options_of(known_of(name, given))


@some.composite
def picked(draw: Any, known: Known) -> dict[str, Any]:
    """Some of these options, of which often one has another value, and seldom one is not known."""
    found = {key: draw(known[key]) for key in draw(some.lists(some.sampled_from(sorted(known)), max_size=5))}
    if found and draw(some.booleans()):
        found[draw(some.sampled_from(sorted(found)))] = draw(anything)
    if draw(some.integers(0, 14)) == 7:
        wrong = [*MEANT, *GRANTED, *ADVICE, "", "lrr", "Momentum", *options_in(PlainConfig)]
        found[draw(some.sampled_from(wrong))] = draw(anything)
    return found


@some.composite
def section(draw: Any, rules: Any) -> Any:
    name = draw(some.sampled_from(sorted(rules)))
    of_class: dict[str, Any] = {"lr": 0.02} if name in ("muon", "normuon", "adamuon") else {}
    of_class |= {"class": "torch.optim.RMSprop"} if name == "torch_optimizer" else {}
    return draw(some.just(name) | picked(options_of_rule(name)).map(lambda given: {"name": name, **of_class, **given}))


SECTIONS = {"matrix": section(MATRIX_RULES), "elementwise": section(ELEMENTWISE_RULES)}
GLOBS = some.sampled_from(["*", "up.*", ["out.*", "conv.*"], "none", "[", ""])
DIVISIONS = ["whole", "stack", "flatten", {"heads": 3}, {"qkv": [6, 6, 6], "groups": 1}, {"heads": 0}]
OVERRIDES = some.lists(some.fixed_dictionaries({"params": GLOBS}, optional=SECTIONS), max_size=2)
ATOMS = some.dictionaries(some.sampled_from(["*", "up.weight", "nothing"]), some.sampled_from(DIVISIONS), max_size=2)
ADAMW = picked(options_of_rule("adamw"))
FLAT = {**options_of_rule("muon"), "adamw": ADAMW}  # options outside of sections, as LayerWiseMuon takes them
GROUPS = some.lists(picked(FLAT), min_size=1, max_size=2)  # which become params
IN_PYTHON = {"elementwise_lr": some.floats(0, 1), "momentum": some.floats(0, 0.999), "adamw": ADAMW, "groups": GROUPS}
IN_PYTHON |= {"expert_params": GLOBS, "expert_group_size": some.none() | some.integers(1, 3)}


def given_to(host: Any, **further: some.SearchStrategy[Any]) -> some.SearchStrategy[Any]:
    special = {"atoms": ATOMS, "overrides": OVERRIDES, "include": GLOBS, "exclude": GLOBS, "report": some.just(False)}
    return picked({**options_of(options_in(host)), **special, **further})


BY_SECTIONS = {**SECTIONS, "lr": some.floats(0, 1), "weight_decay": some.floats(0, 1)}
TO_DEEPSPEED = given_to(ZeROConfig, **FLAT) | given_to(ZeROConfig, **BY_SECTIONS)
TYPES = some.sampled_from(["LayerWise", "LayerWiseMuon"])
GIVEN = {
    "plain PyTorch": given_to(PlainConfig, **BY_SECTIONS, **IN_PYTHON),
    "FSDP2": given_to(FSDP2Config, **BY_SECTIONS, **IN_PYTHON),
    "DeepSpeed": some.fixed_dictionaries({"type": TYPES, "params": TO_DEEPSPEED, "stage": some.integers(0, 3)}),
}


def too_long(given: Any) -> bool:
    """Whether it may be right but take more time than a test has."""
    if isinstance(given, dict):
        steps = given.get("ns_steps")
        return isinstance(steps, int) and steps > MOST_STEPS or any(map(too_long, given.values()))
    return isinstance(given, (list, tuple)) and any(map(too_long, given))


def drawn(strategy: some.SearchStrategy[Any], number: int) -> list[Any]:
    found: list[Any] = []
    checks = list(hypothesis.HealthCheck)

    @hypothesis.seed(SEED)
    @hypothesis.settings(max_examples=number, database=None, deadline=None, suppress_health_check=checks)
    @hypothesis.given(strategy.filter(lambda given: not too_long(given)))
    def draw(example: Any) -> None:
        found.append(example)

    draw()
    return found[:number]


# What comes of it
def judged(host: str, given: Any) -> tuple[str, str]:
    """How settings end, "refused" or "accepted", and what is wrong with that, if anything."""
    with contextlib.ExitStack() as stack:
        try:
            step = stack.enter_context(HOW[host](copy.deepcopy(given)))
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


def with_rate(given: dict[str, Any]) -> dict[str, Any]:
    """Muon alone has no default rate."""
    return {"report": False, **({} if "matrix" in given else {"lr": 0.02}), **given}


@contextlib.contextmanager
def in_python(model: nn.Module, given: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """A LayerWiseOptimizer; with "groups", every second parameter in a separate one."""
    groups, params = given.pop("groups", None), list(model.parameters())
    if isinstance(groups, list) and groups:
        of_groups = [{"params": params[number :: len(groups)]} for number in range(len(groups))]
        given["params"] = [{**own, **more} if isinstance(more, dict) else more for own, more in zip(of_groups, groups)]
    optimizer = LayerWiseOptimizer(model, **with_rate(given))

    def step() -> None:
        for _ in range(2):
            model(TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()

    yield step


@contextlib.contextmanager
def under_deepspeed(given: dict[str, Any]) -> Iterator[Callable[[], None]]:
    settings = zero.config(given["stage"], rows=1)
    settings["optimizer"] = {"type": given["type"], "params": with_rate(given["params"])}
    with zero.engine_for(settings, Tiny()) as engine:

        def step() -> None:
            engine.backward(engine(TOKENS))
            engine.step()

        yield step


HOW: dict[str, Callable[[Any], contextlib.AbstractContextManager[Callable[[], None]]]] = {
    "plain PyTorch": lambda given: in_python(Tiny(), given),
    "FSDP2": lambda given: in_python(fully_shard(Tiny(), mesh=fsdp2.mesh_of()), given),
    "DeepSpeed": under_deepspeed,
}


@pytest.mark.parametrize("host", GIVEN)
def test_settings_of_a_host_are_refused_by_name_or_train(ranks: RankPool, host: str) -> None:
    examples, endings = drawn(GIVEN[host], count(500)), Counter[str]()
    for at in range(0, len(examples), 10):
        part = examples[at : at + 10]
        for given, *found in zip(part, *ranks.run(judged_all, host, part), strict=True):
            endings[found[0][0]] += 1
            assert len({ending for ending, _ in found}) == 1, f"{given}: ranks differ: {found} (seed {SEED})"
            assert not any(wrong for _, wrong in found), f"{given}: {found} (seed {SEED})"
    print(f"{host}: {dict(endings)}, seed {SEED}")


# Commands, with words and files of which some are wrong
WORDS = ["auto", "owned", "zero2", "fsdp2", "float32", "gpt", "h100-8x-ib", "flops", "1", "4", "64", "0", "-1", "2.5"]
WORDS += [
    "nan",
    "inf",
    "1e999",
    str(10**30),
    "",
    " ",
    "=",
    "a=b",
    "matrix=soap",
    "matrix={name: muon, lr: [}",
    "lr=.nan",
]
WORDS += ["cluster.yaml", "shapes.json", "config.json", "megatron", "nothing/there", ".", "/", "ä", "*", "[", "dcp"]
CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
CONFIG |= {"vocab_size": 11, "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}
FILES = {"config.json": CONFIG, "shapes.json": [["a.weight", [4, 3]], ["b.weight", [8, 4]]]}
FILES |= {"cluster.yaml": dataclasses.asdict(CLUSTERS["h100-8x-ib"])}
OPTIONS_OF = {name: list(each.params) for name, each in typer.main.get_command(app).commands.items()}
PLAN = ["plan", "--json", "--world-size", "4"]
FITS = [[*PLAN, "--hf", "config.json"], [*PLAN, "--shapes", "shapes.json", "--cluster", "cluster.yaml"]]
FITS += [["rules"], ["rules", "muon"], ["inspect", "megatron"], ["diff", "megatron", "megatron"]]
FITS += [["convert", "megatron", "to", "--to", target] for target in ("dcp", "universal", "safetensors")]


@some.composite
def command(draw: Any) -> dict[str, Any]:
    files, fit = dict(FILES), draw(some.sampled_from(FITS))
    if draw(some.booleans()):
        harmed = draw(some.sampled_from(sorted(FILES)))
        files[harmed] = draw(altered(FILES[harmed]))
    words = fit[:1] + [draw(some.sampled_from(WORDS)) if draw(some.integers(0, 11)) == 5 else word for word in fit[1:]]
    for option in draw(some.lists(some.sampled_from(OPTIONS_OF[fit[0]]), max_size=3)):
        if option.param_type_name == "option" and "--help" not in option.opts:
            words += [option.opts[-1]] + ([] if option.is_flag else [draw(some.sampled_from(WORDS))])
    return {"words": words, "files": files}


@some.composite
def altered(draw: Any, value: Any) -> Any:
    """The value, with anything in place of it or of something in it."""
    if isinstance(value, (dict, list)) and value and draw(some.integers(0, 5)):
        items = copy.copy(value)
        at = draw(some.sampled_from(sorted(items) if isinstance(items, dict) else range(len(items))))
        items[at] = draw(altered(items[at]))
        return items
    return draw(anything)


def misfit(folder: Path, given: dict[str, Any]) -> str:
    for name, value in given["files"].items():
        (folder / name).write_text(json.dumps(value))
    shutil.rmtree(folder / "to", ignore_errors=True)
    run = hostile.ended(*given["words"])
    if isinstance(run, str):
        return run
    return in_raw_words(run.err) if run.code == 2 else hostile.wrong_in(run)


def test_commands_say_in_words_what_is_wrong_or_go_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_dist(tmp_path / "megatron")
    monkeypatch.chdir(tmp_path)
    signal.signal(signal.SIGPROF, hostile.too_long)
    for given in drawn(command(), count(500)):
        assert not (wrong := misfit(tmp_path, given)), f"{given}: {wrong} (seed {SEED})"
