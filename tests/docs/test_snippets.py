"""Every Python block of the README and of docs/ runs: a script in the test of its page, a fragment here. A fragment
runs on one rank, in a separate folder, between lines that give it what its page has before it and lines that use what
it made."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lwopt_backend.config.hosts import ZeROConfig
from lwopt_backend.groups.choices import settings_of
from lwopt_backend.planner.setting import cluster_named
from tests.support.launcher import ROOT, surroundings_kept
from tests.support.pages import PAGES, blocks
from tests.support.ranks import RankPool

SCRIPTS = {  # by the test that runs them
    "test_pages.py": {"train.py", "client.py", "fsdp2_train.py", "plain_train.py", "modules_train.py"}
    | {"move_a_run.py", "own_rule.py", "pipeline_train.py"},
    "test_checkpoints.py": {"train.py", "load_fsdp2.py", "load_weights.py", "my_names.py"},
    "test_second_day.py": {"second_day.py", "generate.py", "merge.py"},
    "peers/test_torchtitan.py": {"torchtitan"},
    "peers/test_emerging.py": {"emerging"},
    "peers/test_lightning.py": {"lightning_train.py"},
    "peers/test_trl.py": {"trl_train.py", "trl"},
}

PLAIN = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from lwopt_backend import LayerWiseOptimizer, ModuleOptimizers

def step(model, optimizer):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

batch = torch.randn(16, 8)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""
OPTIMIZER = PLAIN + "optimizer = LayerWiseOptimizer(model, lr=0.02, report=False)\nstep(model, optimizer)\n"
TOKENS = """
class OfTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, input_ids, labels):
        scores = self.head(self.hidden(self.embedding(input_ids)).relu())
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())

model = OfTokens()
batch = {key: torch.zeros(2, 3, dtype=torch.int64) for key in ("input_ids", "labels")}
"""
BLOCKS = """
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return inputs
model = Blocks()
"""
MIXTURE = """
class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(8, 8)]), "dense": nn.Linear(8, 8)})
    def forward(self, inputs):
        return self.layer["experts"][0](self.layer["dense"](inputs))
model, ranks_with_my_experts = Mixture(), dist.new_group([0])
"""
PREDICTION = """
inner = nn.Sequential()
inner.add_module("main", nn.Linear(8, 8))
inner.add_module("mtp", nn.Sequential(nn.Linear(8, 8)))
model = nn.Sequential(inner)
"""
ENGINE = (
    PLAIN
    + """
import deepspeed
from lwopt_backend.integrations import deepspeed_zero
deepspeed_zero.register()
entry = {"type": "LayerWiseMuon", "params": {"lr": 0.02, "report": False}}
json.dump({"train_batch_size": 16, "optimizer": entry, "zero_optimization": {"stage": 1}}, open("ds_config.json", "w"))
"""
)
MADE = "engine, *_ = deepspeed.initialize(model=model, config='ds_config.json')\n"
STEP_OF_ENGINE = "engine.backward(engine(batch.to(engine.device)).square().mean())\nengine.step()\n"
NAMED = (
    ENGINE
    + """
from lwopt_backend.migration import from_checkpoint
matrices, others = ["0.weight", "2.weight"], ["0.bias", "2.bias"]
params, named = dict(model.named_parameters()), {}
for cls, names in ((torch.optim.Muon, matrices), (torch.optim.AdamW, others)):
    other = cls([params[name] for name in names])
    model(batch).square().mean().backward()
    other.step()
    named |= from_checkpoint(other.state_dict(), names, source=f"torch.optim.{cls.__name__}")
"""
)
OF_ADAMW = (
    ENGINE
    + """
from deepspeed.utils import safe_get_full_fp32_param
from tests.support.command_line import lwopt
both = {"train_batch_size": 16, "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
adamw, batch = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}, batch.bfloat16()
engine, *_ = deepspeed.initialize(model=model, config={**both, "optimizer": adamw})
for _ in range(3):
    engine.backward(engine(batch).square().mean())
    engine.step()
