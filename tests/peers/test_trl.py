"""TRL's SFTTrainer training LoRA adapters of PEFT, with the losses of torch.optim; the page's trainers; two scripts as
they are.

These are TRL's sft.py and transformers' run_clm.py, which no package has: LWOPT_TRANSFORMERS_EXAMPLES names its folder,
examples/pytorch/language-modeling of a checkout; without it, that script is not run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lwopt_backend import LayerWiseOptimizer
from tests.docs import test_sixteen_bits as bits
from tests.docs.test_sixteen_bits import HALF, STEPS, Run
from tests.support.command_line import lwopt
from tests.support.launcher import ROOT, succeeds, torchrun
from tests.support.pages import blocks, unpack_page
from tests.support.ranks import RankPool
from tests.support.zero import MUON, newton_schulz_in_float32

sys.path.append(str(ROOT / "examples"))

ENTRY = {"lr": "auto", "weight_decay": "auto", "adamw": {"lr": 3e-4}}
TEXTS = [f"Question {n}: what is {n} plus {n}? Answer: {2 * n}." for n in range(40)]


def of_bytes() -> Any:
    """A tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:254]
    bytes_alone = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="</s>", pad_token="<pad>")


def losses(folder: Path, kind: str) -> tuple[list[float], list[str]]:
    """The losses of ten steps, and the names that the optimizer trains as matrices."""
    from datasets import Dataset
    from hugging_face import small_llama
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    ours = (lambda: LayerWiseOptimizer, {"matrix": {"name": "muon", "ns_dtype": "float32", **MUON}, "report": False})
    theirs = (lambda: lambda model: torch.optim.Muon([p for p in model.parameters() if p.requires_grad], **MUON), {})
    arguments = SFTConfig(
        output_dir=str(folder),
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=MUON["lr"],
        weight_decay=MUON["weight_decay"],
        max_length=64,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=1,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    torch.manual_seed(1)
    trainer = SFTTrainer(
        small_llama(2, 32),
        args=arguments,
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        processing_class=of_bytes(),
        peft_config=adapters,
        optimizer_cls_and_kwargs=ours if kind == "ours" else theirs,
    )
    with newton_schulz_in_float32():
        trainer.train()
    names = {id(param): name for name, param in trainer.model.named_parameters()}
    matrices = [names[id(p)] for g in trainer.optimizer.param_groups if g.get("rule") == "muon" for p in g["params"]]
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], matrices


def test_adapters_are_matrices_and_train_as_with_torch_optim(tmp_path: Path) -> None:
    ours, matrices = losses(tmp_path / "ours", "ours")
    theirs, _ = losses(tmp_path / "theirs", "theirs")
    assert len(ours) == 10 and ours[-1] < ours[0]
    assert ours == pytest.approx(theirs, rel=1e-5)
    layers = [f"{n}.{part}" for n in range(2) for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")]
    wanted = {f"base_model.model.model.layers.{name}.lora_{side}.default.weight" for name in layers for side in "AB"}
    assert set(matrices) == wanted


def with_texts(folder: Path) -> None:
    """A model and texts, as the page's script has them."""
    from hugging_face import small_llama

    small_llama(2, 32).save_pretrained(folder / "model")
    of_bytes().save_pretrained(folder / "model")
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))


ON_CPUS = f"""import sys
sys.path.append({str(ROOT / "examples")!r})
from hugging_face import shard_on_cpus_too
shard_on_cpus_too()
"""
SMALL = '"out", use_cpu=True, bf16=False, gradient_checkpointing=False, max_length=64, max_steps=6, logging_steps=1, '
PREFERENCES = f"""
from datasets import Dataset
from trl import DPOConfig
rows = [dict(prompt=f"{{n}} plus {{n}}?", chosen=f"{{2 * n}}", rejected="0") for n in range(40)]
args = DPOConfig({SMALL}report_to="none", fsdp=True, fsdp_config={{"version": 2}})
MuonDPOTrainer("model", args=args, train_dataset=Dataset.from_list(rows)).train()
"""


