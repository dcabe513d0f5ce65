"""The command ``lwopt``, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lwopt_backend.atom_settings import Division
from lwopt_backend.checkpoint import choices, names
from lwopt_backend.cli.app import app, main
from lwopt_backend.cli.docstrings import argument_meanings, meanings_in
from lwopt_backend.config import FSDP2Config, OwnedConfig, ZeROConfig
from lwopt_backend.plan.cost import max_min_squared

LAYER = [["q", [256, 256]], ["o", [256, 256]], ["up", [1024, 256]], ["down", [256, 1024]]]


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps([[f"layers.{i}.{name}", shape] for i in range(6) for name, shape in LAYER]))
    return path


def run(*arguments: object) -> str:
    """What ``lwopt`` prints to standard output; it must succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def plan(shapes: Path, *arguments: object) -> dict:
    return json.loads(run("plan", "--shapes", shapes, "--json", *arguments))


def command(*arguments: object, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    code = "from lwopt_backend.cli import main; main()"
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, env=environment)


def test_json_holds_the_plan_and_nothing_else_is_printed(shapes: Path) -> None:
    found = plan(shapes, "--world-size", 8, "--layout", "padded", "--bucket-mb", 1e6)
    names = [f"layers.{i}.{name}" for i in range(6) for name, _ in LAYER]
    assert found["matrices"] == names
    assert found["buckets"] == 1 and found["group_size"] == 8 and len(found["owners"]) == 24
    loads, numels = [0] * 8, [0] * 8
    for owner, (_, (rows, columns)) in zip(found["owners"], LAYER * 6):
        loads[owner] += max_min_squared((rows, columns))
        numels[owner] += rows * columns
    assert found["cost_imbalance"] == round(max(loads) * 8 / sum(loads), 4)
    assert found["numel_imbalance"] == round(max(numels) * 8 / sum(numels), 4)
    assert found["buffer_numel"] == 8 * max(numels)
    assert found["padding_pct"] == round(100 * (8 * max(numels) / sum(numels) - 1), 2)
    assert found["seconds"] > 0 and found["flops_imbalance"] >= 1


HELP = """
import contextlib, io, json, sys
import typer
from lwopt_backend.cli.app import app, main

found = {}
for name in ["", *typer.main.get_command(app).commands]:
    sys.argv = ["lwopt", *name.split(), "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    found[name] = (printed.getvalue(), sorted({module.partition(".")[0] for module in sys.modules}))
print(json.dumps(found))
"""
HEAVY = {"torch", "numpy", "transformers", "accelerate", "deepspeed", "matplotlib", "pytorch_optimizer", "yaml"}


def test_help_of_every_command_imports_nothing_that_is_slow() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = json.loads(done.stdout)
    assert {"", "plan", "simulate", "calibrate", "rules", "convert", "inspect", "diff"} <= set(pages)
    for name, (page, modules) in pages.items():
        assert f"Usage: lwopt {name}".rstrip() in page
        assert not HEAVY & set(modules), (name, HEAVY & set(modules))
        assert not name or f"│ {name} " in pages[""][0], pages[""][0]


def test_help_names_the_families_whose_maps_there_are() -> None:
    assert tuple(names.FAMILIES) == choices.FAMILIES


def test_the_same_plan_whatever_the_hash_seed(shapes: Path) -> None:
    outputs = set()
    for seed in ("0", "1", "4242"):
        environment = {"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"}
        done = command("plan", "--shapes", shapes, "--world-size", 16, "--json", environment=environment)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_bucket_mb_gives_finer_buckets(shapes: Path) -> None:
    sizes = [plan(shapes, "--world-size", 2, "--layout", "padded", "--bucket-mb", n)["buckets"] for n in (1e6, 0.1)]
    assert sizes[0] == 1 and sizes[1] > 3


@pytest.mark.parametrize("engine", ["owned", "zero1", "zero2", "zero3", "fsdp2"])
def test_every_engine_can_be_planned_for(shapes: Path, engine: str) -> None:
    found = plan(shapes, "--world-size", 4, "--engine", engine)
    assert found["engine"] == engine
    assert {c["what"] for c in found["parts"][0]["collectives"]}
    assert len(found["memory_per_rank"]) == 4 and found["peak_bytes"] > 0


