"""What the README and the pages in docs/ show is true: scripts run as printed, names and defaults are the code's."""

import ast
import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytorch_optimizer
import torch
import typer
from transformers import Trainer

from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers, run
from lwopt_backend.cli import app
from lwopt_backend.config.atoms import AtomSettings
from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.config.options import options_in
from lwopt_backend.config.versions import VERSIONS
from lwopt_backend.groups.choices import settings_of
from lwopt_backend.groups.registry import ELEMENTWISE_RULES, MATRIX_RULES, AdamW, arguments
from lwopt_backend.plan.cost import CLUSTERS
from lwopt_backend.rules.muon import SCALES, Muon
from lwopt_backend.rules.newton_schulz import table_of
from tests.support.fsdp2 import MODES, SHARDINGS
from tests.support.launcher import ROOT, run_on_ranks, run_script, succeeds, surroundings_kept
from tests.support.migration import PEERS, SETTINGS, entry, rules_for
from tests.support.models import UnevenLM
from tests.support.on_ranks import on_ranks
from tests.support.pages import DOCS, PAGES, blocks, section, table, unpack_page
from tests.support.ranks import RankPool
from tests.support.references import REGISTERED

README, MIGRATION = PAGES["README"], PAGES["migration"]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
FILES = {block.name: block.text for block in blocks("start/quickstart") if "." in block.name}
RUNS = [block.text for block in blocks("start/quickstart", "bash", "run") if block.text.startswith("deepspeed ")]
SAYS_ITS_RANK = "print(f'rank {args.local_rank}\\n', end='')\n"  # in one write, which another rank's cannot cut in two
MOVED = {"owned"}  # pages that only say where they are now
SAYS = {
    "fsdp2_train.py": ("start/quickstart", 2, r"loss [01]\.\d+ after 40 steps", "Routing: 4 of 11 trained parameters"),
    "plain_train.py": ("start/quickstart", 2, r"loss [01]\.\d+ after 40 steps", "Buffers of 2 data-parallel ranks"),
    "modules_train.py": ("modules", 4, r"loss 0\.\d+ after 40 steps, gradient norm \d\.\d+ over both modules", ""),
    "pipeline_train.py": ("modules", 4, r"loss [01]\.\d+ after 20 steps, gradient norm \d\.\d+ over both stages", ""),
    "move_a_run.py": ("checkpoints", 2, r"largest difference after 10 more steps: 0\.0", ""),
}


def test_rates_of_llamas_matrices_are_those_of_the_factors() -> None:
    """AdamW's updates have a size of 0.2, an orthogonal matrix's elements one of 1 / sqrt(longer side)."""
    for name, shape, original, matched, lr in table("rates", "Which rate for Muon", "matrix")[1:]:
        rows, columns = map(int, shape.split(" x "))
        sizes = [
            SCALES[factor](rows, columns) / max(rows, columns) ** 0.5 for factor in ("original", "match_rms_adamw")
        ]
        assert [original, matched] == [f"{size:.3g}" for size in sizes], name
        assert float(lr) == pytest.approx(3e-4 * 0.2 / sizes[0], abs=5e-5), name
        assert 3e-4 * 0.2 / sizes[0] == pytest.approx(0.2 * columns**0.5 * 3e-4)