def test_the_pages_trainers_train(tmp_path: Path) -> None:
    """The script, and then DPO with the same arguments, whose first loss is log 2; on two ranks of FSDP2."""
    with_texts(tmp_path)
    command = unpack_page("start/trainers", "trl_train.py", tmp_path, sys.executable)
    (derived,) = blocks("start/trainers", "python", "trl")
    script = tmp_path / "trl_train.py"
    script.write_text(ON_CPUS + script.read_text().replace('"out", ', SMALL) + derived.text + PREFERENCES)
    printed = succeeds(command, tmp_path)
    found = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert printed.count("Routing: 14 of 21") == 2, printed
    assert len(found) == 12 and found[5] < found[0] and found[6] == pytest.approx(0.6931, abs=1e-3), printed
    assert found[11] < found[6], printed


def zero2(path: Path) -> None:
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_clipping"), "auto")
    optimizer = {"type": "LayerWiseMuon", "params": ENTRY}
    path.write_text(json.dumps({**auto, "zero_optimization": {"stage": 2}, "optimizer": optimizer}))


@pytest.mark.parametrize(
    ("adapters", "routing"),
    [(["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "down_proj"], "8 of 8"), ([], "14 of 21")],
)
def test_its_own_script_trains_unmodified(tmp_path: Path, adapters: list[str], routing: str) -> None:
    """``trl/scripts/sft.py`` under DeepSpeed, all weights and with LoRA, through ``lwopt_backend.run``."""
    with_texts(tmp_path)
    zero2(tmp_path / "ds_config.json")
    (package,) = importlib.util.find_spec("trl").submodule_search_locations  # type: ignore[union-attr,misc]
    arguments = {
        "model_name_or_path": tmp_path / "model",
        "dtype": "float32",
        "bf16": False,
        "dataset_name": tmp_path / "texts",
        "output_dir": tmp_path / "out",
        "deepspeed": tmp_path / "ds_config.json",
        "learning_rate": 0.02,
        "max_steps": 6,
        "max_length": 64,
        "logging_steps": 1,
        "report_to": "none",
        "gradient_checkpointing": False,
    }
    given = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    printed = torchrun("-m", "lwopt_backend.run", f"{package}/scripts/sft.py", *given, *adapters, processes=1)
    found = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert f"Routing: {routing}" in printed, printed
    assert len(found) == 6 and found[-1] < found[0], printed


def test_transformers_script_trains_on_both_engines(tmp_path: Path) -> None:
    """transformers' own script trains unmodified, alike on both engines. ``run_clm.py`` on two ranks of DeepSpeed and
    of FSDP2, through ``lwopt_backend.run``."""
    if "LWOPT_TRANSFORMERS_EXAMPLES" not in os.environ:
        pytest.skip("LWOPT_TRANSFORMERS_EXAMPLES: no folder with run_clm.py is named")
    of_bytes().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS * 2))
    zero2(tmp_path / "ds_config.json")
    (tmp_path / "fsdp.json").write_text(json.dumps({"version": 2}))
    on_cpus = "import sys; sys.path.append({!r}); from hugging_face import shard_on_cpus_too; shard_on_cpus_too()\n"
    start = on_cpus.format(str(ROOT / "examples")) + "from lwopt_backend import run; run.main(sys.argv[1:])\n"
    (tmp_path / "start.py").write_text(start)  # Accelerate shards on no CPU by itself
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 256, "resid_pdrop": 0.0}
    sizes |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 254, "eos_token_id": 254}
    arguments = {
        "model_type": "gpt2",
        "config_overrides": ",".join(f"{key}={value}" for key, value in sizes.items()),
        "tokenizer_name": tmp_path / "tokenizer",
        "train_file": tmp_path / "texts.txt",
        "cache_dir": tmp_path / "cache",
        "block_size": 64,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": "none",
    }
    given = [part for name, value in arguments.items() for part in (f"--{name}", value)] + ["--do_train", "--use_cpu"]
    script = Path(os.environ["LWOPT_TRANSFORMERS_EXAMPLES"], "run_clm.py")
    found = []
    for start, engine in (
        (["-m", "lwopt_backend.run"], ["--deepspeed", tmp_path / "ds_config.json"]),
        (
            [tmp_path / "start.py", f"--optimizer={json.dumps(ENTRY)}"],
            ["--fsdp", "--fsdp_config", tmp_path / "fsdp.json"],
        ),
    ):
        printed = torchrun(*start, script, *given, *engine, "--output_dir", tmp_path / engine[0])
        assert "Routing: 8 of 28" in printed and "distributed & accumulation) = 8" in printed, printed
        found.append(re.findall(r"'loss': '?([\d.]+)", printed))
    assert found[0] == found[1] and len(found[0]) == 6 and float(found[0][-1]) < float(found[0][0])