@pytest.mark.parametrize("engine", ["zero3", "fsdp2", "owned"])
def test_listed_experts_in_a_stack_are_planned_as_they_are_trained(tmp_path: Path, engine: str) -> None:
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps([["layers.0.experts.up", [4, 64, 32]], ["layers.0.q", [64, 64]]]))
    printed = run("plan", "--shapes", listed, "--world-size", 2, "--engine", engine, "--no-what-if")
    assert "Plan of the dense matrices: 5," in printed and "4 stacked experts" in printed


@pytest.mark.parametrize("cost", ["newton_schulz", "gram", "batched", "soap", "shampoo", "max_min_squared"])
def test_every_cost_can_be_planned_for(shapes: Path, cost: str) -> None:
    found = plan(shapes, "--world-size", 5, "--cost", cost, "--layout", "compact")
    assert found["cost"] == cost and 1 <= found["flops_imbalance"] < 1.3


def test_a_small_model_on_many_ranks_is_owned_by_groups(shapes: Path) -> None:
    whole = plan(shapes, "--world-size", 512, "--layout", "padded", "--group-size", 512)
    found = plan(shapes, "--world-size", 512, "--layout", "padded")
    assert whole["padding_pct"] > 1000
    assert found["group_size"] < 512 and found["padding_pct"] < 100
    assert found["peak_bytes"] <= whole["peak_bytes"] and found["seconds"] < whole["seconds"]


def test_the_printed_plan(shapes: Path) -> None:
    printed = run("plan", "--shapes", shapes, "--world-size", 4, "--layout", "padded")
    for expected in (
        "24 of 24 trained parameters are matrices",
        "layers.*.up",
        "Plan of the dense matrices: 24, owned by all 4 ranks; padded layout",
        "reduce-scatter of gradients",
        "chosen: padded, groups of 4",
        "Megatron compact",
        "Modelled step",
    ):
        assert expected in printed, expected


def test_names_with_brackets_are_printed_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # where the help is not wrapped
    odd = tmp_path / "odd[red].json"
    odd.write_text(json.dumps([["layers.0.w[bold]", [64, 64]], ["layers.1.w[/red]", [64, 64]]]))
    printed = run("plan", "--shapes", odd, "--world-size", 2)
    assert "odd[red].json" in printed and "w[bold]" in printed and "w[/red]" in printed
    assert '[["name", [rows, columns]], ...]' in " ".join(run("plan", "--help").split())


