"""What docs/checkpoints.md, formats.md and from_megatron.md show is true: commands run, tables are the code's."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import LlamaConfig

from lwopt_backend.checkpoint import formats, names
from lwopt_backend.checkpoint.contents import Checkpoint, Param, held
from lwopt_backend.checkpoint.names import operations
from lwopt_backend.cli import app
from tests.support import megatron_dist
from tests.support.command_line import lwopt, torch_dist
from tests.support.launcher import run_script, succeeds
from tests.support.pages import PAGES, blocks, table
from tests.support.ranks import RankPool, free_port

COMMANDS: dict[str, Any] = dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
HEADS, GROUPS = 4, 2  # as the pages have it


# The pages' commands, in a folder with a checkpoint in Megatron's format
def run(page: str, folder: Path, ranks: RankPool | None = None) -> dict[str, str]:
    """Run all commands of a page one after the other, scripts on ``ranks`` if given; what each prints, by command."""
    for _, name, text in blocks(page):
        if "." in name:
            (folder / name).write_text(text)
    printed = {}
    commands = "".join(text for _, name, text in blocks(page) if name == "run").replace("\\\n", "")
    for command in commands.splitlines():
        program, *arguments = shlex.split(command)
        if program == "lwopt":  # in this process: starting one takes seconds
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                ended = lwopt(*arguments)
            assert ended.code == 0, (command, ended)
            printed[command] = ended.out
        elif ranks is not None:
            assert arguments[:2] == ["--num_accelerators", "2"], command
            printed[command] = ranks.run(run_there, folder, arguments[2:])[0]
            ranks.close()
        else:
            there = re.sub("^(torchrun|deepspeed)", rf"\1 --master_port {free_port()}", command)
            printed[command] = succeeds(there, folder)
    return printed


def run_there(folder: Path, arguments: list[str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_script(arguments, {}, joined=True)[1]


@pytest.fixture(scope="module")
def walked(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The folder in which all of from_megatron.md was run, and what was printed; by launchers in `make test-full`."""
    folder = tmp_path_factory.mktemp("move")
    channels = megatron_dist.HIDDEN // HEADS
    arguments = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "kv_channels": channels, "bf16": True}
    arguments |= {"group_query_attention": True, "muon_split_qkv": True, "muon_nesterov": False, "muon_num_ns_steps": 5}
    arguments |= {"muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0}
    torch_dist(folder / "megatron", arguments=arguments)
    sizes = {"vocab_size": megatron_dist.VOCAB, "hidden_size": megatron_dist.HIDDEN, "head_dim": channels}
    sizes |= {"intermediate_size": megatron_dist.FFN, "num_hidden_layers": megatron_dist.LAYERS}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS}
    LlamaConfig(**sizes, **heads, tie_word_embeddings=False).save_pretrained(folder / "llama")
    return folder, run("from_megatron", folder, None if request.config.getoption("full") else rank_pools[2])


def test_a_megatron_user_can_walk_the_whole_way(walked: tuple[Path, dict[str, str]]) -> None:
    folder, printed = walked
    compared = {command: text for command, text in printed.items() if command.startswith("lwopt diff")}
    assert len(compared) == 2
    for text in compared.values():
        assert re.search(r"^[1-9]\d+ tensors and counters of \d+ parameters are equal, 0 differ", text, re.M)
    (training,) = (text for command, text in printed.items() if command.startswith("deepspeed"))
    loss, step, samples = re.findall(r"loss (\S+) after (\d+) steps, (\d+) samples", training)[0]
    assert 0 < float(loss) < 10 and (int(step), int(samples)) == (7 + 3, 28 + 3 * 8)
    before, trained = (formats.read(folder / name) for name in ("universal", "universal2"))
    assert (trained.iteration, trained.samples) == (10, 52)
    assert set(trained.params) == set(before.params)
    for name, param in before.params.items():
        assert not torch.equal(param.best.read(), trained.params[name].best.read()), name  # all of them were trained
    assert {path.name for path in (folder / "for_megatron").glob("*.safetensors")} == {"model.safetensors"}
    # The schedule is Megatron's: warmup of 2 steps, cosine to a tenth after 100.
    (rate,) = {group["lr"] for group in formats.read(folder / "run").groups}
    expected = 0.00003 + (0.0003 - 0.00003) * 0.5 * (1.0 + math.cos(math.pi * (10 - 2) / (100 - 2)))
    assert rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.full
