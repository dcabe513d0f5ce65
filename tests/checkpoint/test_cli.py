"""``lwopt convert``, ``inspect`` and ``diff``, as their users run them."""

import dataclasses
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from lwopt_backend.checkpoint import convert, formats, names, ties
from lwopt_backend.checkpoint import safetensors as safetensors_folder
from lwopt_backend.checkpoint.contents import Checkpoint, CheckpointError, Param, held, same
from lwopt_backend.checkpoint.dcp import saving as write_dcp
from lwopt_backend.checkpoint.deepspeed import universal as write_universal
from lwopt_backend.checkpoint.differences import differences
from tests.support.command_line import files, lwopt, refused, succeeds, torch_dist, torch_format
from tests.support.megatron_dist import Setup, truth, write

TARGETS = ("universal", "dcp", "safetensors")
EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_dist(tmp_path_factory.mktemp("source") / "from")


@pytest.fixture(scope="session")
def made(source: Path) -> dict[str, Path]:
    """The same in every format that is written, and in Megatron's older one another."""
    found = {"source": source, "torch": torch_format(source.parent / "torch")}
    for target in TARGETS:
        found[target] = source.parent / target
        succeeds("convert", source, found[target], "--to", target)
    return found


def inspected(path: Path, *options: object) -> dict[str, Any]:
    return json.loads(succeeds("inspect", path, "--json", *options))


def differing(a: Path, b: Path, *options: object) -> dict[str, Any]:
    run = lwopt("diff", a, b, "--json", *options)
    found = json.loads(run.out)
    assert run.err == "" and run.code == bool(found["different"])
    return found


@pytest.mark.parametrize(
    ("write_in", "mode", "ranks"),
    [
        (torch_dist, "blockwise", 2),
        (torch_format, "blockwise", 2),
        (torch_dist, "duplicated", 2),
        (torch_dist, "blockwise", 1),
    ],
)
def test_a_muon_that_was_run_on_parts_of_matrices_is_noted(
    tmp_path: Path, write_in: Any, mode: str, ranks: int
) -> None:
    """Fixed: `lwopt inspect` did not say that a tensor-parallel Muon of Megatron had updated parts of matrices."""
    given = {"arguments": {"muon_tp_mode": mode, "tensor_model_parallel_size": ranks}, "tp": ranks}
    source, note = write_in(tmp_path / "from", **given), "parts of a matrix on the 2 tensor-parallel ranks"
    noted = [inspected(source), json.loads(succeeds("convert", source, tmp_path / "to", "--to", "universal", "--json"))]
    assert [note in str(found["notes"]) for found in noted] == [(mode, ranks) == ("blockwise", 2)] * 2


def test_masters_of_other_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    """As in a genuine checkpoint of Megatron's, which test_megatron.py reads."""
    source, known = tmp_path / "from", truth(muon=True)
    known[EMBEDDING]["fp32"] += 1
    write(source / "iter_0000007", Setup(), known)
    (source / "latest_checkpointed_iteration.txt").write_text("7")
    said = refused("convert", source, tmp_path / "to", "--to", "universal")
    expected = [f"master weight of '{EMBEDDING}' does not round to the saved torch.bfloat16", f"{source}/iter_0000007"]
    expected += ["1 problem(s), and nothing was written", "Take a checkpoint that was saved without that option"]
    assert all(words in said for words in expected), said
    assert not (tmp_path / "to").exists()
    run, text = lwopt("inspect", source, "--json"), lwopt("inspect", source)
    found = json.loads(run.out)
    assert run.code == 1 and len(found["problems"]) == 1 and "problems (1)" in run.err
    assert "--dist-ckpt-optim-fully-reshardable" in found["advice"]
    assert text.code == 1 and "Problems:" in text.out and "No problems" not in text.out