# 16 bits
def fine_tuned(engine: int | str, precision: str, out: Path, resume: Path | None = None) -> tuple[Run, list[Any]]:
    """On every rank, with TRL's own settings, bf16 among them; and of what ``SFTTrainer`` computed losses."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    batches: list[Any] = []

    class Noted(SFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *more: Any, num_items_in_batch: Any, **options: Any) -> Any:
            batches.append((dict(inputs), num_items_in_batch))
            return super().compute_loss(model, inputs, *more, num_items_in_batch=num_items_in_batch, **options)

    with bits.trainers_arguments(engine, precision, out) as (arguments, optimizer):
        arguments.pop("bf16", None)  # on, as gradient checkpointing is
        del arguments["gradient_checkpointing"]
        trainer = Noted(
            bits.small_llama(1, 32),
            args=SFTConfig(**arguments, max_length=64),
            train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
            processing_class=of_bytes(),
            optimizer_cls_and_kwargs=optimizer,
        )
        return bits.run_of(trainer, resume), batches


def by_loop(engine: int | str, precision: str, of_ranks: list[list[Any]]) -> Run:
    """Without TRL, but for its head, which computes log-probabilities of tokens."""
    from trl.trainer.utils import add_fused_lm_head

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        inputs, tokens = batch
        found = model(**inputs, fused_lm_head=True).log_probs
        return -found.sum() / tokens * torch.distributed.get_world_size() * bits.accumulation()

    model = bits.recomputing()
    add_fused_lm_head(model)
    batches = of_ranks[torch.distributed.get_rank()]
    if isinstance(engine, int):
        return bits.by_deepspeed(model, batches, engine, precision, loss_of)
    return bits.by_fsdp2(model, batches, loss_of)


CASES = [(1, "bf16"), (2, "bf16"), (3, "bf16"), (2, "fp16"), (bits.FSDP2, "bf16")]


@pytest.mark.parametrize(("engine", "precision"), CASES)
def test_in_16_bits_it_is_the_loop_to_the_bit(
    rank_pools: dict[int, RankPool], tmp_path: Path, engine: int | str, precision: str
) -> None:
    """With accumulation, clipping and recomputation. Other ranks go on from the weights of two."""
    two, half = rank_pools[2], tmp_path / "whole" / f"checkpoint-{HALF}"
    runs, of_ranks = zip(*two.run(fine_tuned, engine, precision, tmp_path / "whole"))
    loop, *_ = two.run(by_loop, engine, precision, list(of_ranks))
    whole = runs[0]
    assert (whole.losses, whole.norms) == (loop.losses, loop.norms) and len(set(whole.losses)) == STEPS
    bits.same(whole.weights, loop.weights)
    (resumed, _), *_ = two.run(fine_tuned, engine, precision, tmp_path / "resumed", half)
    assert (resumed.losses, resumed.norms) == (whole.losses[HALF:], whole.norms[HALF:])
    bits.same(resumed.weights, whole.weights)
    moved, ranks = half, 4
    if isinstance(engine, int):
        moved, ranks = tmp_path / "moved", 1
        assert lwopt("convert", half, moved, "--to", "universal").code == 0
    (elsewhere, _), *_ = rank_pools[ranks].run(fine_tuned, engine, precision, tmp_path / "elsewhere", moved)
    assert elsewhere.losses[0] == pytest.approx(whole.losses[HALF], rel=1e-6)
    exported, last = tmp_path / "weights", tmp_path / "whole" / f"checkpoint-{STEPS}"
    assert lwopt("convert", last, exported, "--to", "safetensors", "--dtype", "bfloat16").code == 0
    bits.same(load_file(exported / "model.safetensors"), {n: w.bfloat16() for n, w in whole.weights.items()})


def test_stage_0_in_bf16_is_refused_by_name(rank_pools: dict[int, RankPool], tmp_path: Path) -> None:
    for told in rank_pools[2].errors(fine_tuned, 0, "bf16", tmp_path):
        assert "zero_optimization.stage is 0 with a model trained in bfloat16" in told and "use stage 1" in told