def named_in(rows: str) -> set[str]:
    return {name for row in re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("command", RUNS, ids=["train.py", "unmodified script"])
def test_deepspeeds_commands_run(request: pytest.FixtureRequest, ranks: RankPool, command: str, tmp_path: Path) -> None:
    """The unmodified script's under the launcher; the other so in `make test-full` only."""
    files, unmodified = dict(FILES), "--module" in command
    if unmodified:  # no line of this package
        plain = FILES["train.py"].replace("from lwopt_backend.integrations import deepspeed_zero\n", "")
        files["train.py"] = plain.replace("deepspeed_zero.register()\n", "") + SAYS_ITS_RANK
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if unmodified or request.config.getoption("full"):
        output = succeeds(command, tmp_path)
    else:
        given = command.partition("train.py ")[2].replace("ds_config.json", str(tmp_path / "ds_config.json")).split()
        codes, output = run_on_ranks(ranks, tmp_path / "train.py", *given, joined=True)
        assert codes == [0, 0], output
    assert re.search(r"loss 0\.\d+ after 40 steps", output) and "4 of 11 trained parameters are matrices" in output
    assert "built successfully" not in output, "no compiler is needed"
    if unmodified:  # the launcher's argument is handed on
        assert "rank 0\n" in output and "rank 1\n" in output


def test_deepspeeds_client_optimizer_runs_as_printed(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(FILES["client.py"])
    codes, output = run_on_ranks(ranks, tmp_path / "client.py", joined=True)
    assert codes == [0, 0] and "2 of 4 trained parameters are matrices" in output, output


@on_ranks(1)
def test_module_runner_hands_on_its_arguments(tmp_path: Path) -> None:
    """The module runner needs a script."""
    script, seen = tmp_path / "seen.py", tmp_path / "seen.json"
    script.write_text(f"import json, sys\njson.dump(sys.argv[1:], open({str(seen)!r}, 'w'))\n")
    none = "expected a script, found only"
    refused = {(): f"{none} []", ("--local_rank=1",): f"{none} ['--local_rank=1']"}
    refused |= {("nowhere.py",): "no such script: nowhere.py"}
    with surroundings_kept():
        run.main(["--local_rank=1", str(script), "--word", "hello"])
        for wrong, message in refused.items():
            with pytest.raises(SystemExit) as ended:
                run.main(list(wrong))
            assert str(ended.value.code).splitlines()[-1] == message
    assert json.loads(seen.read_text()) == ["--local_rank=1", "--word", "hello"]


@on_ranks(1)
def test_module_runner_gives_the_trainer_its_optimizer(tmp_path: Path) -> None:
    """The module runner gives the Trainer its optimizer on FSDP2."""
    (tmp_path / "nothing.py").touch()
    with surroundings_kept(), mock.patch.object(Trainer, "get_optimizer_cls_and_kwargs"):
        run.main(['--optimizer={"lr": "auto", "momentum": 0.9}', str(tmp_path / "nothing.py")])
        assert sys.argv == [str(tmp_path / "nothing.py")]
        its = mock.Mock(fsdp=True, learning_rate=0.03, weight_decay=0.1)
        factory, arguments = Trainer.get_optimizer_cls_and_kwargs(its)
        with pytest.raises(ValueError, match="needs --fsdp; under DeepSpeed"):
            Trainer.get_optimizer_cls_and_kwargs(mock.Mock(fsdp=None))
        with pytest.raises(SystemExit, match="expected an object in JSON, found '..'"):
            run.main(["--optimizer=[]", str(tmp_path / "nothing.py")])
        missing = "is for Hugging Face's Trainer, but transformers is missing: pip install 'transformers"
        with mock.patch.dict(sys.modules, {"transformers": None}), pytest.raises(SystemExit, match=missing):
            run.main(["--optimizer={}", str(tmp_path / "nothing.py")])
    assert factory() is LayerWiseOptimizer and arguments == {"lr": 0.03, "momentum": 0.9, "sharded_later": True}


READS_ITS_OWN_VARIABLES = """
import os, sys
from types import SimpleNamespace
print("imported before:", [name for name in ("huggingface_hub", "torch", "transformers") if name in sys.modules])
for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):  # which would go before HF_HOME
    os.environ.pop(name, None)
os.environ["HF_HOME"] = "/the/scripts"
import huggingface_hub.constants
print("cache:", huggingface_hub.constants.HF_HUB_CACHE)
from transformers import Trainer
factory, arguments = Trainer.get_optimizer_cls_and_kwargs(SimpleNamespace(fsdp=True, learning_rate=0, weight_decay=0))
print(factory().__name__, arguments)
"""


def test_module_runner_imports_transformers_late(tmp_path: Path) -> None:
    """So that HF_HOME and others can be set by the script."""
    (tmp_path / "script.py").write_text(READS_ITS_OWN_VARIABLES)
    printed = succeeds([sys.executable, "-m", "lwopt_backend.run", '--optimizer={"lr": 0.5}', "script.py"], tmp_path)
    assert "imported before: []\ncache: /the/scripts/hub\n" in printed
    assert "LayerWiseOptimizer {'lr': 0.5, 'sharded_later': True}\n" in printed


@pytest.mark.parametrize("name", SAYS)
def test_a_pages_script_runs_as_printed(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path: Path, name: str
) -> None:
    """By the page's command, under torchrun, in `make test-full` only."""
    page, count, expected, also = SAYS[name]
    command = unpack_page(page, name, tmp_path, sys.executable)
    if request.config.getoption("full"):
        output = succeeds(command, tmp_path)
    else:
        assert f"--nproc_per_node {count} " in command
        (script,) = tmp_path.iterdir()
        codes, output = run_on_ranks(rank_pools[count], script, joined=False)
        assert codes == [0] * count, output
    assert re.search(expected, output) and also in output
    printed = " ".join(output.split())
    for shown in blocks("start/what_a_run_prints", "text", name.removesuffix(".py")):
        assert [line for line in shown.text.splitlines() if " ".join(line.split()) not in printed] == []


@pytest.mark.full
def test_the_commands_that_plan_a_cluster_run_as_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    commands = [run.text for run in blocks("planning", "bash", "run")]
    (planned,) = [succeeds(command, tmp_path) for command in commands]
    assert "8 of 8 trained parameters are matrices" in planned
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "plan.png"}


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_links_pictures_and_messages_lead_somewhere() -> None:
    for path in (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "findings" / "README.md"):
        text = path.read_text()
        assert not re.search("^(<{7}|>{7}) ", text, re.MULTILINE), f"{path}: a conflict of a merge"
        for target in re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
            page, _, anchor = target.partition("#")
            if "://" not in target:
                found = path.parent / page if page else path
                assert found.is_file() and (not anchor or anchor in anchors(found)), (path, target)
    for source in ("lwopt_backend", "integrations", "benchmarks", "examples", "scripts", "tests", "findings"):
        for path in (ROOT / source).rglob("*.[ps][yh]"):  # what a message, a comment or a docstring names
            for page, anchor in re.findall(r"\b(docs/[\w/]+\.md)(?:#([\w-]+))?", path.read_text()):
                found = ROOT / page
                assert found.exists() and (not anchor or anchor in anchors(found)), (path, page, anchor)
    for name, page in PAGES.items():
        listed = re.findall(r"^- \[(.*?)\]\(#", page, re.MULTILINE)
        assert not listed or listed == re.findall(r"^## (.*)$", page, re.MULTILINE), f"{name}: headings in its list"


def test_the_pages_on_planning_name_what_there_is() -> None:
    text = PAGES["planning"] + PAGES["cost"]
    options = set(re.findall(r"`(--[a-z-]+)", text))
    commands = list(typer.main.get_command(app).commands.values())  # type: ignore[attr-defined]
    known = {name for command in commands for parameter in command.params for name in parameter.opts}
    assert options - known - {"--markdown", "--png", "--models", "--time", "--against"} == set()
    assert [name for name in CLUSTERS if f"`{name}`" not in text] == []


def test_pages_made_from_declarations_are_what_would_be_made_now() -> None:
    shipped = {name: rule for name, rule in ELEMENTWISE_RULES.items() if rule.source != REGISTERED}
    with mock.patch.dict(ELEMENTWISE_RULES, shipped, clear=True):
        made = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["pages"]()
    parts = {"api.md", "tested.md", "optimizers.md", "options.md"}
    assert {*made} == {"megatron_names.md"} | parts
    for name, text in made.items():
        assert text == (DOCS / name).read_text(), f"{name} is old: python scripts/reference.py"


def test_pictures_are_what_the_package_would_draw_now() -> None:
    made = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))["pictures"]()
    for name, text in made.items():
        assert text == (DOCS / "pictures" / f"{name}.svg").read_text(), f"{name} is old: python scripts/pictures.py"
    shown = set(re.findall(r"\]\((?:\.\./)?pictures/(\w+)\.svg\)", "".join(PAGES.values())))
    assert shown == made.keys() | {"memory"} == {path.stem for path in (DOCS / "pictures").iterdir()}


