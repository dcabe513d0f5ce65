"""The command ``lwopt``, called as a user calls it: plans and their pictures, rules, and wrong arguments."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib
import pytest
import torch
from click.testing import CliRunner

from lwopt_backend.checkpoint import formats, names
from lwopt_backend.cli.tables import recording
from lwopt_backend.config.atoms import Division
from lwopt_backend.config.hosts import FSDP2Config, PlainConfig, ZeROConfig
from lwopt_backend.config.options import options_in
from lwopt_backend.engines import output
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, MATRIX_RULES
from lwopt_backend.plan.cost import max_min_squared
from lwopt_backend.planner import picture
from tests.support.command_line import SAMPLES, commands, refused

LAYER = [["q", [256, 256]], ["o", [256, 256]], ["up", [1024, 256]], ["down", [256, 1024]]]


def written(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    return written(tmp_path / "shapes.json", [[f"layers.{i}.{name}", shape] for i in range(6) for name, shape in LAYER])


def run(*arguments: object) -> str:
    result = CliRunner().invoke(commands(), [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def plan(shapes: Path, *arguments: object) -> dict[str, Any]:
    return json.loads(run("plan", "--shapes", shapes, "--json", *arguments))


def test_plan_json_holds_the_plan_and_nothing_else_is_printed(shapes: Path) -> None:
    found = plan(shapes, "--world-size", 8, "--layout", "padded", "--bucket-mb", 1e6, "--assignments")
    matrices = {f"layers.{i}.{name}": shape for i in range(6) for name, shape in LAYER}
    assert sorted(name for name, _, _ in found["assignments"]) == sorted(matrices)
    assert found["buckets"] == 1 and found["group_size"] == 8 and {of[2] for of in found["assignments"]} == {0}
    loads, numels = [0] * 8, [0] * 8
    for name, owner, _ in found["assignments"]:
        rows, columns = matrices[name]
        loads[owner] += max_min_squared((rows, columns))
        numels[owner] += rows * columns
    assert found["cost_imbalance"] == round(max(loads) * 8 / sum(loads), 4)
    assert found["numel_imbalance"] == round(max(numels) * 8 / sum(numels), 4)
    assert found["buffer_numel"] == 8 * max(numels)
    assert found["padding_pct"] == round(100 * (8 * max(numels) / sum(numels) - 1), 2)
    assert found["seconds"] == pytest.approx(sum(found["seconds_parts"].values())) and found["flops_imbalance"] >= 1
    assert {kind["kind"]: kind["parameters"] for kind in found["routing"]} == {"matrix": 24}
    assert plan(shapes, "--world-size", 2, "--layout", "padded", "--bucket-mb", 0.1)["buckets"] > 3
    for rule in ("muon", "soap"):
        found = plan(shapes, "--world-size", 5, "--option", f"matrix={rule}", "--layout", "compact")
        assert 1 <= found["flops_imbalance"] < 1.3


# Imports of each command's help, in this order, and of inspect; and a plan and its report, under another hash seed.
ALONE = """
import contextlib, io, json, sys
import typer
from lwopt_backend.cli import app, main

def call(*words):
    sys.argv = ["lwopt", *words]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main()
    return printed.getvalue()

pages = {}
for name in ["", *typer.main.get_command(app).commands]:
    page = call(*name.split(), "--help")
    pages[name] = (page, sorted({module.partition(".")[0] for module in sys.modules}))