# Formats
def test_inspect_says_format_and_sizes(made: dict[str, Path], tmp_path: Path) -> None:
    """Every format says what it is, and how large its states are."""
    known = {"source": "megatron torch_dist", "torch": "megatron torch", "universal": "deepspeed universal"}
    known |= {"dcp": "torch dcp", "safetensors": "safetensors"}
    for key, path in made.items():
        found, step = inspected(path), next(iter(path.glob("*7")), path)
        assert (found["format"], found["path"], found["problems"]) == (known[key], str(path), [])
        assert found["step"] == (None if key == "safetensors" else 7)
        assert found["size"] == sum(state["size"] for state in found["states"]) > 0
        assert found["size_of_files"] == sum(len(content) for content in files(step).values())
        assert found["world_size"] == 2 or key not in ("source", "torch")
        text = succeeds("inspect", path)
        assert known[key] in text and "No problems found." in text and f"{found['parameters']:,}, of" in text
    run = shutil.copytree(made["universal"], tmp_path / "run")
    shutil.copytree(run / "global_step7", run / "global_step8")
    found = inspected(made["universal"] / "global_step7")
    assert [inspected(run)[key] == found[key] for key in ("files", "size_of_files")] == [True, True]
    states = {state["state"]: state for state in found["states"]}
    elements = states["fp32"]["elements"]
    counted = {"state": "weight", "dtype": "bfloat16", "tensors": 21, "elements": elements, "size": 2 * elements}
    assert found["parameters"] == 21 and states["weight"] == counted
    assert states["momentum_buffer"]["tensors"] + states["exp_avg"]["tensors"] == 21
    assert states["exp_avg"]["size"] == 4 * states["exp_avg"]["elements"]


def test_a_folder_of_steps_is_followed_or_listed(made: dict[str, Path], tmp_path: Path) -> None:
    """Fixed: of a file `latest` beside steps of DCP, as a loop writes it, it was said that its step is missing."""
    run = tmp_path / "run"
    for name in ("step-3", "step-7"):
        shutil.copytree(made["dcp"], run / name)
    (run / "latest").write_text("step-7\n")
    found, step = inspected(run), inspected(run / "step-7")
    assert found | {"path": ""} == step | {"path": ""} and differing(run, run / "step-7", "--from-a", "dcp")["equal"]
    succeeds("convert", run, tmp_path / "to", "--to", "dcp")
    assert differing(tmp_path / "to", made["dcp"])["different"] == []
    there = "give a folder in it: step-3 (dcp), step-7 (dcp)"
    for text, said in (("step-9", "found 'step-9'"), ("", "latest is empty"), (None, f"found none; {there}")):
        (run / "latest").unlink() if text is None else (run / "latest").write_text(text)
        for words in (("inspect", run), ("inspect", run, "--from", "dcp"), ("diff", run, run)):
            error = refused(*words)
            assert said in error and there in error and "b'" not in error, error
    (run / "step-7" / ".metadata").unlink()
    (run / "latest").write_text("step-7")
    assert "its file latest names 'step-7', which is none; give a folder in it: step-3 (dcp)" in refused("inspect", run)
    shutil.rmtree(tmp_path / "to")
    assert "give a folder in it: run/step-3 (dcp)" in refused("inspect", tmp_path)


def test_tensors_are_listed_by_glob(made: dict[str, Path]) -> None:
    """Without being read: of a name, of a state, and of all."""
    look = ("inspect", made["source"], "--no-check", "--json", "--tensors")
    found, everything = formats.read(made["source"]), json.loads(succeeds(*look, "*"))
    known = {(n, key): t for n, param in found.params.items() for key, t in param.tensors.items()}
    listed = {(each["name"], each["state"]): each for each in everything["tensors"]}
    assert listed.keys() == known.keys() and sum(each["size"] for each in listed.values()) == everything["size"]
    for place, each in listed.items():
        assert (tuple(each["shape"]), f"torch.{each['dtype']}") == (known[place].shape, str(known[place].dtype))
    for glob, states in (("*layers.0.mlp.linear_fc2.weight", None), ("*.exp_avg", {"exp_avg"})):
        some = json.loads(succeeds(*look, glob))["tensors"]
        assert some and all(each in everything["tensors"] for each in some)
        assert states in (None, {each["state"] for each in some})
    text = succeeds("inspect", made["source"], "--no-check", "--tensors", "output_layer.weight")
    assert "output_layer.weight" in text and "16 x 8" in text
    assert "no tensor has a name like 'output.*'; " in refused("inspect", made["source"], "--tensors", "output.*")