def test_each_of_megatrons_names_has_a_test_that_exists() -> None:
    rows = runpy.run_path(str(ROOT / "scripts" / "reference.py"))["megatron_names"]()
    named = {tuple(row[3].split("::")) for row in rows}
    files = {file: (ROOT / "tests" / f"{file}.py").read_text() for file, _ in named}
    assert [f"{file}::{test}" for file, test in named if f"\ndef {test}(" not in files[file]] == []
    said = " ".join(row[1] for row in rows)
    flags = ("dist_muon", "--use-distributed-optimizer", "--no-use-layer-wise-param-layout", "MimoOptimizer")
    assert [flag for flag in flags if flag not in said] == []


def test_the_readme_installs_from_the_projects_address() -> None:
    """Which ``[project.urls]`` has, the one place of it; without one, the reader puts in the folder of a clone."""
    address = re.findall(r'^Source = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    installed = f"lwopt-backend[deepspeed] @ git+{address[0]}" if address else "CLONE[deepspeed]"
    assert f'pip install "{installed}"' in README
    assert ("`CLONE` is the folder of your clone" in README) == (not address)


def test_every_test_that_a_page_names_exists() -> None:
    named = set(
        re.findall(r"`(?:tests/)?((?:\w+/)*test_\w+\.py)(?:::(\w+))?`", "".join([*PAGES.values(), CONTRIBUTING]))
    )
    assert len(named) > 40
    there = {path.as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    texts = {file: [text for path, text in there.items() if path.endswith(f"/{file}")] for file, _ in named}
    assert [file for file in texts if not texts[file]] == []
    assert [(file, test) for file, test in named if test and f"\ndef {test}(" not in "".join(texts[file])] == []


def test_the_readme_names_the_versions_that_are_tested() -> None:
    torch_versions = [release.rpartition(".")[0] for release in VERSIONS["torch"].tested]
    assert f"FSDP2 of torch {torch_versions[0]} to {torch_versions[-1]}" in README
    assert f"DeepSpeed {' and '.join(VERSIONS['deepspeed'].tested)}" in README


def test_trainers_have_sections_in_one_form() -> None:
    packages = {"Hugging Face Trainer": "transformers", "NeMo Automodel": "nemo-automodel"}
    packages["LLaMA-Factory"] = "llamafactory"
    rows = {row[0].split("]")[0].strip("["): row[3] for row in table("start/trainers", "In one table")[1:]}
    for trainer, known in rows.items():
        if "tested" in known:
            assert known.split()[-1] == VERSIONS[packages.get(trainer, trainer.lower())].tested[-1], trainer
    names = list(rows)
    for trainer in names[names.index("torchtitan") :]:
        words = re.findall(r"^\*\*(\w+)\.\*\*", section("start/trainers", trainer), re.MULTILINE)
        assert words == ["Engine", "Add", "Resume", "Export", "Limits"], trainer


def test_every_page_is_in_the_navigation_and_the_readme_is_short() -> None:
    titles, listed = zip(*re.findall(r"^ +- (.*): (\S+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    headings = [text.partition("\n")[0] for text in PAGES.values()]
    assert len(set(titles)) == len(titles) and len(set(headings)) == len(headings), "a title twice"
    assert sorted(listed) == sorted(
        [*PAGES.keys() - {"README"} - MOVED, "index", "contributing", "changelog", "findings"]
    )
    assert len(README.splitlines()) <= 150


def test_every_page_names_its_question_first() -> None:
    first = {name: re.sub(r"\A# .*\n+(<!--.*-->\n+)?", "", text) for name, text in PAGES.items()}
    asked = {name for name, text in first.items() if re.match(r"\*\*[^*]*\?\*\* ?", text)}
    assert asked == PAGES.keys() - {"README"} - MOVED
    left_out = re.findall(r"^not_in_nav: (.*?) *#", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert left_out == [" ".join(f"{name}.md" for name in MOVED)]


def test_the_messages_in_troubleshooting_are_ours() -> None:
    """Those that the table quotes, but for DeepSpeed's, Accelerate's and gloo's."""
    seen = re.findall(r"^\| ([^|]*)", PAGES["troubleshooting"], re.MULTILINE)  # the first column
    quoted = {code for cell in seen for code in cell.split("`")[1::2] if " " in code}
    theirs = {
        "LayerWiseMuon is not a supported DeepSpeed Optimizer",
        "optimizer must support momentum or beta1",
        "optimizer.params.adamw.lr not found in kwargs",
    }
    theirs |= {"train_batch_size is not equal to", "Received data size doesn't match expected size"}
    theirs |= {"Connection closed by peer"}
    theirs |= {"KeyError: 'exp_avg'", "too many values to unpack (expected 5)"}
    code = "".join(p.read_text() for folder in ("lwopt_backend", "integrations") for p in (ROOT / folder).rglob("*.py"))
    first = {m.partition(" lr")[0].partition(" ...")[0].replace("rank 1 failed", "failed") for m in quoted - theirs}
    assert theirs < quoted and [message for message in first if message not in code] == []


def test_make_commands_exist_and_ci_runs_the_readmes() -> None:
    texts = README + CONTRIBUTING
    targets = {name for pair in re.findall(r"^make ([\w-]+)$|`make ([\w-]+)[` ]", texts, re.MULTILINE) for name in pair}
    assert targets - {""} >= {"train", "check", "test", "test-full", "test-peers", "docs", "compare"}
    subprocess.run(["make", "--dry-run", *sorted(targets - {""})], cwd=ROOT, check=True, capture_output=True)
    steps = re.findall(r"^(?:exec )?make (\w+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert steps == ["check", "test"] and "`make check`" in README and "`make test`" in README


def test_every_method_that_a_page_names_exists() -> None:
    prose = re.sub(r"^```.*?^```$", "", PAGES["modules"], flags=re.MULTILINE | re.DOTALL)
    for owner, named in (
        (LayerWiseOptimizer, set(re.findall(r"`(\w+)\(", PAGES["plain"])) - {"lcm", "state_dict"}),
        (ModuleOptimizers, set(re.findall(r"`(\w+)\([^`]*\)`", prose)) - {"LambdaLR"}),
    ):
        assert named and [name for name in named if not hasattr(owner, name)] == []


def test_the_shardings_and_modes_of_fsdp2_are_the_tests() -> None:
    text = section("fsdp2", "What works").partition("### ")[0]
    lists = [re.findall(r"^- (\*.*?\*):", part, re.MULTILINE) for part in text.split("Modes:")]
    assert [[*re.findall(r"\*(.+?)\*", " ".join(items))] for items in lists] == [list(SHARDINGS), list(MODES)]
    exceptions = [row[:2] for row in table("fsdp2", "What works")[1:]]
    assert exceptions == [["bf16 parameters", "all"], ["tied", "several roots"]]


# -- docs/optimizers.md
def test_a_users_own_rule_runs_as_printed(tmp_path: Path) -> None:
    ((_, name, script),) = blocks("optimizers", "python", "own_rule.py")
    (tmp_path / name).write_text(script)
    torch.manual_seed(0)
    with mock.patch.dict(MATRIX_RULES):
        code, printed = run_script([str(tmp_path / name)], {}, joined=True)
    assert code == 0 and float(re.findall(r"loss (\d\.\d+)", printed)[0]) < 0.1, printed
    rule = script[script.index("@dataclass") : script.index("\n\nmodel")]
    assert len([line for line in rule.splitlines() if line.strip()]) <= 20


def test_entries_of_the_migration_page_are_understood() -> None:
    """Every rule is in its table."""
    given = {name: json.loads(text) for _, name, text in blocks("optimizers", "json") if name}
    rules, _ = settings_of(ZeROConfig, given["entry"]["params"], given["entry"]["type"])
    assert rules.overrides[0].matrix == {"lr": 0.01}
    rules, _ = settings_of(ZeROConfig, given["params"], "LayerWise")
    assert rules.matrix["precondition_frequency"] == 10
    (atoms,) = blocks("matrices", "json", "atoms")
    AtomSettings.parse(json.loads(atoms.text))
    named = named_in(section("optimizers", "Which rules there are"))
    shipped = {name for name, rule in {**MATRIX_RULES, **ELEMENTWISE_RULES}.items() if rule.source != REGISTERED}
    assert named == shipped


# -- docs/migration.md
def test_every_peer_has_a_table_with_our_keys() -> None:
    """Python takes the settings, too."""
    assert [*SETTINGS] == PEERS
    for peer in PEERS:
        optimizer, rules = LayerWiseOptimizer(UnevenLM(), **entry(peer)["params"], report=False), rules_for(peer)
        for group, choice in zip(optimizer.param_groups, (rules.matrix, rules.elementwise), strict=True):
            assert group["rule"] == choice["rule"]
            assert arguments(choice) == arguments(group), peer
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \|", MIGRATION, re.MULTILINE)
    keys = {key for row in rows for key in re.findall(r"`(matrix|elementwise)\.(\w+)`", row)}
    options = {"matrix": options_in(Muon), "elementwise": options_in(AdamW)}
    assert len(keys) > 15
    assert [(kind, key) for kind, key in keys if key not in options[kind]] == []


def values_in(cell: str) -> list[Any]:
    """What a cell lists, numbers as numbers; what is no value as its text."""
    words = {"on": "True", "true": "True", "off": "False", "false": "False", "none": "None"}
    values: list[Any] = []
    for written in re.findall(r"\([^)]*\)|[^,\s`][^,`]*", cell):
        try:
            values.append(ast.literal_eval(words.get(written, written)))
        except (ValueError, SyntaxError):
            values.append(written)
    return values


def paired(names: list[str], cell: str) -> list[tuple[str, Any]]:
    """A default for each name, or the same for all; nothing where the cell lists something else."""
    values = values_in(cell)
    if cell in ("", "the same") or len(values) not in (1, len(names)):
        return []
    return list(zip(names, values * len(names) if len(values) == 1 else values))


CLASSES = {"torch.optim.Muon": torch.optim.Muon, "pytorch_optimizer": pytorch_optimizer.Muon}


@pytest.mark.parametrize("heading", re.findall(r"^## (.*)$", MIGRATION, re.MULTILINE)[2:])
def test_defaults_on_the_page_are_ours_and_theirs(heading: str) -> None:
    models = {"matrix": Muon(), "elementwise": AdamW(), "adamw": AdamW()}
    arguments = inspect.signature(CLASSES[heading]).parameters if heading in CLASSES else {}
    checked, of_theirs = set(), set()
    for theirs, ours, their_cell, our_cell in table("migration", heading)[1:]:
        tokens = [token.rpartition(".")[::2] for token in re.findall(r"`([\w.]+)`", ours)]
        options = [(kind or "matrix", key) for kind, key in tokens]
        known = [(kind, key) for kind, key in options if hasattr(models.get(kind), key)]
        for (kind, key), value in paired(known, our_cell):
            default = getattr(models[kind], key)
            if key == "ns_coefficients":
                value, default = (table_of(which).triples for which in (value, default))
            assert value == (default or "original" if key == "adjust_lr_fn" else default), key
            checked.add(key)
        names = [name for name in re.findall(r"`(\w+)`", theirs) if name in arguments]
        for name, value in paired(names, their_cell):
            assert name == "adjust_lr_fn" or arguments[name].default == value, name
            of_theirs.add(name)
    assert checked >= {"lr", "weight_decay", "momentum"} - ({"momentum"} if heading == "pytorch_optimizer" else set())
    assert len(of_theirs) >= 7 or not arguments


def test_every_kind_of_hostile_file_and_every_fault_has_its_test() -> None:
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    hostile = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    faults = re.findall(r"`(test_\w+)`", (ROOT / "CHANGELOG.md").read_text())
    assert len(hostile) > 10 and len(faults) > 30
    assert [name for file, name in hostile if f"def {name}(" not in texts[file]] == []
    assert [name for name in faults if f"def {name}(" not in "".join(texts.values())] == []
