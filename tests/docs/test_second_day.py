"""docs/start/save_and_resume.md: its commands run one after the other, and a run that moved goes on as before."""

import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lwopt_backend.checkpoint import formats
from tests.docs.test_hugging_face import HIDDEN, TOLERANCE, run_example
from tests.support.command_line import lwopt
from tests.support.launcher import ROOT, python, succeeds
from tests.support.pages import blocks
from tests.support.ranks import RankFailed, RankPool, free_port

sys.path.append(str(ROOT / "examples"))

from hugging_face import small_llama  # noqa: E402

PAGE = "start/save_and_resume"
WORDS = 16  # of the tokenizer, whose text is numbers


def run_there(folder: str, arguments: list[str], variables: dict[str, str]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return run_example(arguments, variables, joined=True)


@pytest.fixture(scope="module")
def walked(
    request: pytest.FixtureRequest, rank_pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The folder in which the page's commands were run, and what each printed; by launchers in `make test-full`."""
    folder, printed = tmp_path_factory.mktemp("day"), dict[str, str]()
    small_llama(1, 32).save_pretrained(folder / "model")
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)} | {"?": WORDS}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", pad_token="?").save_pretrained(folder / "model")
    for _, name, text in blocks(PAGE):
        if "." in name:
            (folder / name).write_text(text)
    for command in "".join(text for _, name, text in blocks(PAGE) if name == "run").splitlines():
        program, *arguments = shlex.split(command)
        if program == "lwopt":
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                ended = lwopt(*arguments)
            assert ended.code == 0, (command, ended)
            printed[command] = ended.out
        elif program == "python":
            printed[command] = python(*arguments, cwd=folder)
        elif request.config.getoption("full"):
            port = f"torchrun --master_port {free_port()} "
            printed[command] = succeeds(port + command.removeprefix("torchrun "), folder, **HIDDEN)
        else:
            ranks = rank_pools[int(arguments[1])]
            variables = {**HIDDEN, "MASTER_PORT": str(free_port())}
            try:
                printed[command] = "".join(ranks.run(run_there, str(folder), arguments[2:], variables))
            finally:
                ranks.close()
    return folder, printed


def logged(folder: Path, key: str, step: int = 4) -> list[float]:
    state = json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return [row[key] for row in state["log_history"] if key in row]


def test_a_run_goes_on_as_it_would_have(walked: tuple[Path, dict[str, str]]) -> None:
    """On the same ranks exactly; elsewhere, sums are added in another order."""
    folder, _ = walked
    for key in ("eval_loss", "loss"):
        whole = logged(folder / "out", key)
        assert len(whole) == {"eval_loss": 2, "loss": 4}[key] and whole[-1] < whole[0] - 0.1
        assert logged(folder / "same_ranks", key) == whole
        for elsewhere in ("one_rank", "stage3"):
            assert logged(folder / elsewhere, key) == pytest.approx(whole, rel=TOLERANCE)
        assert logged(folder / "lora_one", key) == pytest.approx(logged(folder / "lora", key), rel=TOLERANCE)


@pytest.mark.parametrize(("number", "options"), [(1, []), (2, ["--stage", "3"])])
def test_a_refusal_gives_the_pages_command(
    walked: tuple[Path, dict[str, str]], rank_pools: dict[int, RankPool], number: int, options: list[str]
) -> None:
    """Fixed: What was done as it said ended in transformers' FileNotFoundError: trainer_state.json."""
    folder, printed = walked
    arguments = ["second_day.py", "refused", "--resume", "out/checkpoint-2", *options]
    with pytest.raises(RankFailed) as refused:
        rank_pools[number].run(run_there, str(folder), arguments, {**HIDDEN, "MASTER_PORT": str(free_port())})
    rank_pools[number].close()
    assert "lwopt convert SRC DST --to universal, and load DST" in str(refused.value)
    assert "lwopt convert out/checkpoint-2 moved --to universal" in printed


def test_an_export_has_the_weights_and_what_they_need(walked: tuple[Path, dict[str, str]]) -> None:
    folder, printed = walked
    kept, made = (load_file(folder / path / "model.safetensors") for path in ("stage3/checkpoint-4", "weights"))
    assert kept.keys() == made.keys() and all(torch.equal(made[name], kept[name].bfloat16()) for name in kept)
    assert {path.name for path in (folder / "weights").iterdir()} >= {"tokenizer.json", "generation_config.json"}
    assert "torch.bfloat16 1 2 3" in printed["python generate.py weights"]
    base, merged = (load_file(folder / path / "model.safetensors") for path in ("model", "merged"))
    changed = [name for name in base if not torch.equal(base[name], merged[name])]
    assert changed == ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.v_proj.weight"]
    assert "torch.float32 1 2 3" in printed["python generate.py merged"]


def test_muon_begins_where_adamw_ended(walked: tuple[Path, dict[str, str]]) -> None:
    folder, _ = walked
    begun, ended = logged(folder / "adamw", "loss")[0], logged(folder / "adamw", "eval_loss")[-1]
    assert ended < 0.8 * begun and logged(folder / "muon", "loss")[0] == pytest.approx(ended, rel=0.1)


def test_a_folder_that_is_not_whole_is_seen(walked: tuple[Path, dict[str, str]]) -> None:
    folder, _ = walked
    whole = folder / "out" / "checkpoint-4"
    assert lwopt("inspect", whole).code == 0
    file = next(whole.glob("global_step4/*rank_1*optim_states.pt"))
    file.rename(folder / file.name)
    try:
        assert lwopt("inspect", whole).code != 0
    finally:
        (folder / file.name).rename(file)
    assert formats.read(whole).iteration == 4