engine.save_checkpoint("adamw")
masters = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
json.dump({**both, "optimizer": entry}, open("ds_config.json", "w"))
assert lwopt("convert", "adamw", "masters", "--to", "universal").code == 0
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""
)
SAME_MASTERS = """
for name, param in model.named_parameters():
    found = safe_get_full_fp32_param(param)
    assert torch.equal(found, masters[name]) and not torch.equal(found, found.bfloat16().float())
"""
HUGGING_FACE = f"""
sys.path.append({str(ROOT / "examples")!r})
from hugging_face import deepspeed_on_cpus_too
deepspeed_on_cpus_too()
loader, factor = torch.utils.data.DataLoader(batch, batch_size=16), lambda step: 1.0
"""
AUTO = """
entry["params"] |= {"lr": "auto", "weight_decay": "auto"}
sizes = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
json.dump({**sizes, "optimizer": entry, "zero_optimization": {"stage": 1}}, open("ds_config.json", "w"))
os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds_config.json"}
"""
FSDP2 = """
import transformers
transformers.TrainingArguments.parallel_mode = transformers.training_args.ParallelMode.DISTRIBUTED
dataset = [*batch]
"""
TRAINER = """
made = trainer.create_optimizer()
assert [group["lr"] for group in made.param_groups] == [0.02, 3e-4]
"""
HEADS = (
    PLAIN
    + """
from transformers import LlamaConfig, LlamaForCausalLM
sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 16, "num_hidden_layers": 24}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8))
optimizer = LayerWiseOptimizer(model, lr=0.02, report=False)
tokens = torch.arange(32)[None]
model(input_ids=tokens, labels=tokens).loss.backward()
seen = {"0": torch.full((32,), 200.0)}
"""
)

HEAD = """
model = nn.Sequential()
model.add_module("body", nn.Linear(8, 16))
model.add_module("lm_head", nn.Linear(16, 4))
"""

FRAGMENTS: dict[tuple[str, int], tuple[str, str]] = {  # by page and number on it: what comes before, and after
    ("README", 0): (
        f"{PLAIN}import deepspeed\nentry = {{{blocks('README', 'json')[0].text}}}\n"
        "json.dump({'train_batch_size': 16, 'zero_optimization': {'stage': 2}} | entry, open('ds_config.json', 'w'))\n",
        f"{STEP_OF_ENGINE}assert engine.basic_optimizer.plan_digest",
    ),
    ("README", 1): (PLAIN + BLOCKS, "step(model, optimizer)"),
    ("README", 2): (PLAIN, "assert optimizer.plan_digest"),
    ("checkpoints", 1): (
        f"{OPTIMIZER}optimizer.save_state_dict('dcp', iteration=3)\ndel optimizer\n",
        "assert training['iteration'] == 3",
    ),
    ("checkpoints", 4): (NAMED, STEP_OF_ENGINE),
    ("checkpoints", 5): (f"{OPTIMIZER}optimizer.save_state_dict('checkpoint')\n", "step(model, optimizer)"),
    ("checkpoints", 6): (f"{NAMED}average = torch.ones(2, 2)\n", "torch.testing.assert_close(total, 20 * average)"),
    ("from_megatron", 1): (
        f"{OPTIMIZER}images = optimizer\nlanguage = LayerWiseOptimizer(nn.Linear(8, 8), lr=0.02, report=False)\n"
        "for name, made in {'images': images, 'language': language}.items():\n    made.save_state_dict(name)\n",
        "",
    ),
    ("fsdp2", 0): (
        f"{PLAIN}{BLOCKS}fully_shard(model)\noptimizer = LayerWiseOptimizer(model, lr=0.02, report=False)\n"
        "scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)\n"
        "def loop():\n    step(model, optimizer)\n    scheduler.step()\n"
        "    return model.blocks[0].weight.full_tensor().clone()\nloop()\n",
        "save('run/step-1', 1)\nwhole = [loop(), loop()]\nassert load('run/step-1') == 1\n"
        "assert all(map(torch.equal, [loop(), loop()], whole)) and scheduler.last_epoch == 3\n"
        "from pathlib import Path\nfrom lwopt_backend.checkpoint import formats\n"
        "assert (found := formats.read(Path('run/step-1'))).iteration == 1 and found.scheduler['last_epoch'] == 1\n",
    ),
    ("matrices", 0): (PLAIN + TOKENS, "assert not fused and not unclear and found.shares\n"),
    ("matrices", 1): (
        PLAIN,
        """
attention = Attention()
attention.qkv_proj, attention.q_size, attention.kv_size = nn.Linear(8, 16), 8, 4
from lwopt_backend import explain
assert len(explain(attention)[0].matrices) == 3
""",
    ),
    ("modules", 2): (f"{OPTIMIZER}optimizers = ModuleOptimizers({{'all': optimizer}})\n", ""),
    ("optimizers", 0): (PLAIN + MIXTURE, "step(model, optimizer)"),
    ("optimizers", 1): (PLAIN, "assert [g['lr'] for g in optimizer.param_groups] == [0.02, 0.01, 1e-3]"),
    ("optimizers", 4): (f"{PLAIN}from lwopt_backend import register_elementwise\n", "step(model, optimizer)"),
    ("plain", 0): (PLAIN + MIXTURE, "step(model, optimizer)"),
    ("plain", 1): (
        f"{OPTIMIZER}step, scheduler = 1, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)\n",
        "assert more['iteration'] == 1",
    ),
    ("plain", 2): (OPTIMIZER, "step(model, optimizer)"),
    ("rates", 0): (
        PLAIN + HEAD,
        "assert 3e-4 / 64 in [group['lr'] for group in optimizer.param_groups]",
    ),
    ("rates", 1): (PLAIN + PREDICTION, "assert optimizer.clip_group_norms.keys() == {'mtp'}"),
    ("rates", 2): (HEADS, ""),
    ("loop", 0): (
        f"{PLAIN}model.layers = torch.nn.ModuleList(model.children())\n",
        "assert all(block._compiled_call_impl for block in model.layers)",
    ),
    ("planning", 0): (ENGINE + MADE + "optimizer = LayerWiseOptimizer(nn.Linear(4, 4), lr=0.02, report=False)\n", ""),
    ("start/from_adamw", 0): (f"{PLAIN}args, kwargs = (batch,), {{}}\n", ""),
    ("start/save_and_resume", 3): (OF_ADAMW, SAME_MASTERS),
    ("start/trainers", 0): (ENGINE + HUGGING_FACE, "assert args.deepspeed_plugin is not None"),
    ("start/trainers", 1): (PLAIN + FSDP2, TRAINER),
    ("start/trainers", 4): (ENGINE + AUTO + HUGGING_FACE, "assert model.basic_optimizer.plan_digest"),
    ("start/trainers", 5): (PLAIN + HUGGING_FACE, "assert optimizer.param_groups"),
    ("start/trainers", 8): ("", ""),
    ("start/what_a_run_prints", 0): (OPTIMIZER, ""),
    ("start/what_a_run_prints", 1): (
        f"{OPTIMIZER}optimizer.record_metrics()\nstep(model, optimizer)\n",
        "writer = SummaryWriter('events')\nwrite_metrics(writer, optimizer, 1, 0.5)\nwriter.close()\n"
        "from tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "assert {'loss/all', 'lr/1', 'update_rms/muon'} <= {*EventAccumulator('events').Reload().Tags()['scalars']}",
    ),
}


