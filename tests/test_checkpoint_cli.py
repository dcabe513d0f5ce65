"""``lwopt convert``, ``inspect`` and ``diff``, as their users run them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lwopt_backend.checkpoint import formats
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param
from lwopt_backend.checkpoint.dcp import writer as write_dcp
from lwopt_backend.checkpoint.deepspeed import universal_writer as write_universal
from lwopt_backend.checkpoint.differences import differences
from lwopt_backend.checkpoint.files import folders
from lwopt_backend.checkpoint.lazy import held
from lwopt_backend.checkpoint.safetensors import reader as safetensors_folder
from tests.command_line import files, genuine, lwopt, refused, succeeds, torch_dist, torch_format

TARGETS = ("universal", "megatron", "dcp", "safetensors")
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
EMBEDDING = "embedding.word_embeddings.weight"
NUMBERS = ("--heads", 4)  # tests' own checkpoints do not say it


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Megatron's Muon."""
    return torch_dist(tmp_path_factory.mktemp("source") / "from")


@pytest.fixture(scope="session")
def made(source: Path) -> dict[str, Path]:
    """The same in every format that is written, and in Megatron's older one another."""
    found = {"source": source, "torch": torch_format(source.parent / "torch")}
    for target in TARGETS:
        found[target] = source.parent / target
        numbers = NUMBERS if target == "megatron" else ()
        succeeds("convert", source, found[target], "--to", target, *numbers)
    return found


def inspected(path: Path, *options: object) -> dict[str, Any]:
    return json.loads(succeeds("inspect", path, "--json", *options))


def differing(a: Path, b: Path, *options: object) -> dict[str, Any]:
    run = lwopt("diff", a, b, "--json", *options)
    found = json.loads(run.out)
    assert run.err == "" and run.code == bool(found["different"])
    return found


# Genuine checkpoints of Megatron's


@pytest.mark.parametrize("source", genuine())
def test_genuine_checkpoints_lose_nothing_on_a_round_trip_over_all_formats(tmp_path: Path, source: Path) -> None:
    way = [source, *(tmp_path / step for step in ("universal", "dcp", "universal2", "megatron"))]
    version = ("--megatron-version", "0.19" if "_tp2_" in source.name or "_pp2_" in source.name else "0.16")
    for before, after in zip(way, way[1:]):
        target = after.name.rstrip("2")
        succeeds("convert", before, after, "--to", target, *(version if target == "megatron" else ()))
        found = differing(source, after)
        assert found["different"] == [] and found["equal"] > 30


@pytest.mark.parametrize("source", genuine(bad=True))
def test_the_bad_checkpoint_is_refused_with_the_reason(tmp_path: Path, source: Path) -> None:
    said = refused("convert", source, tmp_path / "to", "--to", "universal")
    for words in (
        "11 problem(s), so that nothing is written",
        "master weight of 'decoder.layers.0.input_layernorm.weight' does not round to the saved torch.bfloat16",
        f"{source.name}/iter_0000003",
        "--dist-ckpt-optim-fully-reshardable",
        "Take a checkpoint that was saved without that option",
    ):
        assert words in said
    assert list(tmp_path.iterdir()) == []
    run = lwopt("inspect", source, "--json")
    found = json.loads(run.out)
    assert run.code == 1 and len(found["problems"]) == 11 and "problems (11)" in run.err
    assert "--dist-ckpt-optim-fully-reshardable" in found["advice"]
    run = lwopt("inspect", source)
    assert run.code == 1 and "Problems:" in run.out and "No problems" not in run.out


# Formats


def test_every_format_says_what_it_is(made: dict[str, Path]) -> None:
    formats_of = {
        **{"source": "megatron torch_dist", "torch": "megatron torch", "universal": "deepspeed universal"},
        **{"megatron": "megatron torch_dist", "dcp": "torch dcp", "safetensors": "safetensors"},
    }
    for key, path in made.items():
        found = inspected(path)
        assert (found["format"], found["path"], found["problems"]) == (formats_of[key], str(path), [])
        assert found["step"] == (None if key == "safetensors" else 7)
        assert found["size"] == sum(state["size"] for state in found["states"]) > 0
        assert found["size_of_files"] == sum(len(content) for content in files(path).values())
        text = succeeds("inspect", path)
        assert formats_of[key] in text and "No problems found." in text and f"{found['parameters']:,}, of" in text
    assert inspected(made["source"])["world_size"] == 2 and inspected(made["torch"])["world_size"] == 2
    assert inspected(made["universal"] / "global_step7")["parameters"] == 21