def test_converted_ones_are_equal_whatever_their_formats(made: dict[str, Path]) -> None:
    """An export lacks states, and a hint says so."""
    for a, b in (("source", "universal"), ("source", "dcp"), ("dcp", "universal")):
        assert differing(made[a], made[b])["different"] == [], (a, b)
    found = differing(made["source"], made["safetensors"], "--names-b", "megatron-core", "--weights")
    assert found["different"] == [] and found["equal"] == 21
    weights = load_file(made["safetensors"] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16} and len(weights) == 21
    found = differing(made["source"], made["safetensors"])
    assert {entry["what"] for entry in found["different"] if entry["key"] == "exp_avg"} == {"only in A"}
    assert any("B has no optimizer state; --weights" in note for note in found["notes"])


def test_hugging_faces_names_with_numbers_that_are_given(source: Path, tmp_path: Path) -> None:
    folder, wide = tmp_path / "hf", tmp_path / "wide"
    llama = ("--to", "safetensors", "--names", "hf-llama")
    said = refused("convert", source, folder, *llama)
    assert "two of heads, query_groups and kv_channels" in said and not folder.exists()
    numbers = ("--heads", 4, "--query-groups", 2, "--kv-channels", 2)
    succeeds("convert", source, wide, *llama, "--dtype", "float32", *numbers)
    weights = load_file(wide / "model.safetensors")
    assert weights["model.layers.0.self_attn.q_proj.weight"].shape == (8, 8)
    assert weights["model.layers.2.mlp.gate_proj.weight"].dtype == torch.float32
    for option in ("--names-b", "--names"):
        found = differing(source, wide, option, "hf-llama", "--weights", *numbers)
        assert (found["different"], found["equal"]) == ([], 30)
    assert any("B does not record the vocabulary of its names" in note for note in found["notes"])
    succeeds("convert", source, tmp_path / "to", "--to", "universal", "--names", "hf-llama", *numbers)
    assert differing(source, tmp_path / "to", *numbers)["different"] == []  # by the names that B has