def test_a_plan_that_does_not_fit_says_so(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    large.write_text(json.dumps([[f"layers.{i}.w", [32768, 32768]] for i in range(24)]))
    printed = run("plan", "--shapes", large, "--world-size", 8, "--no-what-if")
    assert "Does not fit: the fullest rank holds" in printed
    assert "Does not fit" not in run("plan", "--shapes", large, "--world-size", 8, "--no-what-if", "--engine", "fsdp2")


def test_experts_and_stages(tmp_path: Path) -> None:
    moe = tmp_path / "moe.json"
    layer = [["attn.o", [512, 512]], *([f"moe.experts.{e}.{w}", [256, 512]] for e in range(8) for w in ("up", "down"))]
    moe.write_text(json.dumps([[f"layers.{i}.{name}", shape] for i in range(4) for name, shape in layer]))
    found = plan(moe, "--world-size", 32, "--pp", 2, "--ep", 8, "--layout", "padded")
    assert [(part["name"], part["ranks"]) for part in found["parts"]] == [("dense", 16), ("experts", 2)]
    assert len(found["stages"]) == 2 and found["stages"][0]["padding_pct"]["experts"] == 0
    printed = run("plan", "--shapes", moe, "--world-size", 32, "--pp", 2, "--ep", 8, "--layout", "padded")
    assert "the one that takes longest of 2" in printed and "Plan of the experts matrices" in printed


def test_report_and_picture_are_written(shapes: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    html, png = tmp_path / "report.html", tmp_path / "plan.png"
    run("plan", "--shapes", shapes, "--world-size", 8, "--html", html, "--png", png)
    assert "<svg" in html.read_text() and "</html>" in html.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_model_from_its_configuration(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    transformers.LlamaConfig(architectures=["LlamaForCausalLM"], num_attention_heads=4, **sizes).save_pretrained(
        tmp_path
    )
    printed = run("plan", "--hf", tmp_path, "--world-size", 2, "--engine", "zero2")
    assert "14 of 21 trained parameters are matrices" in printed and "output head" in printed
    excluded = run("plan", "--hf", tmp_path, "--world-size", 2, "--exclude", "*.q_proj.*")
    assert "12 of 21 trained parameters are matrices" in excluded


def test_calibrate_and_plan_by_what_was_measured(shapes: Path, tmp_path: Path) -> None:
    table = tmp_path / "cost.json"
    printed = run("calibrate", "--shapes", shapes, "--dtype", "float32", "--output", table)
    assert "measurements on" in printed
    measured = {
        (e["rows"], e["columns"]): e["seconds"] for e in json.loads(table.read_text())["entries"] if e["batch"] == 1
    }
    assert set(measured) >= {(256, 256), (256, 1024)}
    found = plan(shapes, "--world-size", 4, "--cost", table, "--layout", "compact")
    seconds = [0.0] * 4
    for owner, (_, (rows, columns)) in zip(found["owners"], LAYER * 6):
        seconds[owner] += measured[min(rows, columns), max(rows, columns)]
    assert found["seconds_parts"]["compute"] == pytest.approx(max(seconds), rel=1e-5)


def test_simulate_prints_every_system(shapes: Path, tmp_path: Path) -> None:
    figures = json.loads(run("simulate", "--shapes", shapes, "--world-sizes", "8,64", "--json"))
    systems = {
        "ours",
        "Megatron padded",
        "Megatron compact",
        "DeepSpeed Muon ZeRO-1",
        "DeepSpeed Muon ZeRO-2",
        "replicated",
    }
    assert {figure["system"] for figure in figures} == systems and len(figures) == 12
    assert next(f for f in figures if f["system"] == "replicated" and f["ranks"] == 64)["work_ratio"] == 64
    printed = run("simulate", "--shapes", shapes, "--world-sizes", "8", "--layout", "compact")
    assert all(system in printed for system in systems)
    pytest.importorskip("matplotlib")
    run("simulate", "--shapes", shapes, "--world-sizes", "8,16", "--png", tmp_path / "systems.png")
    assert (tmp_path / "systems.png").read_bytes().startswith(b"\x89PNG")


WRONG: list[tuple[Sequence[object], str]] = [
    (["--world-size", 8], "give one of --hf, --checkpoint and --shapes; found none"),
    (["--shapes", "S", "--hf", "x", "--world-size", 8], "found --hf and --shapes"),
    (["--shapes", "missing.json", "--world-size", 8], "missing.json"),
    (["--shapes", "S", "--world-size", 8, "--cost", "newton_shulz"], "did you mean 'newton_schulz'?"),
    (["--shapes", "S", "--world-size", 8, "--cluster", "h100-8x"], "did you mean 'h100-8x-ib'?"),
    (["--shapes", "S", "--world-size", 8, "--group-size", 3], "group size 3 does not divide the 8"),
    (["--shapes", "S", "--world-size", 8, "--group-size", "x"], "--group-size: expected a number of ranks or 'auto'"),
    (["--shapes", "S", "--world-size", 8, "--engine", "zero2", "--layout", "padded"], "--layout is for engine 'owned'"),
    (
        ["--shapes", "S", "--world-size", 8, "--engine", "fsdp2", "--group-size", 4],
        "--group-size is for engine 'owned'",
    ),
    (
        ["--shapes", "S", "--world-size", 8, "--bucket-numel", 400],
        "--bucket-numel is for engine 'zero1' and 'zero2' and",
    ),
    (["--shapes", "S", "--world-size", 8, "--option", "layot=padded"], "unknown key 'layot'; did you mean 'layout'?"),
    (["--shapes", "S", "--world-size", 8, "--option", "layout"], "--option 'layout': expected KEY=VALUE, such as"),
    (["--shapes", "S", "--world-size", 8, "--layout", "padded", "--option", "layout=auto"], "'layout' is given twice"),
    (["--shapes", "S", "--world-size", 8, "--option", "atoms={'nothing': 'whole'}"], "'nothing' matches no parameter"),
    (["--shapes", "S", "--world-size", 9, "--pp", 2], "world_size 9 is not a multiple of tp x pp = 1 x 2"),
    (["--shapes", "S", "--world-size", 8, "--include", "*"], "--include and --exclude choose among a model's"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_a_wrong_option_is_one_line_and_exit_code_two(
    shapes: Path,
    arguments: Sequence[object],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [str(shapes) if word == "S" else str(word) for word in arguments]
    monkeypatch.setattr(sys, "argv", ["lwopt", "plan", *words])
    with pytest.raises(SystemExit) as exit:
        main()
    captured = capsys.readouterr()
    assert exit.value.code == 2
    assert message in captured.err and captured.out == "" and "Traceback" not in captured.err


def test_an_unknown_option_names_the_nearest(shapes: Path) -> None:
    done = command("plan", "--shapes", shapes, "--world-sizee", 8)
    assert done.returncode == 2 and "--world-size" in done.stderr and "Traceback" not in done.stderr


# lwopt rules


def test_every_option_of_every_rule_has_a_default_a_meaning_and_a_source() -> None:
    rules = {(rule["name"], rule["for"]): rule for rule in json.loads(run("rules", "--json"))["rules"]}
    for (name, _), rule in rules.items():
        assert rule["source"] and (rule["options"] or "expected 'class'" in rule["note"]), name
        for option in rule["options"]:
            assert all(option[key] for key in ("name", "default", "meaning", "source")), (name, option)
            assert "of the class" not in option["meaning"], (name, option)
    momentum = next(o for o in rules["muon", "matrices"]["options"] if o["name"] == "momentum")
    assert (momentum["default"], momentum["source"]) == ("0.95", "torch.optim.Muon")
    assert "second_moment (rows x 1) at the owner" in rules["normuon", "matrices"]["state"]
    assert {name for name, kind in rules if kind == "everything else"} >= {"adamw", "lion", "sgd", "torch_optimizer"}
    every = {("soap", "matrices"), ("shampoo", "matrices"), ("lion", "everything else"), ("sgd", "everything else")}
    assert all(rules[key]["options"] for key in every)
    precondition = next(o for o in rules["soap", "matrices"]["options"] if o["name"] == "precondition_frequency")
    assert precondition["meaning"] == "Number of steps between eigenbasis updates."


def test_every_option_of_every_host_is_listed_with_a_default_a_meaning_and_a_source() -> None:
    listed = json.loads(run("rules", "--json"))
    hosts = {host["name"]: {option["name"]: option for option in host["options"]} for host in listed["hosts"]}
    sections = {"matrix", "elementwise", "overrides"}
    models = {"DeepSpeed": ZeROConfig, "FSDP2": FSDP2Config, "plain PyTorch": OwnedConfig}
    assert {name: set(options) for name, options in hosts.items()} == {
        name: sections | set(model.model_fields) for name, model in models.items()
    }
    for options in (*(host["options"] for host in listed["hosts"]), listed["atoms"]):
        for option in options:
            assert all(option[key] for key in ("name", "default", "meaning", "source")), option
            assert "of the class" not in option["meaning"], option
    assert hosts["DeepSpeed"]["bucket_numel"]["default"] == "16777216"
    assert hosts["FSDP2"]["elementwise"]["default"] == '"adamw"'
    assert {option["name"] for option in listed["atoms"]} == set(Division.model_fields)


def test_the_tables_of_the_hosts_come_after_the_rules() -> None:
    lines = [line.strip() for line in run("rules").splitlines()]
    titles = [f"on {host}, for the whole optimizer" for host in ("DeepSpeed", "FSDP2", "plain PyTorch")]
    places = [lines.index(title) for title in ("sgd, for everything else", *titles, "a division in atoms")]
    assert places == sorted(places)
    for place, option in zip(places[1:], ("ns_device", "state_dtype", "bus_alignment", "split_sizes")):
        assert any(line.startswith(f"│ {option} ") for line in lines[place:]), option


def test_a_rule_by_name_and_the_arguments_of_a_class() -> None:
    text = run("rules", "muon")
    assert "ns_coefficients" in text and "adamuon" not in text and "FSDP2" not in text
    listed = json.loads(run("rules", "torch_optimizer", "--class", "torch.optim.RMSprop", "--json"))
    (rule,) = listed["rules"]
    meanings = {option["name"]: option["meaning"] for option in rule["options"]}
    assert meanings["alpha"] == "smoothing constant" and "path" in meanings["class"] and "centered" in meanings
    assert listed["hosts"] == listed["atoms"] == []


class Demanding(torch.optim.SGD):
    """It has an argument without a default.

    Args:
        momentum: share of the past
    """

    def __init__(self, params: Any, momentum: float, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, momentum=momentum)


def test_a_class_with_an_argument_that_must_be_given_is_described() -> None:
    (rule,) = json.loads(run("rules", "torch_optimizer", "--class", "tests.test_cli.Demanding", "--json"))["rules"]
    options = {option["name"]: (option["default"], option["meaning"]) for option in rule["options"]}
    assert options["momentum"] == ("required", "share of the past") and options["lr"] == ("0.1", "learning rate")


def test_a_class_that_only_matrices_may_have_says_why_not_for_the_rest() -> None:
    rules = json.loads(run("rules", "--class", "pytorch_optimizer.Lamb", "--json"))["rules"]
    of = {rule["for"]: rule for rule in rules if rule["name"] == "torch_optimizer"}
    assert of["matrices"]["options"] and not of["matrices"]["note"]
    assert "pytorch_optimizer.Lamb is not element-wise" in of["everything else"]["note"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("muon", "--class", "torch.optim.SGD"), "--class is for 'torch_optimizer'; the options of 'muon' are known"),
        (("--class", "torch.optim.Adm"), "torch.optim has no 'Adm'; did you mean 'Adam'?"),
    ],
    ids=["a rule with options of its own", "no such class"],
)
def test_a_wrong_class_is_one_line(words: tuple[str, ...], message: str) -> None:
    found = command("rules", *words)
    assert found.returncode == 2 and message in found.stderr and "Traceback" not in found.stderr


GOOGLE = """Short.

Args:
    params (iterable): what to train
    lr (float, Tensor, optional): learning rate (default: 1e-3)
    betas (Tuple[float, float], optional): of the averages
        of gradients. (default: (0.9, 0.999))
    centered (bool, optional) : if ``True``, see :ref:`this <that>`_ and `None`.
    *rest: others
        note: this is no argument
    silent:

Returns:
    loss: no argument either
"""
REST = """Short.

:param params: PARAMETERS. what to train.
:param lr: float. learning rate.
:param float eps: added
    to the root.
:returns: nothing
:type lr: float
"""


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        (
            GOOGLE,
            {
                "params": "what to train",
                "lr": "learning rate",
                "betas": "of the averages of gradients.",
                "centered": "if True, see this and None.",
                "rest": "others note: this is no argument",
            },
        ),
        (REST, {"params": "PARAMETERS. what to train.", "lr": "float. learning rate.", "eps": "added to the root."}),
        ("lr: no section, so no argument", {}),
        ("", {}),
    ],
    ids=["Google", "ReST", "neither", "empty"],
)
def test_docstrings_are_read_in_both_styles(docstring: str, expected: dict[str, str]) -> None:
    assert meanings_in(docstring) == expected
    indented = "\n".join(f"    {line}" if line else line for line in docstring.splitlines()).lstrip()
    assert meanings_in(indented) == expected, "as it is written in a class"


def test_the_nearest_class_has_the_word_and_its_bases_the_rest() -> None:
    class Base:
        """:param lr: the base's.

        :param eps: the base's.
        """

        def __init__(self) -> None:
            """Args:
                momentum: of the constructor

            Returns:
                nothing: no argument
            """

    class Derived(Base):
        """:param lr: its own."""

        def __init__(self) -> None:
            """Args:
            dampening: of its constructor
            """

    assert argument_meanings(Derived) == {
        "lr": "its own.",
        "eps": "the base's.",
        "momentum": "of the constructor",
        "dampening": "of its constructor",
    }


def test_a_module_that_registers_a_rule_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "my_rules.py").write_text(
        "from dataclasses import dataclass\nfrom lwopt_backend import MatrixRule, register_rule\n"
        "@dataclass\nclass Mine(MatrixRule):\n    lr: float = 0.5\n"
        "register_rule('mine', Mine)\n"
    )
    code = "from lwopt_backend.cli import main; main()"
    words = [sys.executable, "-c", code, "rules", "mine", "--import", "my_rules"]
    found = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert found.returncode == 0 and "0.5" in found.stdout, found.stderr


def test_an_unknown_rule_is_one_line_that_names_the_nearest() -> None:
    found = command("rules", "moun")
    assert found.returncode == 2 and "unknown rule 'moun'; did you mean 'muon'?" in found.stderr