def test_states_are_counted_with_their_sizes(made: dict[str, Path]) -> None:
    found = {state["state"]: state for state in inspected(made["universal"])["states"]}
    elements = found["fp32"]["elements"]
    counted = {"state": "weight", "dtype": "bfloat16", "tensors": 21, "elements": elements, "size": 2 * elements}
    assert found["weight"] == counted
    assert found["momentum_buffer"]["tensors"] + found["exp_avg"]["tensors"] == 21
    assert found["exp_avg"]["size"] == 4 * found["exp_avg"]["elements"]


def test_converted_ones_are_equal_whatever_their_formats(made: dict[str, Path]) -> None:
    """An export lacks states, and a hint says so."""
    for a, b in (("source", "universal"), ("source", "megatron"), ("source", "dcp"), ("dcp", "megatron")):
        assert differing(made[a], made[b])["different"] == [], (a, b)
    found = differing(made["source"], made["safetensors"], "--names-b", "megatron-core", "--weights")
    assert found["different"] == [] and found["equal"] == 21
    weights = load_file(made["safetensors"] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16} and len(weights) == 21
    found = differing(made["source"], made["safetensors"])
    assert {entry["what"] for entry in found["different"] if entry["key"] == "exp_avg"} == {"only in A"}
    assert any("B has no optimizer state; --weights" in note for note in found["notes"])


def test_hugging_faces_names_and_back_with_numbers_that_the_checkpoint_does_not_say(
    source: Path, tmp_path: Path
) -> None:
    """Weights alone come back, with the numbers of config.json, from several files."""
    folder = tmp_path / "hf"
    to = ("--to", "safetensors", "--names", "hf-llama")
    said = refused("convert", source, folder, *to)
    assert "two of heads, query_groups and kv_channels" in said and not folder.exists()
    numbers = ("--heads", 4, "--query-groups", 2, "--kv-channels", 2)
    succeeds("convert", source, tmp_path / "wide", *to, "--dtype", "float32", *numbers)
    weights = load_file(tmp_path / "wide" / "model.safetensors")
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (8, 8)
    assert weights["model.layers.2.mlp.gate_proj.weight"].dtype == torch.float32
    for option, equal in (("--names-b", 21), ("--names", 30)):  # in one form or in the other
        found = differing(source, tmp_path / "wide", option, "hf-llama", "--weights", *numbers)
        assert (found["different"], found["equal"]) == ([], equal)
    assert any("B does not say what its names are" in note for note in found["notes"])
    succeeds("convert", source, folder, *to, *numbers[:4])
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    parts = {"one.safetensors": dict(list(weights.items())[:9]), "two.safetensors": dict(list(weights.items())[9:])}
    for file, tensors in parts.items():
        save_file(tensors, folder / file)
    places = {name: file for file, tensors in parts.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps({"num_attention_heads": 4, "num_key_value_heads": 2}))
    succeeds("convert", folder, tmp_path / "back", "--to", "megatron", "--source-names", "hf-llama")
    back = formats.read(tmp_path / "back")
    assert back.arguments["num_attention_heads"] == 4 and back.arguments["group_query_attention"]
    compared = differing(source, tmp_path / "back", "--weights")
    assert compared["different"] == [] and compared["equal"] == 21


# Options