def test_a_map_of_ones_own_converts_and_compares(source: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def mine(name, tensor, model): return {'my.' + name: tensor}")
    own = ("--map", f"{tmp_path / 'own.py'}:mine")
    succeeds("convert", source, tmp_path / "to", "--to", "universal", *own)
    assert all(name.startswith("my.") for name in formats.read(tmp_path / "to").params)
    assert differing(source, tmp_path / "to", *own)["different"] == []
    both = ("--names", "hf-llama", *own)
    for words in (("convert", source, tmp_path / "two", "--to", "dcp"), ("diff", source, tmp_path / "to")):
        assert "expected --names or --map, found both" in refused(*words, *both)


# Options
WRONG = {
    "--to univrsal": "--to: unknown target 'univrsal'; did you mean 'universal'?",
    "--to dcp --from megatron-tourch": "did you mean 'megatron-torch'?",
    "--to dcp --names hf-lama": "unknown names 'hf-lama'; did you mean 'hf-llama'?",
    "--to dcp --map my.py:mine": "--map my.py:mine: FileNotFoundError",
    "--to dcp --source-names hf-llama --names megatron-core": "the checkpoint has those of hf-llama",
    "--to safetensors --dtype bfloat": "unknown --dtype 'bfloat'; did you mean 'bfloat16'?",
    "--to dcp --dtype float32": "--dtype: expected --to safetensors, found --to dcp",
    "--to dcp --vocab-size 0": "Invalid value for '--vocab-size'",
    "--to dcp --heads 4": "--heads: expected a change of names, found none",
    "--to dcp --vocab-size 17": "expected at least 17 rows, the given vocabulary",
    "--to dcp --vocab-size 15": "expected untrained rows beyond the given vocabulary of 15",
}


@pytest.mark.parametrize(("options", "words"), WRONG.items())
def test_wrong_options_fail_and_nothing_is_written(source: Path, tmp_path: Path, options: str, words: str) -> None:
    before = files(source)
    said = refused("convert", source, tmp_path / "to", *options.split())
    assert words in " ".join(said.split()), said
    assert list(tmp_path.iterdir()) == [] and files(source) == before


def test_numbers_of_names_that_are_not_known_are_an_error(made: dict[str, Path], tmp_path: Path) -> None:
    said = refused("convert", made["safetensors"], tmp_path / "to", "--to", "dcp", "--vocab-size", 8)
    assert "--vocab-size: expected known names" in said and "--source-names" in said
    assert not (tmp_path / "to").exists()


def test_padding_beyond_the_given_vocabulary_is_cut(source: Path, tmp_path: Path) -> None:
    found = formats.read(source)
    params, rows = dict(found.params), found.params[EMBEDDING].shape[0]
    for name in (EMBEDDING, "output_layer.weight"):
        wider = {
            key: held(torch.cat([tensor.read(), torch.zeros(4, 8, dtype=tensor.dtype)]), key)
            for key, tensor in params[name].tensors.items()
        }
        params[name] = params[name].changed(wider)
    padded = written(tmp_path / "padded", dataclasses.replace(found, params=params), write_universal)
    succeeds("convert", padded, tmp_path / "cut", "--to", "universal", "--vocab-size", rows)
    assert differing(source, tmp_path / "cut")["different"] == []
    both = {(entry["name"], entry["what"]) for entry in differing(source, padded)["different"]}
    assert both == {(name, "shape [16, 8] in A, [20, 8] in B") for name in (EMBEDDING, "output_layer.weight")}


def test_a_file_stands_for_its_folder_and_a_format_for_itself(made: dict[str, Path]) -> None:
    assert inspected(made["safetensors"] / "model.safetensors") == inspected(made["safetensors"])
    said = refused("inspect", made["universal"], "--from", "dcp")
    assert "expected torch.distributed.checkpoint, of" in said and "say --from universal, or leave it out" in said


def test_a_terminated_conversion_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm does at a job's limit."""
    monkeypatch.setattr(write_dcp, "write", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert lwopt("convert", source, tmp_path / "to", "--to", "dcp").code == 143
    assert list(tmp_path.iterdir()) == [] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# What is printed and what is written
def test_what_was_done_or_would_be_is_said(source: Path, tmp_path: Path) -> None:
    words = ("convert", source, tmp_path / "to", "--to", "dcp")
    assert "Nothing was written (--dry-run)." in succeeds(*words, "--dry-run")
    dry = json.loads(succeeds(*words, "--dry-run", "--json"))
    assert not dry["result"]["written"] and list(tmp_path.iterdir()) == []
    found = json.loads(succeeds(*words, "--json"))
    assert found["source"]["format"] == "megatron torch_dist" and found["source"]["names"] == "megatron-core"
    assert found["result"]["format"] == "torch dcp" and found["result"]["path"] == str(tmp_path / "to")
    assert found["result"]["written"] and found["result"]["step"] == 7
    states = {state["state"]: state for state in found["result"]["states"]}
    assert "fp32" not in states
    assert states == {state["state"]: state for state in inspected(tmp_path / "to")["states"]}
    assert "already exists" in refused(*words, "--dry-run")


def test_the_source_and_its_newest_step_are_not_replaced(made: dict[str, Path], tmp_path: Path) -> None:
    cases = [("source", "run", "dcp"), ("source", ".", "dcp"), ("universal", "run", "universal")]
    for key, where, target in cases:
        folder = tmp_path / f"{target} {where}"
        shutil.copytree(made[key], folder / "run")
        before = files(folder)
        assert "already exists" in refused("convert", folder / "run", folder / where, "--to", target)
        assert files(folder) == before


def test_what_lies_beside_a_checkpoint_comes_along(made: dict[str, Path], tmp_path: Path) -> None:
    """A trainer's files and the model's: neither weights nor anything else, and never over another step's."""
    run, config = Path(shutil.copytree(made["universal"], tmp_path / "run")), {"dtype": "float32", "heads": 2}
    model = {"config.json": json.dumps(config), "tokenizer.json": "words"}
    of_run = {"trainer_state.json": "{}", "rng_state_1.pth": "random", "custom_checkpoint_0.pkl": "mine"}
    others = {"model.safetensors": "weights", "log.txt": "mine"}
    for name, text in {**model, **of_run, **others}.items():
        (run / name).write_text(text)
    succeeds("convert", run, tmp_path / "to", "--to", "universal")
    added = {name: text for name, text in files(tmp_path / "to").items() if "/" not in name}
    assert added.keys() == {*model, *of_run, "latest_universal"}
    assert {name: added[name].decode() for name in (*model, *of_run)} == model | of_run
    step, dtype = tmp_path / "to" / "global_step7", ("--dtype", "bf16")
    succeeds("convert", step, tmp_path / "weights", "--to", "safetensors", *dtype)
    exported = files(tmp_path / "weights")
    assert exported.keys() == {*model, "model.safetensors", "lwopt_manifest.json"}
    assert json.loads(exported["config.json"]) == {**config, "dtype": "bfloat16"}
    step.rename(step.with_name("global_step6"))
    (run / "trainer_state.json").write_text("another step")
    before = files(tmp_path / "to")
    assert "trainer_state.json already exists" in refused("convert", run, tmp_path / "to", "--to", "universal")
    assert files(tmp_path / "to") == before
    (run / "trainer_state.json").write_text("{}")
    succeeds("convert", run, tmp_path / "to", "--to", "universal")


def test_a_models_files_may_lie_above_a_step_of_torchs(made: dict[str, Path], tmp_path: Path) -> None:
    """Of a loop that saves each step into a new folder. Fixed: An export had no config.json, and nothing said so."""
    run, model = tmp_path / "run", {"config.json": '{"model_type": "llama"}', "tokenizer.json": "words"}
    step = Path(shutil.copytree(made["dcp"], run / "step-7"))
    lacks = "from_pretrained needs a config.json, and none lies beside the checkpoint"

    def exported(name: str) -> tuple[dict[str, bytes], str]:
        printed = succeeds("convert", step, tmp_path / name, "--to", "safetensors")
        return files(tmp_path / name), " ".join(printed.split())

    for name, text in {**model, "config.json": '{"of": "another program"}', "trainer_state.json": "{}"}.items():
        (run / name).write_text(text)
    kept, said = exported("another")
    assert not kept.keys() & model.keys() and lacks in said and str(tmp_path / "another") in said
    (run / "config.json").write_text(model["config.json"])
    kept, said = exported("above")
    assert {name: kept[name].decode() for name in model} == model and lacks not in said
    assert "trainer_state.json" not in succeeds("convert", step, tmp_path / "to", "--to", "universal")
    (step / "config.json").write_text(nearer := '{"model_type": "gpt2"}')
    kept, _ = exported("nearer")
    assert kept["config.json"].decode() == nearer and "tokenizer.json" not in kept


def test_a_step_keeps_the_name_that_its_trainer_asks_for(made: dict[str, Path], tmp_path: Path) -> None:
    """Accelerate asks for ``pytorch_model``, Lightning for ``checkpoint``."""
    run = Path(shutil.copytree(made["universal"], tmp_path / "run"))
    (run / "global_step7").rename(run / "checkpoint")
    (run / "latest_universal").write_text("checkpoint")
    succeeds("convert", run, tmp_path / "to", "--to", "universal")
    assert {path.name for path in (tmp_path / "to").iterdir()} == {"checkpoint", "latest_universal"}
    assert (tmp_path / "to" / "latest_universal").read_text() == "checkpoint"


def test_tables_fit_into_the_terminal(made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch_dist(tmp_path / "other", muon=False)
    convert = ("convert", made["source"], tmp_path / "to", "--to", "universal", "--dry-run")
    for width, words in itertools.product((80, 120), (convert, ("inspect", other), ("diff", made["source"], other))):
        terminal = Console(width=width, highlight=False, markup=False)
        monkeypatch.setattr("lwopt_backend.engines.output.standard_output", lambda terminal=terminal: terminal)
        lines = lwopt(*words).out.splitlines()
        assert len(lines) > 8 and max(map(len, lines)) <= width, lines
        rows = [line for line in lines if line.startswith("│")]
        assert len({len(line) for line in rows}) == 1 and not any("…" in line for line in rows)


# Differences
def checkpoint(**params: Param) -> Checkpoint:
    return Checkpoint("made here", "", "model", params, ({"lr": 0.1},), iteration=3)


def param(weight: torch.Tensor | None, step: float | None = None, **states: torch.Tensor) -> Param:
    found = {key: held(tensor, key) for key, tensor in states.items()}
    return Param(None if weight is None else held(weight, "weight"), found, step, group=0)


MASTER = torch.linspace(-1, 1, 6).view(2, 3)
NARROW, MOMENT = MASTER.bfloat16(), MASTER / 7
SAVED = {"fp32": MASTER, "exp_avg": MOMENT}
WHOLE = param(NARROW, 3.0, **SAVED)
OWNED = dataclasses.replace(WHOLE, owner_states={0: {"GG": [torch.ones(2)], "count": 3}})
OTHERS: list[tuple[Param, dict[str, str]]] = [
    (WHOLE, {}),
    (param(MASTER, 3.0, exp_avg=MOMENT), {}),  # the master as weight
    (param(None, 3.0, **SAVED), {}),
    (param(NARROW, 3.0, exp_avg=MOMENT), {"fp32": "4 of 6 elements differ; B has no master weight"}),
    (param(NARROW, 3.0, fp32=MASTER, exp_avg=MOMENT.nextafter(MASTER)), {"exp_avg": "6 of 6 elements differ"}),
    (param(NARROW, 4.0, **SAVED), {"step": "3 in A, 4 in B"}),
    (param(NARROW, **SAVED), {"step": "3 in A, no number in B"}),
    (param(NARROW, 3.0, **SAVED, more=MASTER), {"more": "only in B"}),
    (param(NARROW, 3.0, fp32=MASTER, exp_avg=MASTER[:1]), {"exp_avg": "shape [2, 3] in A, [1, 3] in B"}),
    (OWNED, {"owner.0.GG.0": "only in B", "owner.0.count": "only in B"}),
]


def test_differences_are_found_and_named() -> None:
    for other, expected in OTHERS:
        found = list(differences(checkpoint(a=WHOLE), checkpoint(a=other)))
        assert {entry.key: entry.what for entry in found if entry.what} == expected
        assert len(found) > len(expected) or not expected


def test_owners_state_buffers_names_and_bits_are_compared() -> None:
    """A zero's sign and a NaN count as bits do."""
    owned = dataclasses.replace(OWNED, owner_states={0: {"GG": [torch.tensor([1.0, 1.5])], "count": 4}})
    nan, (ones, twos) = float("nan"), (held(torch.full((2,), value), "buffer") for value in (1.0, 2.0))
    zero, negative = param(torch.tensor([0.0, nan, 1.0])), param(torch.tensor([-0.0, nan, nan]))
    one = dataclasses.replace(checkpoint(a=OWNED, b=WHOLE, z=zero), buffers={"passes": ones})
    other = dataclasses.replace(checkpoint(a=owned, c=WHOLE, z=negative), buffers={"passes": twos}, tied={"d": "a"})
    found = {(entry.name, entry.key): entry for entry in differences(one, other) if entry.what}
    of_a = {("a", "owner.0.GG.0"): "1 of 2 elements differ", ("a", "owner.0.count"): "3 in A, 4 in B"}
    rest = {("b", ""): "only in A", ("c", ""): "only in B", ("z", "weight"): "2 of 3 elements differ"}
    expected = {**of_a, **rest, ("passes", "buffer"): "2 of 2 elements differ"}
    assert {key: entry.what for key, entry in found.items()} == expected
    assert found["a", "owner.0.GG.0"].largest == 0.5 and found["z", "weight"].largest == float("inf")
    assert found["passes", "buffer"].elements == 2


def written(folder: Path, content: Checkpoint, writer: Any) -> Path:
    folder.mkdir()
    writer.write(content, folder)
    return folder


def test_differences_in_json_have_no_infinities(tmp_path: Path) -> None:
    values = {"a": 1.0, "b": float("inf")}
    folders = [written(tmp_path / n, checkpoint(w=param(torch.tensor([v, 2.0]))), write_dcp) for n, v in values.items()]
    run, text = lwopt("diff", *folders, "--json"), lwopt("diff", *folders)
    found = json.loads(run.out, parse_constant=lambda word: pytest.fail(word))
    assert run.code == 1 and found["different"][0]["largest"] == "inf"
    assert text.code == 1 and "1 of 2 elements differ" in text.out and "1 differ." in text.out


def test_diff_tells_steps_options_and_schedules(source: Path, tmp_path: Path) -> None:
    """Fixed: `lwopt diff` compared no param groups, schedules and entries of the program. Steps, options, schedules and
    entries that differ are told. Param groups are known by their parameters; without ``--weights`` each of these is a
    difference."""
    found = formats.read(source)
    assert found.scheduler is not None
    groups = tuple({**group, "lr": 0.5} if n == 0 else group for n, group in enumerate(found.groups))
    params = {name: dataclasses.replace(p, group=len(groups) - 1 - (p.group or 0)) for name, p in found.params.items()}
    by_group = {"milestones": {4: 1}, "base_lrs": [float(n) for n in range(len(groups))]}
    one = dataclasses.replace(found, scheduler=by_group, client={"mine": {"rng": torch.ones(3), "seen": [1, 2]}})
    other = dataclasses.replace(
        found,
        iteration=9,
        params=params,
        groups=groups[::-1],
        scheduler={"milestones": {"4": 1}, "base_lrs": by_group["base_lrs"][::-1]},
        client={"mine": {"rng": torch.zeros(3), "seen": [1, 3]}},
    )
    folders = [written(tmp_path / name, each, write_universal) for name, each in (("a", one), ("b", other))]
    different = differing(*folders)["different"]
    assert {(entry["name"], entry["key"], entry["what"]) for entry in different} == {
        ("counters", "step", "7 in A, 9 in B"),
        (f"param group 0, in B {len(groups) - 1}", "lr", "0.02 in A, 0.5 in B"),
        ("scheduler", "milestones[4]", "only in A: 1"),
        ("scheduler", "milestones.4", "only in B: 1"),
        ("program", "mine.rng", "3 of 3 elements differ"),
        ("program", "mine.seen[1]", "2 in A, 3 in B"),
    }
    assert differing(*folders, "--weights")["different"] == []
    notes = differing(source, written(tmp_path / "c", checkpoint(w=param(torch.ones(2))), write_dcp))["notes"]
    assert any("No parameter has the same name in both" in note and "--names-b" in note for note in notes)


# Safetensors
def test_safetensors_are_read_as_their_own_library_reads_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {"a": torch.randn(3, 5, generator=generator), "b": torch.randn(4, generator=generator).bfloat16()}
    tensors |= {"c": torch.arange(6).view(2, 3), "d": torch.tensor(2.5), "e": torch.empty(0, 4)}
    tensors |= {"f": torch.tensor([True, False]), "g": torch.ones(3).to(torch.float8_e5m2)}
    tensors |= {"h": torch.ones(2).to(torch.float8_e8m0fnu), "i": torch.tensor([2**31 + 1]).to(torch.uint32)}
    tensors |= {"j": torch.randn(2, dtype=torch.complex64, generator=generator)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    read = safetensors_folder.read(tmp_path)
    assert set(read.params) == {*"abdeghj"} and set(read.buffers) == {*"cfi"}
    found = {name: param.best for name, param in read.params.items()} | dict(read.buffers)
    for name, tensor in tensors.items():
        assert found[name].read().dtype == tensor.dtype and same(found[name].read(), tensor)
    part = dataclasses.replace(found["a"], read=lambda: pytest.fail("the whole tensor was read")).piece(4, 9)
    assert torch.equal(part.read(), tensors["a"].view(-1)[4:9])


def header(**changes: Any) -> str:
    """The header of a tensor of 8 bytes."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}
    return json.dumps({"a": {key: value for key, value in entry.items() if value is not None}})


def test_headers_of_safetensors_that_make_no_sense_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for content, words in (
        ("{", "invalid JSON in header"),
        (header(dtype="F4", shape=[16]), "found F4, which is not supported"),
        (header(shape=[1] * 33 + [2]), "expected a shape as a tuple of at most 32 sizes"),
        (f"{header()[:-1]},{header(shape=[1], data_offsets=[0, 4])[1:]}", "file not fully covered"),  # twice
        (header(data_offsets=None), "missing field `data_offsets`"),
    ):
        file.write_bytes(len(content).to_bytes(8, "little") + content.encode() + b"\0" * 8)
        said = refused("inspect", tmp_path)
        assert words in said and str(file) in said, content
        assert "is damaged" in said or "expected a dtype of " in said, content


def test_an_index_of_other_files_is_an_error(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for places, words in (
        ({"a": "one.safetensors", "b": "one.safetensors"}, "expected 'b', as in model.safetensors.index.json, found n"),
        ({"a": "two.safetensors"}, "two.safetensors cannot be read"),
        ({"a": "../one.safetensors"}, "leads elsewhere"),
        ({"a": "/etc/passwd"}, "leads elsewhere"),
        ({"a": 3}, "expected files by tensors' names"),
        ([], "expected files by tensors' names"),
    ):
        index.write_text(json.dumps({"weight_map": places}))
        with pytest.raises(CheckpointError, match=words):
            safetensors_folder.read(tmp_path)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_index_of_safetensors_decides_which_tensors_count(tmp_path: Path, kind: str) -> None:
    """Fixed: A safetensors file with unlisted or repeated tensors was not read. The index decides which of repeated and
    unlisted tensors count. As in transformers, whose older files are torch.save's; in a cache, files are links."""
    one, two = {"a": torch.ones(2), "b": torch.ones(3)}, {"a": torch.zeros(2), "c": torch.ones(4), "n": torch.arange(2)}
    start, save = ("model", save_file) if kind == "safetensors" else ("pytorch_model", torch.save)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "run").mkdir()
    for number, tensors in enumerate((one, two)):
        save(tensors, tmp_path / "blobs" / str(number))
        (tmp_path / "run" / f"{start}-{number}.{kind}").symlink_to(tmp_path / "blobs" / str(number))
    listed = {"a": f"{start}-0.{kind}", "c": f"{start}-1.{kind}", "n": f"{start}-1.{kind}"}
    (tmp_path / "run" / f"{start}.{kind}.index.json").write_text(json.dumps({"weight_map": listed}))
    found = formats.read(tmp_path / "run")
    assert {name: param.best.read().tolist() for name, param in found.params.items()} == {"a": [1, 1], "c": [1] * 4}
    assert found.buffers["n"].read().tolist() == [0, 1] and "1 tensor(s) that" in found.notes[0]
    (tmp_path / "run" / f"{start}.{kind}.index.json").unlink()
    (tmp_path / "run" / f"{start}-0.{kind}").rename(tmp_path / "run" / f"{start}.{kind}")
    assert formats.read(tmp_path / "run").params.keys() == {"a", "b"}
    torch.save({"a": one["a"], "head": one["a"]}, tmp_path / "pytorch_model.bin")
    assert dict(formats.read(tmp_path).tied) == {"head": "a"}


# Weights under several names
ROWS = torch.linspace(-1, 1, 6).view(3, 2)


@pytest.mark.parametrize(
    ("pair", "said"),
    {
        "a": "expected NAME=NAME of parameters, found ''",
        "c=a": "expected NAME=NAME of parameters, found 'c'",
        "a=b": "expected the trained a last; exchange the two",
        "other=a": "expected equal weights of other and a",
    }.items(),
)
def test_a_name_that_is_wrongly_said_to_be_tied_is_refused(pair: str, said: str) -> None:
    weights = {"a": param(ROWS, exp_avg=ROWS), "b": Param(held(ROWS, "b")), "other": Param(held(ROWS + 1, "other"))}
    with pytest.raises(CheckpointError, match=f"--tied {pair}: {said}"):
        ties.declared(checkpoint(**weights), [pair])
    assert ties.declared(checkpoint(**weights), ["b=a", "b=a"]).tied == {"b": "a"}


def test_parameter_without_a_known_group(tmp_path: Path) -> None:
    """It is in no group of a universal folder. Stock DeepSpeed would train it with the options of the group in which it
    is listed."""
    source = checkpoint(a=param(ROWS, exp_avg=ROWS), b=dataclasses.replace(param(ROWS, exp_avg=ROWS), group=None))
    made = convert.prepared(source, "universal", None, None, names.Numbers())
    convert.write(made, "universal", convert.destination_of(made, "universal", tmp_path))
    assert sum("the param groups of b are unknown (1 parameter(s)" in note for note in made.notes) == 1
    saved = torch.load(tmp_path / "global_step3" / "mp_rank_00_model_states.pt", weights_only=False)
    assert [list(group) for group in saved["param_shapes"]] == [["a"]]
    found = formats.read(tmp_path).params
    assert [found[name].group for name in "ab"] == [0, None] and same(found["b"].states["exp_avg"].read(), ROWS)