def test_what_the_reference_shows_runs(walked: tuple[Path, dict[str, str]]) -> None:
    printed = run("checkpoints", walked[0]) | run("formats", walked[0])
    assert re.search(r"loss \d+\.\d+ with rates \{'muon': 0.02, 'adamw': 0.01\}", "".join(printed.values()))
    assert "missing: [] unexpected: []" in printed["python load_weights.py"]
    assert "0 differ" in printed["lwopt diff megatron mine --map my_names.py:mine"]
    mine = formats.read(walked[0] / "mine")
    assert "blocks.2.gate_up.weight" in mine.params and "wte.weight" in mine.params
    assert mine.params["blocks.2.gate_up.weight"].shape == (2 * megatron_dist.FFN, megatron_dist.HIDDEN)


# Tables
def words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def spelled_out(name: str) -> list[str]:
    """The names that ``name`` stands for: it may have braces, as in a shell."""
    before, inside, after = re.fullmatch(r"([^{]*)(?:{(.*)})?(.*)", name).groups()  # type: ignore[union-attr]
    return [f"{before}{word}{after}" for word in (inside or "").split(",")]


def test_tables_have_the_formats_and_names_there_are() -> None:
    """Formats and names in the tables are those that there are."""

    def first_words(page: str, section: str, first: str) -> list[str]:
        return [words(cells[0])[0] for cells in table(page, section, first)[1:]]

    where = "formats", "What is read and written"
    assert first_words(*where, "`--from`") == list(formats.FORMATS)
    assert first_words(*where, "`--to`") == list(formats.TARGETS)
    written = {word for cells in table(*where, "`--from`")[1:] for word in re.findall(r"--to (\w+)", cells[2])}
    assert written == set(formats.TARGETS)
    assert set(first_words("formats", "Names", "`--names`")) == set(names.FAMILIES)
    for cells in table("formats", "A map of your own", "function")[1:]:
        assert callable(getattr(operations, words(cells[0])[0].partition("(")[0]))


@pytest.mark.parametrize("family", ["hf-llama", "hf-gpt2"])
def test_parameters_side_by_side_are_what_the_maps_make(family: str) -> None:
    head, *rows = table("formats", "Names", "`megatron-core`")
    column = head.index(f"`{family}`")
    pairs = {words(cells[0])[0]: spelled_out(*words(cells[column])) for cells in rows if words(cells[column])}
    # 24 rows, as 2 heads of 4 of q, k and v have.
    params = {name: Param(held(torch.zeros(8) if "norm" in name else torch.zeros(24, 8), name)) for name in pairs}
    checkpoint = Checkpoint("made up", "", "megatron-core", params)
    numbers = names.Numbers(heads=2, query_groups=2, kv_channels=4)
    for name, expected in pairs.items():
        made = names.translate(checkpoint, family, numbers)
        assert set(expected) <= set(made.params), name
    assert set(made.params) == {name for expected in pairs.values() for name in expected}


# Commands and settings anywhere on the pages
def test_every_command_on_the_pages_parses() -> None:
    checked = 0
    for page, text in PAGES.items():
        text = "" if page == "api" else text.replace("\\\n", "")  # has usages
        plain = re.sub(r"\s*\n\s*", " ", text)
        for line in [*re.findall(r"^lwopt .*$", text, re.M), *re.findall(r"`(lwopt \w+ [^`]+)`", plain)]:
            _, command, *arguments = shlex.split(line)
            if not arguments or arguments[0].startswith("-"):
                continue
            given = COMMANDS[command].make_context(command, arguments).params
            assert given.get("to") in (None, *formats.TARGETS), (page, line)
            for key in ("vocabulary", "source_names", "names_a"):
                assert given.get(key) in (None, *names.FAMILIES), line
            checked += 1
    assert checked > 20