WRONG = {
    "target": (("--to", "univrsal"), "unknown target 'univrsal' for --to; did you mean 'universal'?"),
    "format": (("--to", "dcp", "--from", "megatron-tourch"), "did you mean 'megatron-torch'?"),
    "names": (("--to", "dcp", "--names", "hf-lama"), "unknown names 'hf-lama'; did you mean 'hf-llama'?"),
    "source's names": (("--to", "dcp", "--source-names", "hf-lama"), "did you mean 'hf-llama'?"),
    "file of names": (("--to", "dcp", "--names", "my.json"), "my.json"),
    "dtype": (("--to", "safetensors", "--dtype", "bfloat"), "unknown --dtype 'bfloat'; did you mean 'bfloat16'?"),
    "dtype's kind": (("--to", "safetensors", "--dtype", "int8"), "unknown --dtype 'int8'; known: 'float32'"),
    "dtype elsewhere": (("--to", "megatron", "--dtype", "float32"), "--dtype is of --to safetensors, not of --to meg"),
    "version": (("--to", "megatron", "--megatron-version", "0.14"), "'0.14' is not written; give 0.16 or 0.19"),
    "version elsewhere": (("--to", "dcp", "--megatron-version", "0.19"), "--megatron-version is of --to megatron"),
    "count": (("--to", "dcp", "--vocab-size", "0"), "vocab_size: input should be greater than or equal to 1; found 0"),
    "no number": (("--to", "dcp", "--heads", "four"), "Invalid value for '--heads'"),
    "layout": (("--to", "dcp", "--qkv-layout", "rows"), "qkv_layout: input should be 'groups' or 'blocks'"),
    "ranks without blocks": (("--to", "dcp", "--qkv-ranks", "2"), "--qkv-ranks is of --qkv-layout blocks only"),
    "layout of nothing": (("--to", "dcp", "--qkv-layout", "groups"), "--qkv-layout is of megatron-deepspeed's names"),
    "layout of names": (("--to", "dcp", "--names", "hf-llama", "--qkv-layout", "groups"), "megatron-deepspeed's names"),
    "unused": (("--to", "dcp", "--layers", "4"), "--layers is not used, as names stay as they are"),
    "unused by Megatron": (("--to", "megatron", "--heads", "4", "--layers", "4"), "--layers is not used"),
    "layers": (("--to", "dcp", "--names", "hf-llama", "--layers", "4"), "layer(s) 3"),
    "vocabulary": (("--to", "dcp", "--vocab-size", "17"), "fewer than the vocabulary of 17"),
    "trained rows": (("--to", "dcp", "--vocab-size", "15"), "beyond the given vocabulary of 15 were trained"),
    "heads": (("--to", "megatron", "--megatron-version", "0.16"), "give --heads"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_options_are_an_error_and_nothing_is_written(source: Path, tmp_path: Path, case: str) -> None:
    options, words = WRONG[case]
    before = files(source)
    said = refused("convert", source, tmp_path / "to", *options)
    assert words in " ".join(said.split()), said
    assert list(tmp_path.iterdir()) == [] and files(source) == before


def test_numbers_of_names_that_are_not_known_are_an_error(made: dict[str, Path], tmp_path: Path) -> None:
    said = refused("convert", made["safetensors"], tmp_path / "to", "--to", "dcp", "--vocab-size", 8)
    assert "--vocab-size cannot be used" in said and "--source-names" in said
    assert not (tmp_path / "to").exists()


def test_unknown_names_are_listed(tmp_path: Path) -> None:
    params = {name: Param(held(torch.ones(2, 2), name), group=0) for name in ("mine.weight", "yours.weight")}
    (tmp_path / "from").mkdir()
    write_universal.write(Checkpoint("made here", "", "megatron-core", params), tmp_path / "from")
    said = refused("convert", tmp_path / "from", tmp_path / "to", "--to", "safetensors", "--names", "hf-llama")
    assert "'mine.weight'" in said and "'yours.weight'" in said and "a file with rules of your own" in said
    assert not (tmp_path / "to").exists()


def test_the_vocabularys_padding_is_cut_and_made(source: Path, tmp_path: Path) -> None:
    succeeds("convert", source, tmp_path / "more", "--to", "universal", "--vocab-multiple", 10)
    assert formats.read(tmp_path / "more").params[EMBEDDING].shape == (20, 8)
    succeeds("convert", tmp_path / "more", tmp_path / "back", "--to", "universal", "--vocab-size", 16)
    assert formats.read(tmp_path / "back").params[EMBEDDING].shape == (16, 8)
    assert differing(source, tmp_path / "back")["different"] == []
    found = differing(source, tmp_path / "more")["different"]
    assert {(entry["name"], entry["what"]) for entry in found} == {
        (name, "shape [16, 8] in A, [20, 8] in B") for name in (EMBEDDING, "output_layer.weight")
    }


# What is printed and what is written


def test_json_says_what_was_done(source: Path, tmp_path: Path) -> None:
    found = json.loads(succeeds("convert", source, tmp_path / "to", "--to", "dcp", "--json"))
    assert found["source"]["format"] == "megatron torch_dist" and found["source"]["names"] == "megatron-core"
    assert found["result"]["format"] == "torch dcp" and found["result"]["path"] == str(tmp_path / "to")
    assert found["result"]["written"] and found["result"]["step"] == 7
    assert "fp32" not in {state["state"] for state in found["result"]["states"]}
    there = {state["state"]: state for state in inspected(tmp_path / "to")["states"]}
    assert there == {state["state"]: state for state in found["result"]["states"]}


def test_a_dry_run_checks_and_writes_nothing(source: Path, tmp_path: Path) -> None:
    text = succeeds("convert", source, tmp_path / "to", "--to", "universal", "--dry-run")
    assert "Nothing was written (--dry-run)." in text
    found = json.loads(succeeds("convert", source, tmp_path / "to", "--to", "universal", "--dry-run", "--json"))
    assert not found["result"]["written"]
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "to" / "global_step7").mkdir(parents=True)
    assert "is there already" in refused("convert", source, tmp_path / "to", "--to", "universal", "--dry-run")


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_there_is_only_replaced_by_force(made: dict[str, Path], tmp_path: Path, target: str) -> None:
    other = torch_dist(tmp_path / "other", muon=False)
    shutil.copytree(made[target], tmp_path / "to")
    before = files(tmp_path / "to")
    arguments = ("convert", other, tmp_path / "to", "--to", target, *(NUMBERS if target == "megatron" else ()))
    assert "is there already" in refused(*arguments)
    assert files(tmp_path / "to") == before
    succeeds(*arguments, "--force")
    after = files(tmp_path / "to")
    assert after != before and not any(".lwopt-" in name for name in after)
    if target != "safetensors":
        assert differing(other, tmp_path / "to")["different"] == []


@pytest.mark.parametrize(
    ("target", "where", "words"),
    [
        ("dcp", "run", "would replace the source"),
        ("dcp", ".", "would replace the source"),
        ("megatron", "run", "would replace what is in the source"),
        ("universal", "run", "would replace what is in the source"),
    ],
)
def test_not_even_force_replaces_the_source_or_its_newest_step(
    made: dict[str, Path], tmp_path: Path, target: str, where: str, words: str
) -> None:
    shutil.copytree(made["source" if target == "dcp" else target], tmp_path / "in" / "run")
    before = files(tmp_path)
    said = refused("convert", tmp_path / "in" / "run", tmp_path / "in" / where, "--to", target, "--force")
    assert words in said and files(tmp_path) == before


def test_a_pointer_names_the_newest_and_other_steps_stay(source: Path, tmp_path: Path) -> None:
    (tmp_path / "to" / "global_step3").mkdir(parents=True)
    (tmp_path / "to" / "latest_universal").write_text("global_step3")
    succeeds("convert", source, tmp_path / "to", "--to", "universal")
    assert (tmp_path / "to" / "latest_universal").read_text() == "global_step7"
    assert {path.name for path in (tmp_path / "to").iterdir()} == {"global_step3", "global_step7", "latest_universal"}


def test_folders_that_were_moved_aside_are_brought_back(made: dict[str, Path], tmp_path: Path) -> None:
    """As a program leaves them that is killed between two renames, where a file system cannot exchange names."""
    shutil.copytree(made["universal"], tmp_path / "a")
    shutil.copytree(made["dcp"], tmp_path / "b")
    for folder in (tmp_path / "a" / "global_step7", tmp_path / "b"):
        folder.rename(folder.with_name(f".{folder.name}.{folders._here()}.{2**22 + 1}.0123{folders.OLD}"))
    assert differing(tmp_path / "a", tmp_path / "b")["different"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_within_the_width_of_the_terminal(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr("lwopt_backend.cli.tables.terminal", lambda: console(width))
    other = torch_dist(tmp_path / "other", muon=False)
    for run in (
        lwopt("convert", made["source"], tmp_path / "to", "--to", "universal"),
        lwopt("inspect", made["source"]),
        lwopt("diff", made["source"], other),
    ):
        lines = run.out.splitlines()
        assert len(lines) > 8 and max(map(len, lines)) <= width, run.out
        rows = [line for line in lines if line.startswith("│")]
        assert len({len(line) for line in rows}) == 1 and not any("…" in line for line in rows)


def console(width: int) -> Any:
    from rich.console import Console

    return Console(width=width, highlight=False, markup=False)


# Differences


def checkpoint(**params: Param) -> Checkpoint:
    return Checkpoint("made here", "", "model", params, ({"lr": 0.1},), iteration=3)


def param(weight: torch.Tensor | None, step: float | None = None, **states: torch.Tensor) -> Param:
    found = {key: held(tensor, key) for key, tensor in states.items()}
    return Param(None if weight is None else held(weight, "weight"), found, step, group=0)


MASTER = torch.linspace(-1, 1, 6).view(2, 3)
NARROW, MOMENT = MASTER.bfloat16(), MASTER / 7
WHOLE = param(NARROW, 3.0, fp32=MASTER, exp_avg=MOMENT)
OWNED = {0: {"GG": [torch.ones(2)], "count": 3}}
CASES: dict[str, tuple[Param, dict[str, str]]] = {
    "the same": (WHOLE, {}),
    "the master as weight": (param(MASTER, 3.0, exp_avg=MOMENT), {}),
    "no weight": (param(None, 3.0, fp32=MASTER, exp_avg=MOMENT), {}),
    "no master": (
        param(NARROW, 3.0, exp_avg=MOMENT),
        {"fp32": "4 of 6 elements differ; B has no master weight"},
    ),
    "one bit": (
        param(NARROW, 3.0, fp32=MASTER, exp_avg=MOMENT.nextafter(MASTER)),
        {"exp_avg": "6 of 6 elements differ"},
    ),
    "another step": (dataclasses.replace(WHOLE, step=4.0), {"step": "3 in A, 4 in B"}),
    "no step": (dataclasses.replace(WHOLE, step=None), {"step": "3 in A, no number in B"}),
    "more state": (param(NARROW, 3.0, fp32=MASTER, exp_avg=MOMENT, more=MASTER), {"more": "only in B"}),
    "another shape": (
        param(NARROW, 3.0, fp32=MASTER, exp_avg=MASTER[:1]),
        {"exp_avg": "shape [2, 3] in A, [1, 3] in B"},
    ),
    "owners' state": (
        dataclasses.replace(WHOLE, owner_states=OWNED),
        {"owner.0.GG.0": "only in B", "owner.0.count": "only in B"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_differences_are_found_and_named(case: str) -> None:
    other, expected = CASES[case]
    found = list(differences(checkpoint(a=WHOLE), checkpoint(a=other)))
    assert {entry.key: entry.what for entry in found if entry.what} == expected
    assert len(found) > len(expected) or not expected


def test_owners_state_buffers_and_names_are_compared() -> None:
    a = dataclasses.replace(WHOLE, owner_states=OWNED)
    b = dataclasses.replace(WHOLE, owner_states={0: {"GG": [torch.tensor([1.0, 1.5])], "count": 4}})
    ones, twos = held(torch.ones(2), "buffer"), held(torch.full((2,), 2.0), "buffer")
    one = dataclasses.replace(checkpoint(a=a, b=WHOLE), buffers={"passes": ones})
    other = dataclasses.replace(checkpoint(a=b, c=WHOLE), buffers={"passes": twos}, tied={"d": "a"})
    found = {(entry.name, entry.key): entry for entry in differences(one, other) if entry.what}
    assert {key: entry.what for key, entry in found.items()} == {
        ("a", "owner.0.GG.0"): "1 of 2 elements differ",
        ("a", "owner.0.count"): "3 in A, 4 in B",
        ("b", ""): "only in A",
        ("c", ""): "only in B",
        ("passes", "buffer"): "2 of 2 elements differ",
    }
    assert found["a", "owner.0.GG.0"].largest == 0.5 and found["passes", "buffer"].elements == 2


def test_a_zeros_sign_and_a_nan_count_as_bits_do() -> None:
    nan = float("nan")
    one, other = param(torch.tensor([0.0, nan, 1.0])), param(torch.tensor([-0.0, nan, nan]))
    (found,) = (entry for entry in differences(checkpoint(a=one), checkpoint(a=other)) if entry.what)
    assert (found.what, found.largest) == ("2 of 3 elements differ", float("inf"))


def test_differences_in_json_have_no_infinities(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", float("inf"))):
        (tmp_path / name).mkdir()
        write_dcp.write(checkpoint(w=param(torch.tensor([value, 2.0]))), tmp_path / name)
    run = lwopt("diff", tmp_path / "a", tmp_path / "b", "--json")
    found = json.loads(run.out, parse_constant=lambda word: pytest.fail(word))
    assert run.code == 1 and found["different"][0]["largest"] == "inf"
    text = lwopt("diff", tmp_path / "a", tmp_path / "b")
    assert text.code == 1 and "1 of 2 elements differ" in text.out and "1 differ." in text.out


def test_steps_options_and_names_that_differ_are_said(source: Path, tmp_path: Path) -> None:
    found = formats.read(source)
    later = dataclasses.replace(found, iteration=9, groups=({**found.groups[0], "lr": 0.5}, *found.groups[1:]))
    (tmp_path / "b").mkdir()
    write_universal.write(later, tmp_path / "b")
    compared = differing(source, tmp_path / "b")
    assert compared["different"] == []
    assert compared["notes"] == ["Step: 7 in A, 9 in B.", "lr of group 0: 0.02 in A, 0.5 in B."]
    (tmp_path / "c").mkdir()
    write_dcp.write(checkpoint(w=param(torch.ones(2))), tmp_path / "c")
    notes = differing(source, tmp_path / "c")["notes"]
    assert any("No parameter has the same name in both" in note and "--names-b" in note for note in notes)


# Safetensors


def test_safetensors_are_read_as_their_own_library_reads_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(4, generator=generator).bfloat16(),
        "c": torch.arange(6).view(2, 3),
        "d": torch.tensor(2.5),
        "e": torch.empty(0, 4),
        "f": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = safetensors_folder.load(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].read().dtype == tensor.dtype and torch.equal(found[name].read(), tensor)
    assert torch.equal(found["a"].piece(4, 9).read(), tensors["a"].view(-1)[4:9])
    read = safetensors_folder.read(tmp_path)
    assert set(read.params) == {"a", "b", "d", "e"} and set(read.buffers) == {"c", "f"}


def entry(shape: str = "[2]", begin: int = 0, end: int = 8, dtype: str = "F32", places: bool = True) -> str:
    place = f',"data_offsets":[{begin},{end}]' if places else ""
    return f'"a":{{"dtype":"{dtype}","shape":{shape}{place}}}'


WORDS = '["2"]'
HEADERS = {
    "no JSON": ("{", "its header is wrong"),
    "a list": ("[]", "expected an object"),
    "a dtype": (f"{{{entry(dtype='F31')}}}", "unknown dtype 'F31'"),
    "a negative place": (f"{{{entry(begin=-8, end=0)}}}", "shape and place of 'a'"),
    "a shape of words": (f"{{{entry(WORDS)}}}", "shape and place of 'a'"),
    "another size": (f"{{{entry('[3]')}}}", "'a' has 8 bytes, but F32 of shape [3]"),
    "a gap": (f"{{{entry('[1]', begin=4)}}}", "begins at byte 4"),
    "too few": (f"{{{entry('[1]', end=4)}}}", "tensors take 4 bytes, but the file has 8"),
    "beyond the end": (f"{{{entry('[4]', end=16)}}}", "take 16 bytes, but the file has 8"),
    "twice": (f"{{{entry()},{entry()}}}", "'a' is there twice"),
    "no place": (f"{{{entry(places=False)}}}", "KeyError"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_of_safetensors_that_make_no_sense_are_an_error(tmp_path: Path, case: str) -> None:
    header, words = HEADERS[case][0].encode(), HEADERS[case][1]
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    said = refused("inspect", tmp_path)
    assert words in said and str(file) in said


def test_an_index_of_other_files_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for places, words in (
        ({"a": "one.safetensors", "b": "one.safetensors"}, "'b' is missing in its header"),
        ({"b": "one.safetensors"}, "different checkpoints"),
        ({"a": "two.safetensors"}, "two.safetensors cannot be read"),
        ({"a": "../one.safetensors"}, "leads elsewhere"),
        ({"a": "/etc/passwd"}, "leads elsewhere"),
        ({"a": 3}, "expected files by tensors' names"),
        ([], "expected files by tensors' names"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=words):
            safetensors_folder.read(tmp_path)