call("inspect", MEGATRON)
read = sorted(sys.modules)
planned = call("plan", "--shapes", "shapes.json", "--world-size", "16", "--json", "--html", "alone.html")
print(json.dumps([pages, read, planned, "matplotlib.pyplot" in sys.modules]))
"""
OF_TRAINING = ("routing.routing", "groups.registry", "engines.report", "engines.base")  # which import routing or rules
HEAVY = {"torch", "numpy", "transformers", "accelerate", "deepspeed", "matplotlib", "pytorch_optimizer", "yaml"}


def test_help_imports_nothing_that_is_slow(shapes: Path) -> None:
    """Plans are the same in every process. A command on checkpoints imports nothing that only training needs."""
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    options: dict[str, Any] = {"cwd": shapes.parent, "env": environment, "capture_output": True, "text": True}
    code = ALONE.replace("MEGATRON", repr(str(SAMPLES / "t16_lw_muon_dp2_torchdist")))
    done = subprocess.run([sys.executable, "-c", code], **options)
    assert done.returncode == 0, done.stderr
    pages, read, planned, with_pyplot = json.loads(done.stdout)
    assert "lwopt_backend.checkpoint.megatron.torch_dist" in read
    assert not {f"lwopt_backend.{module}" for module in OF_TRAINING} & {*read}
    assert {"", "plan", "rules", "convert", "inspect", "diff"} <= {*pages}
    for name, (page, modules) in pages.items():
        assert f"Usage: lwopt {name}".rstrip() in page
        assert not HEAVY & set(modules), (name, HEAVY & set(modules))
        assert not name or f"│ {name} " in pages[""][0], pages[""][0]
    html, png = shapes.with_name("here.html"), shapes.with_name("here.png")
    here = run("plan", "--shapes", shapes, "--world-size", 16, "--json", "--html", html, "--png", png)
    assert planned == here and not with_pyplot and png.read_bytes().startswith(b"\x89PNG")
    report = html.read_text()
    assert shapes.with_name("alone.html").read_text() == report and "data:image/png;base64," in report
    for said in ("24 of 24 trained parameters are matrices", "Per rank", "Per step", "equal plans have"):
        assert said in report
    assert tuple(names.FAMILIES) == formats.FAMILIES, "the help names the families whose maps there are"


@pytest.fixture
def models(shapes: Path, tmp_path: Path) -> dict[str, Path]:
    layer = [["attn.o", [512, 512]], *([f"moe.experts.{e}.{w}", [256, 512]] for e in range(8) for w in ("up", "down"))]
    made = {
        "stack": [["layers.0.experts.up", [4, 64, 32]], ["layers.0.q", [64, 64]]],
        "odd[red]": [["layers.0.w[bold]", [64, 64]], ["layers.1.w[/red]", [64, 64]]],
        "large": [[f"layers.{i}.w", [32768, 32768]] for i in range(30)],
        "experts": [[f"layers.{i}.{name}", shape] for i in range(4) for name, shape in layer],
        "separate": [[f"layers.0.experts.{i}.up", [16, 16]] for i in range(1024)],
        "wide": [[f"layers.{i}.up", [16384, 4096]] for i in range(8)],
    }
    return {"shapes": shapes, **{name: written(tmp_path / f"{name}.json", content) for name, content in made.items()}}


EXPERTS = ("--world-size", 32, "--pp", 2, "--ep", 8, "--layout", "padded")
ALONE_ON_8 = ("--world-size", 8)
PRINTED: list[tuple[str, tuple[object, ...], list[str]]] = [
    (
        *("shapes", ("--world-size", 4, "--layout", "padded")),
        ["24 of 24 trained parameters are matrices", "layers.*.up", "reduce-scatter of gradients", "Modelled step"]
        + ["Plan of the dense matrices: 24, owned by all 4 ranks; padded layout"],
    ),
    ("odd[red]", ("--world-size", 2), ["odd[red].json", "w[bold]", "w[/red]"]),
    ("large", ALONE_ON_8, ["Does not fit: the fullest rank holds"]),
    ("experts", EXPERTS, ["the slowest of 2", "Plan of the experts matrices"]),
    ("shapes", ("--help",), ['[["name", [rows, columns]], ...]']),
    *(
        ("stack", ("--world-size", 2, "--engine", engine), ["dense matrices: 5,", "4 stacked experts"])
        for engine in ("plain", "zero1", "zero2", "zero3", "fsdp2")
    ),
]


def test_the_printed_plan(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # where nothing is wrapped
    for model, words, expected in PRINTED:
        printed = " ".join(run("plan", "--shapes", models[model], *words).split())
        assert all(text in printed for text in expected), (expected, printed)
    on_fsdp2 = ("plan", "--shapes", models["large"], *ALONE_ON_8, "--engine", "fsdp2")
    assert "Does not fit" not in run(*on_fsdp2) and "Does not fit" in run(*on_fsdp2, "--option", "bucket_matrices=30")
    on_more_ranks = run("plan", "--shapes", models["stack"], "--world-size", 8, "--engine", "fsdp2")
    assert "Stacks: 4 matrices" in on_more_ranks and "over 8 ranks, so 50% of these store none" in on_more_ranks
    assert "--stack-dim 1" in on_more_ranks
    for name, engine, expected in (("stack", "zero3", "--engine fsdp2"), ("shapes", "fsdp2", "stacked matrices")):
        words = ("plan", "--shapes", models[name], "--world-size", 8, "--engine", engine, "--stack-dim", 1)
        assert f"--stack-dim: expected {expected}, found" in refused(*words)
    assert "Stacks" not in run(
        "plan", "--shapes", models["stack"], "--world-size", 8, "--engine", "fsdp2", "--stack-dim", 1
    )
    separate = ("plan", "--shapes", models["separate"], "--world-size", 8, "--engine")
    assert "Separate: each rank stores pieces of 1024 matrices" in run(*separate, "fsdp2")
    assert "Separate" not in run(*separate, "zero3")
    wide = ("plan", "--shapes", models["wide"], "--world-size", 8, "--engine", "zero1")
    # Gram: 8 ssl + 28 sss flops, standard: 20 ssl + 10 sss, of which l = 4 s makes 60 and 90.
    assert "with 0.67 of the flops of Newton-Schulz; it differs from" in " ".join(run(*wide).split())
    for options in ("matrix={name: muon, ns_method: gram}", "matrix=soap"):
        assert "'ns_method'" not in run(*wide, "--option", options)
    assert "'ns_method'" not in run(*separate, "fsdp2"), "where it saves no time"
    found = plan(models["experts"], *EXPERTS)
    assert [(part["name"], part["ranks"]) for part in found["parts"]] == [("dense", 16), ("experts", 2)]
    assert len(found["stages"]) == 2 and found["stages"][0]["padding_pct"]["experts"] == 0


# Pictures
def drawn(axes: Any, number: int) -> list[float]:
    """The heights of one kind of bars, or of the outline that stands for many."""
    if axes.containers:
        return [bar.get_height() for bar in axes.containers[number]]
    values, _, baseline = axes.patches[number].get_data()
    return [float(high - low) for high, low in zip(values, baseline)]


@pytest.mark.parametrize("ranks", [4, 48])
def test_picture_shows_ranks_and_buckets(shapes: Path, ranks: int) -> None:
    """The picture shows work and memory of every rank, and every bucket."""
    data = plan(shapes, "--world-size", ranks, "--layout", "padded", "--bucket-mb", 2)
    work, memory, buckets = picture.draw(data).axes
    loads, per_rank = data["load_per_rank"], data["memory_per_rank"]
    totals = [sum(rank[kind] for kind in picture.MEMORY) for rank in per_rank]
    order = sorted(range(ranks), key=lambda rank: (-loads[rank], -totals[rank], rank))
    most = 1e3 * data["seconds_parts"]["compute"]
    assert drawn(work, 0) == pytest.approx([most * loads[rank] / max(loads) for rank in order])
    kinds = [kind for kind in picture.MEMORY if any(rank[kind] for rank in per_rank)]
    for number, kind in enumerate(kinds):
        assert drawn(memory, number) == pytest.approx([per_rank[rank][kind] / 2**30 for rank in order])
    spans = data["timeline"]
    assert [bar.get_x() for bar in buckets.containers[1]] == pytest.approx([1e3 * each["work"][0] for each in spans])
    assert len(buckets.containers) == 3 and spans[-1]["back"][1] == data["seconds_overlapped"]


def test_html_of_a_picture_escapes_names(shapes: Path) -> None:
    """The page ignores the user's matplotlib settings."""
    hostile = "</title><img src=x onerror=alert(1)> $\\frac{$"
    data = {**plan(shapes, "--world-size", 4, "--engine", "zero2"), "source": hostile}
    console, path, pages = recording(), shapes.with_name("plan.html"), []
    console.print(hostile)
    for settings in ({}, {"axes.facecolor": "red", "font.size": 30}):
        with matplotlib.rc_context(settings):
            picture.write_html(data, console, path)
        pages.append(path.read_text())
    assert pages[0] == pages[1] and pages[0].count("<img") == 1 and "<script" not in pages[0]
    assert "data:image/png;base64," in pages[0] and "&lt;img src=x onerror" in pages[0]