def in_language(language: str) -> list[str]:
    return [block.text for page in PAGES for block in blocks(page, language)]


def test_every_optimizer_entry_is_understood() -> None:
    """As Hugging Face hands it on: "auto" of what the Trainer knows is a number."""
    entries = 0
    for text in in_language("json"):
        found = json.loads(f"{{{text}}}" if text.startswith('"') else text)
        entry = found.get("optimizer", found) if isinstance(found, dict) else {}
        if str(entry.get("type")).startswith("LayerWise"):
            filled = {key: 0.1 for key in ("lr", "weight_decay") if entry["params"].get(key) == "auto"}
            settings_of(ZeROConfig, {**entry["params"], **filled}, entry["type"])
            entries += 1
    assert entries > 10


def test_every_command_names_files_that_there_are(tmp_path: Path) -> None:
    """Every command names files that there are, and a cluster that is one."""
    commands = " ".join(in_language("bash"))
    files = set(re.findall(r"\b(?:benchmarks|configs|examples|scripts)/\S+", commands))
    files |= {f"benchmarks/{name}.py" for name in re.findall(r"-m benchmarks\.(\w+)", commands)}
    assert len(files) > 4 and [name for name in files if not (ROOT / name).exists()] == []
    (cluster,) = [text for text in in_language("yaml") if "node_size" in text]
    (tmp_path / "cluster.yaml").write_text(cluster)
    assert cluster_named(str(tmp_path / "cluster.yaml")).node_size == 8


def test_every_python_block_is_run() -> None:
    found = {page: [block.name for block in blocks(page, "python")] for page in PAGES}
    fragments = [(page, number) for page, names in found.items() for number, name in enumerate(names) if not name]
    assert sorted(fragments) == sorted(FRAGMENTS)
    assert {name for names in found.values() for name in names if name} == set().union(*SCRIPTS.values())


@pytest.mark.parametrize(("page", "number"), FRAGMENTS)
def test_a_fragment_runs(rank_pools: dict[int, RankPool], tmp_path: Path, page: str, number: int) -> None:
    (before, after), code = FRAGMENTS[page, number], blocks(page, "python")[number].text
    ranks = rank_pools[1]
    try:
        ranks.run(run_fragment, before + code + after, f"{page}, block {number}", tmp_path)
    finally:
        ranks.close()  # and with its process what a fragment leaves in torch, DeepSpeed and Accelerate


def run_fragment(code: str, where: str, folder: Path) -> None:
    there = os.getcwd()
    with surroundings_kept():
        os.chdir(folder)
        try:
            names: dict[str, Any] = {"__name__": where}
            sys.modules.pop(where, None)
            exec(compile(code, where, "exec"), names)
        finally:
            os.chdir(there)