def test_a_picture_is_written_whole_or_the_old_one_stays(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int) -> None:
        os.ftruncate(file, 10)
        raise OSError("no space left on device")

    data, path = plan(shapes, "--world-size", 4), shapes.with_name("plan.png")
    picture.write_png(data, path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        picture.write_png(data, path)
    assert old.startswith(b"\x89PNG") and path.read_bytes() == old and {*path.parent.iterdir()} == {path, shapes}
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    with pytest.raises(ImportError, match="pictures of plans need matplotlib .*pip install matplotlib"):
        picture.write_png(data, path)


WRONG = {
    "plan --world-size 8": "expected one of --hf and --shapes, found none",
    "plan --shapes missing.json --world-size 8": "missing.json",
    "plan --hf meta-llama/Llama-3.1-8B --world-size 8": "hf download meta-llama/Llama-3.1-8B config.json --local-dir",
    "plan --shapes S --world-size 8 --cluster h100-8x": "did you mean 'h100-8x-ib'?",
    "plan --shapes S --world-size 8 --group-size auto": "'--group-size': Input should be a valid integer",
    "plan --shapes S --world-size 8 --engine zero2 --layout padded": "only with engine 'plain', found 'zero2'",
    "plan --shapes S --world-size 8 --engine zero2 --tp 2": "prints its plan. Leave --tp out, or plan it for 'fsdp2'",
    "plan --shapes S --world-size 8 --option layout": "--option 'layout': expected KEY=VALUE, such as",
    "plan --shapes S --world-size 8 --layout padded --option layout=auto": "expected 'layout' once",
    "plan --shapes S --world-size 8 --option a=1 --option b=2": "2 wrong options: unknown key 'a'; known",
    "plan --shapes S --world-size 8 --option muon_lr=1": 'write instead: {"matrix": {"name": "muon", "lr": 1, ',
    "plan --shapes S --world-size 8 --include *": "expected --include and --exclude with a model",
    "plan --shapes S --world-size 8 --engine fsdp2 --option share_copies=true": "copies all of its matrices (HSDP)",
    "plan --shapes S --world-size 0": "Invalid value for '--world-size': ",
    "plan --shapes S --world-size 8 --engine zero9": "Invalid value for '--engine': 'zero9' is not one of 'plain', 'z",
    "plan --shapes S": "Missing option '--world-size'.",
    "rules moun": "unknown rule 'moun'; did you mean 'muon'?",
    "ruls": "No such command 'ruls'.",
}


@pytest.mark.parametrize(("words", "message"), WRONG.items())
def test_a_wrong_word_is_one_line_and_exit_code_two(shapes: Path, words: str, message: str) -> None:
    """Fixed: A wrong word on the command line was a box, and several wrong options were several lines."""
    said = refused(*(shapes if word == "S" else word for word in words.split()))
    assert said.startswith("error: ") and message in said and said.count("\n") == 1, said


def test_every_option_has_a_meaning_and_a_source() -> None:
    """Every option of every rule and host has a default, a meaning and a source."""
    listed = json.loads(run("rules", "--json"))
    rules = {(rule["name"], rule["for"]): rule for rule in listed["rules"]}
    for rule in listed["rules"]:
        assert rule["source"] and (rule["options"] or "expected 'class'" in rule["note"]), rule
    for options in (*(each["options"] for each in (*listed["rules"], *listed["hosts"])), listed["atoms"]):
        for option in options:
            assert all(option[key] for key in ("name", "default", "meaning", "source")), option
    assert "second_moment (rows x 1) at the owner" in rules["normuon", "matrices"]["state"]
    assert {name for name, _ in rules} == {*MATRIX_RULES, *ELEMENTWISE_RULES}
    hosts = {host["name"]: {o["name"]: o["default"] for o in host["options"]} for host in listed["hosts"]}
    models = {"DeepSpeed": ZeROConfig, "FSDP2": FSDP2Config, "plain PyTorch": PlainConfig}
    expected = {name: {"matrix", "elementwise", "overrides", *options_in(model)} for name, model in models.items()}
    assert {name: set(options) for name, options in hosts.items()} == expected
    assert (hosts["DeepSpeed"]["bucket_numel"], hosts["FSDP2"]["elementwise"]) == ("null", '"adamw"')
    assert {option["name"] for option in listed["atoms"]} == set(options_in(Division))
    printed, one = run("rules"), run("rules", "muon")
    for option in ("ns_device", "state_dtype", "keep_full_grads", "split_sizes"):
        assert f"│ {option} " in printed, option
    assert "ns_coefficients" in one and "adamuon" not in one and "FSDP2" not in one


def test_env_prints_versions_devices_the_world_and_a_plan(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "64")
    plan = tmp_path / "plan.json"
    plan.write_text(run("plan", "--shapes", shapes, "--world-size", "4", "--json"))
    printed = run("env", "--plan", plan)
    digest = json.loads(plan.read_text())["digest"]
    for line in (f"torch: {torch.__version__} (supported", "CPU cores: ", "WORLD_SIZE: 64", f"digest: {digest}"):
        assert f"\n  {line}" in printed
    found = json.loads(run("env", "--json"))
    assert (
        found["versions"]["torch"].startswith(f"{torch.__version__} (supported")
        and found["world"]["WORLD_SIZE"] == "64"
    )
    assert run("--version") == f"lwopt-backend {importlib.metadata.version('lwopt-backend')}\n"
    plan.write_text("[]")
    assert "expected the JSON that `lwopt plan --json` wrote" in refused("env", "--plan", plan)


def test_a_module_that_registers_a_rule_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rules.py").write_text(
        "from dataclasses import dataclass\nfrom lwopt_backend import MatrixRule, register_rule\n"
        "@dataclass\nclass Mine(MatrixRule):\n    lr: float = 0.5\n"
        "register_rule('mine', Mine)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with mock.patch.dict(MATRIX_RULES), mock.patch.dict(sys.modules):
        assert "0.5" in run("rules", "mine", "--import", "my_rules")


# Small files that would ask for much
LAUGHS = "\n".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi"))
LLAMA = {"model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "vocab_size": 11, "num_attention_heads": 4}
MOE = {**LLAMA, "model_type": "mixtral", "num_hidden_layers": 2}
FEW: dict[str, tuple[str, str]] = {  # a file's content, and what is said of it
    "layers.hf": (json.dumps({**LLAMA, "num_hidden_layers": 2**31}), "num_hidden_layers: expected at most"),
    "experts.hf": (json.dumps({**MOE, "num_local_experts": 10**7}), "num_local_experts: expected at most"),
    "deep.hf": ("[" * 100_000, "this is not JSON"),
    "huge.shapes": (json.dumps([["a", [2**62, 2**62]]]), "expected at most 2**60 elements"),
    "laughs.cluster": (f"a: &a [x]\n{LAUGHS}", "expected no aliases (*name)"),
    "tag.cluster": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "deep.cluster": ("[" * 3000, "maximum recursion depth exceeded"),
}


@pytest.mark.parametrize("name", FEW)
def test_small_files_that_would_ask_for_much_are_refused(shapes: Path, tmp_path: Path, name: str) -> None:
    (text, said), path, kind = FEW[name], tmp_path / name, name.partition(".")[2]
    path.write_text(text)
    model = ("--shapes", shapes) if kind not in ("hf", "shapes") else ()
    assert said in refused("plan", "--world-size", 4, f"--{kind}", path, *model)


def test_options_and_numbers_that_would_ask_for_much_are_refused(shapes: Path) -> None:
    words = ("plan", "--shapes", shapes, "--world-size")
    assert "maximum recursion depth exceeded" in refused(*words, 4, "--option", f"layout={'[' * 3000}")
    assert "aliases" in refused(*words, 4, "--option", "atoms={a: &a {}, b: *a}")
    assert "65536" in refused(*words, 10**9)


def words(text: str) -> set[str]:
    return {word for word in text.split() if any(map(str.isalnum, word))}


@pytest.mark.parametrize(
    "arguments", ["plan --shapes S --world-size 64", "plan --shapes S --world-size 8", "rules muon"]
)
def test_a_narrow_terminal_gets_every_figure_and_value_whole(
    arguments: str, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 columns had "0.4…" for milliseconds, and "'match_rms_adam…" for a value to write."""
    given, wide = [shapes if word == "S" else word for word in arguments.split()], {}
    for width in (200, 80):
        monkeypatch.setattr(output, "WIDTH_WITHOUT_TERMINAL", width)
        wide[width] = run(*given)
    assert "…" not in wide[80] and max(map(len, wide[80].splitlines())) <= 80
    known = words(wide[200])
    figures = {word for word in known if word[0].isdigit() or word.startswith("'")}
    assert figures and {word for word in figures if word not in wide[80]} == set()
    assert ("ranks: the first, the busiest, the least busy" in wide[80]) == ("64" in arguments)
