"""What pages quote of benchmarks is what the results say; the benchmarks run, and what they say of work holds."""

import json
import re
import runpy
import statistics
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from benchmarks import conformance, counts, record, step
from benchmarks.convert import UNIVERSAL
from benchmarks.public_models import study
from benchmarks.step_systems import DEEPSPEEDS, OURS, TORCHS, Hooks, Setting, built, systems
from benchmarks.step_watch import Watch
from lwopt_backend.rules.newton_schulz import IMMEDIATE
from tests.support import megatron_planner
from tests.support.command_line import lwopt
from tests.support.launcher import ROOT, python
from tests.support.on_ranks import on_ranks
from tests.support.pages import DOCS, PAGES, table
from tests.support.ranks import gathered
from tests.unit.plan.test_buffers import figures as of_megatron

RESULTS = ROOT / "benchmarks" / "results"
GRAM, BUCKETS, COMPACT = "ours, gram_aspect=1.5", "ours, bucket_matrices=16", "ours, compact"


def results(name: str) -> list[Any]:
    """The figures of a file that pages quote."""
    return json.loads((RESULTS / f"{name}.json").read_text())["figures"]


def of_systems(name: str) -> dict[tuple[str, int, str], Any]:
    return {(row["engine"], row["ranks"], row["system"]): row for row in results(name)}


# Pages.


def test_every_file_of_results_is_quoted() -> None:
    quoted = set(re.findall(r"benchmarks/results/(\w+\.json)", "".join(PAGES.values())))
    assert quoted == {path.name for path in RESULTS.iterdir()}


def test_the_table_of_peers_is_that_of_the_results() -> None:
    rows = {(row["peer"], row["case"]): row for row in results("conformance")}
    assert conformance.with_table(PAGES["peers"], rows) == PAGES["peers"]
    assert {peer for peer, _ in rows} == {*conformance.PEERS} and {case for _, case in rows} == {*conformance.CASES}


def test_the_counted_table_is_that_of_the_results() -> None:
    rows = results("counts")
    assert record.with_table(PAGES["peers"], "counts", counts.table(rows)) == PAGES["peers"]
    of = {row["system"]: row for row in rows if (row["model"], row["ranks"]) == ("llama3.1-8b", 64)}
    ours, theirs = of["ours, FSDP2"], of["torch.optim.Muon, FSDP2"]
    both = [
        f"{row['busiest']:.3g} times the flops, {row['bytes']:.3g} times the bytes, {row['collectives']} collectives"
        for row in (theirs, ours)
    ]
    assert f"torch {both[0]}; this package {both[1]}." in PAGES["README"]


def test_predicted_steps_are_those_of_the_results() -> None:
    rows = results("timeline")
    assert table("cost", "Predicted times on GPUs")[1:] == rows
    ms = {row[1]: f"{float(row[3]):.0f} ms" for row in rows if row[0] == "llama3.1-8b, 64"}
    owned = f"{ms['plain, with passes']}; {ms['plain, overlap_param_gather, with passes']} with `overlap_param_gather`"
    ways = [ms[f"FSDP2, `ns_method` `{method}`"] for method in ("auto", "quack-kernels")]
    sharded = f"{ms['FSDP2']}; {ways[0]} with `ns_method` auto; {ways[1]} with `quack-kernels` too"
    expected = [ms["ZeRO 1, 2"], ms["ZeRO 1, 2"], ms["ZeRO 3"], sharded, owned]
    assert [row[5] for row in table("README", "What it costs")[1:]] == expected
    options = [{"matrix": {"name": "muon", "ns_method": method}} for method in ("auto", "standard")]
    flops = [sum(study("llama3.1-8b", "fsdp2", 64, options=given).worst.loads()) for given in options]
    assert f"with {flops[0] / flops[1]:.2f} of the flops;" in PAGES["README"]
    engines = {"ZeRO 1, 2": "zero1", "ZeRO 3": "zero3", "FSDP2": "fsdp2"}
    planned = []  # the planner's seconds over the clock's
    for model, ranks, engine, taken in [(*row[0].split(", "), row[1], float(row[3])) for row in rows]:
        if model.startswith("llama") and engine in engines and ranks.isdecimal():
            planned.append(1e3 * study(model, engines[engine], int(ranks)).worst.timeline.seconds / taken)
    assert f"the time is {min(planned):.2f} to {max(planned):.2f} of" in PAGES["cost"]


def test_figures_of_conversion_are_those_of_the_results() -> None:
    def shown(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"

    figures = ("GB", "cpu s", "anonymous GiB", "read GB", "MB/s")
    rows = [row for row in results("convert") if row["GB"] > 1]
    expected = [[f"`{row['what']}`", row["of"], *(shown(row.get(key)) for key in figures)] for row in rows]
    assert table("benchmarks", "Conversion, saving and loading")[1:] == expected
    of = {(row["what"], row["of"]): row for row in rows}
    pairs = [(of[UNIVERSAL, stage], of["ds_to_universal", stage]) for stage in ("ZeRO 2", "ZeRO 3")]
    cpu = [f"{ours['cpu s'] / theirs['cpu s']:.2f}" for ours, theirs in pairs]
    (memory,) = {f"{ours['anonymous GiB'] / theirs['anonymous GiB']:.2f}" for ours, theirs in pairs}
    (read,) = {f"{ours['read GB'] / ours['GB']:.2f}" for ours, _ in pairs}
    said = f"[{cpu[0]} (ZeRO 2) and {cpu[1]} (ZeRO 3) of its CPU time, {memory} of its memory]"
    assert said in PAGES["README"] and f"reads each needed byte about once ({read})" in PAGES["README"]
    computed = []
    for (ours, theirs), nbytes in zip(pairs, (14, 12)):
        gigabytes = 70 * nbytes
        minutes = [1e3 * gigabytes / row["MB/s"] / 60 for row in (ours, theirs)]
        minutes.insert(1, ours["cpu s"] * gigabytes / ours["GB"] / 60)
        computed.append([ours["of"], str(gigabytes), str(70 * 12), *(f"{each:.0f}" for each in minutes)])
    assert table("benchmarks", "Converting 70 B parameters")[1:] == computed


def test_memory_in_the_readme_is_what_lwopt_plan_prints(tmp_path: Path) -> None:
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"], dtype="bfloat16")
    config.save_pretrained(tmp_path)
    engines, plans = [], {}
    pictures = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    for (name, options), row in zip(pictures["ENGINES"].items(), table("README", "What it costs")[1:], strict=True):
        given = row[-1].split("`")[1].split()
        assert given == options
        engines.append(engine := given[1])
        words = ["--hf", str(tmp_path), "--world-size", "64", *given]
        plans[name] = document = json.loads(lwopt("plan", *words, "--json").out)
        held = [(of, of["parameters"] + of["gradients"] + of["masters"]) for of in document["memory_per_rank"]]
        needed = max(of["workspace"] + of["exchange"] for of, _ in held)
        adamw = 8 * sum(of["numel"] for of in document["routing"]) / (1 if engine == "plain" else 64)
        expected = [max(kept for _, kept in held), max(of["state"] for of, _ in held), adamw, needed]
        for cell, nbytes in zip(row[1:5], expected):
            shown = cell.partition(" under DDP")[0]
            assert float(shown) == round(nbytes / 2**30, len(shown.partition(".")[2])), (engine, cell)
    assert engines == ["zero1", "zero2", "zero3", "fsdp2", "plain"]
    transient = max(of["transient"] for of in document["memory_per_rank"])
    said = f"On plain PyTorch, the backward pass needs {transient / 2**30:.1f} GiB beside the first two columns"
    assert said in " ".join(PAGES["README"].split())
    assert pictures["memory"](plans) == (DOCS / "pictures" / "memory.svg").read_text()
    assert plans["plain"]["digest"].encode() in (DOCS / "plan.png").read_bytes(), "the picture of another plan"


# A step, by systems.


def ratio(theirs: Any, ours: Any, key: str) -> str:
    return f"{step.slowest(theirs, key) / step.slowest(ours, key):.2f}"


def sent(row: Any, part: str = "step") -> str:
    return f"{step.most_sent(row, part):.1f}"


def differs(row: Any) -> str:
    most = max(figures["differ"][0] for figures in row["by_rank"])
    return f"{most:.1e}" if most else "0.0"


def test_figures_of_deepspeed_are_those_of_the_results() -> None:
    rows = of_systems("step_deepspeed")
    ours, theirs, adamw = ([rows[f"zero{n}", 2, name] for n in range(4)] for name in (OURS, DEEPSPEEDS, "AdamW"))
    assert [cells[1:] for cells in table("benchmarks", "DeepSpeed")[1:]] == [
        [ratio(*pair, "step_seconds") for pair in zip(theirs, ours)],
        *([sent(row) for row in some] for some in (theirs, ours, adamw)),
        *([differs(row) for row in some] for some in (theirs, ours)),
    ]


def test_figures_of_fsdp2_are_those_of_the_results() -> None:
    shown = {cells[0]: cells[1:] for cells in table("benchmarks", "FSDP2")[1:]}
    for file, size in (("step_fsdp2", "12 layers, d=384"), ("step_fsdp2_768", "6 layers, d=768")):
        rows = of_systems(file)
        for ranks in (2, 4):
            ours, gram, torchs = (rows["fsdp2", ranks, name] for name in (OURS, GRAM, TORCHS))
            times = [f"{step.slowest(ours, 'update_seconds'):.0f} ms"]
            times += [ratio(other, ours, "update_seconds") for other in (gram, torchs)]
            times += [f"{step.slowest(ours, 'step_seconds'):.0f} ms", ratio(torchs, ours, "step_seconds")]
            assert shown[f"{size}, {ranks}"] == times
    rows = of_systems("step_fsdp2")
    both = [rows["fsdp2", 4, name] for name in (OURS, TORCHS)]
    assert [cells[1:] for cells in table("benchmarks", "FSDP2", "in an update, a rank")[1:]] == [
        [str(row["by_rank"][0]["collectives"]) for row in both],
        [f"{sent(row, 'update')} MB" for row in both],
        [differs(row) for row in both],
    ]


def test_figures_in_place_of_ddp_are_those_of_the_results() -> None:
    rows = of_systems("step_plain")
    for ranks in (2, 3):
        ours, *others = (rows["plain", ranks, name] for name in (OURS, COMPACT, TORCHS))
        found = [cells[1:] for cells in table("benchmarks", "Plain PyTorch", f"{ranks} ranks")[1:]]
        assert found == [
            [f"{step.slowest(row, 'step_seconds'):.0f} ms", ratio(row, ours, "step_seconds"), sent(row)]
            for row in (ours, *others)
        ]


ON = {"plain PyTorch": "plain", "`ModuleOptimizers`": "modules", 'DeepSpeed, `"storage": "owned"`': "owned"}
ON |= {"FSDP2": "fsdp2", "ZeRO 0": "zero0", "ZeRO 1, 2": "zero1", "ZeRO 3": "zero3"}


def test_launches_are_those_of_the_results() -> None:
    rows = of_systems("launches")
    heading = "Kernel launches of a step"
    shown = table("cost", heading)[1:] + table("cost", heading, "on")[1:]
    for name, ranks, *figures in shown:
        engine, _, buckets = name.partition(", `bucket")
        system = BUCKETS if buckets else OURS if len(figures) > 2 else TORCHS
        for number in ranks.split(", "):
            row = rows[ON[engine], int(number), system]
            if engine == "ZeRO 1, 2":
                assert row["by_rank"] == rows["zero2", int(number), system]["by_rank"]
            cells = step.cells(row, row, Setting(**row["setting"]))
            keys = ("operations", "newton_schulz", "calls", "host_reads", "collectives")
            assert [figure.strip("*") for figure in figures] == [cells[key] for key in keys][: len(figures)], name


@pytest.mark.full
def test_the_planner_is_compared_with_megatrons_as_on_its_page() -> None:
    with ProcessPoolExecutor(2) as pool:
        cells = [*pool.map(megatron_planner.plan_cell, (row for rows in of_megatron().values() for row in rows))]
    for name, better, equal, worse, padding, balance, compact in table("cost", "Compared with Megatron-Core")[1:]:
        measure, model = ("l s^2", "all") if name.endswith("l s²") else ("flops", name.partition(" ")[0])
        some = [of[measure] for of in cells if model in ("all", of[measure].name[0])]
        lost = [cell.worse for cell in some if any(cell.worse)]
        gained = sum(cell.better for cell in some)
        assert [int(better), int(equal), int(worse)] == [gained, len(some) - gained - len(lost), len(lost)]
        most = [max(each) for each in zip(*lost)]
        assert [padding, balance] == (
            [f"{most[0]:.2f} points" if most[0] else "none", f"{most[1]:.4f}"] if lost else ["", ""]
        )
        assert compact == f"{max(cell.excess for cell in some):.3f}" and 10 * len(lost) <= len(some) or model != "all"


def test_counts_of_a_step_are_those_of_the_results() -> None:
    calls = {row["row"]: f"{row['calls']:,}" for row in results("step_counts")}
    text = " ".join(PAGES["cost"].split())
    assert f"{calls['fsdp2']} functions on FSDP2, {calls['zero3']} on ZeRO 3 and {calls['zero1']} on ZeRO 1" in text


def test_losses_of_rules_are_those_of_the_results() -> None:
    found = json.loads((RESULTS / "rules.json").read_text())["rules"]
    shown = table("benchmarks", "Muon and AdamW", "rule")[1:]
    assert {name for name, *_ in shown} == {*found}
    for name, rate, loss, steps in shown:
        row = found[name]
        counted = ", ".join("never" if number is None else str(number) for number in row["steps"])
        assert (float(rate), loss, steps) == (row["lr"], f"{statistics.mean(row['losses']):.3f}", counted), name


def test_losses_of_ns_methods_are_those_of_the_results() -> None:
    found = json.loads((RESULTS / "ns_methods.json").read_text())
    shown = table("benchmarks", "Muon and AdamW", "ns_method")[1:]
    assert shown == [
        [f"`{name}`", *(f"{loss:.4f}" for loss in (*each, statistics.mean(each)))] for name, each in found.items()
    ]


# Programs.


def figures(tmp_path: Path, benchmark: str, arguments: str) -> tuple[Any, str]:
    printed = python("-m", f"benchmarks.{benchmark}", *arguments.split(), "--json", tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["command"].startswith(f"python -m benchmarks.{benchmark} ")
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] and len(found["commit"].rstrip("+")) == 40
    return found["figures"], printed


@pytest.mark.full
def test_counts_of_a_step_are_equal_in_every_run(tmp_path: Path) -> None:
    found, _ = figures(tmp_path, "step_counts", "--row zero1 fsdp2")
    assert [row["row"] for row in found] == ["zero1", "fsdp2"]
    assert all(row["calls"] > row["operations"] > 0 and row["bytes"] > 0 and not row["waits"] for row in found)
    both, _ = figures(tmp_path, "step_counts", "--row fsdp2 --against HEAD")
    assert len(both) == len(found[1]) - 1
    for row in both:
        assert row["before"] == row["after"] == found[1][row["figure"]]


@pytest.mark.full
def test_a_step_sends_what_its_host_would_and_two_exchanges(tmp_path: Path) -> None:
    """Under DeepSpeed with two micro-batches, weights and gradients travel as with DeepSpeed's AdamW; this package adds
    all-to-alls. The program asserts the plans' bytes, the result, and one Newton-Schulz a matrix."""
    width = 32  # whose parts over the ranks fill vector registers: AdamW then rounds as on whole parameters
    matrix_bytes, small = 12 * width**2 * 4, 200  # of the one layer; norms and flags
    rows, _ = figures(tmp_path, "step", f"--layers 1 --width {width} --tokens 8 --rounds 1 --accumulation 2")
    traffic = {
        (row["engine"], row["system"]): sum((Counter(f["step"]) for f in row["by_rank"]), Counter()) for row in rows
    }
    for stage in range(4):
        ours, theirs, adamw = (traffic[f"zero{stage}", name] for name in (OURS, DEEPSPEEDS, "AdamW"))
        assert 0 < ours.pop("alltoall_base") <= 2 * (matrix_bytes // 2)  # there and back, in bf16
        if stage == 0:
            ours.pop("allgather_base")  # what AdamW's share of the ranks has updated
        assert theirs.total() > adamw.total() + matrix_bytes if stage == 3 else set(theirs) == set(adamw)
        assert set(ours) == set(adamw) and all(abs(ours[kind] - adamw[kind]) < small for kind in adamw)
    every = matrix_bytes + (2 * 256 * width + 3 * width) * 4  # embedding, head, and three norms
    assert traffic["plain", TORCHS].total() == 2 * 2 * every  # DDP reduces all gradients in each micro-batch
    assert all(len(f["step_seconds"]) == 1 for row in rows for f in row["by_rank"])


def test_a_counted_step_is_the_planned_one() -> None:
    """On FSDP2, as the plan says: every matrix once, at its owner, and twice on the wire. On replicas, torch.optim.Muon
    computes every matrix on every rank, and only DDP sends."""
    ranks, model = 4, "gpt2-124m"
    (planned,) = study(model, "fsdp2", ranks).worst.planned
    assert planned.part is not None
    loads, exchange = planned.part.loads, planned.part.collectives[0]
    ours = counts.row("ours, FSDP2", model, ranks)
    assert ours["mean"] == 1 and ours["busiest"] == round(max(loads) * ranks / sum(loads), 3)
    least = 4 * planned.part.numel * (ranks - 1) / ranks**2
    assert ours["bytes"] >= 1 and ours["bytes"] * least == pytest.approx(exchange.nbytes, rel=0.1)
    assert ours["collectives"] == exchange.count + 1, "and flags"
    torchs = counts.row("torch.optim.Muon, replicas", model, ranks)
    assert torchs["busiest"] == torchs["mean"] == ranks and torchs["bytes"] == pytest.approx(1, abs=1e-3)
    assert torchs["collectives"] == -(-4 * planned.part.numel // counts.DDP_BYTES)
    assert ours["launches"] < torchs["launches"] / 3


def test_a_stack_of_experts_is_exact_here_and_refused_by_torch(tmp_path: Path) -> None:
    found, printed = figures(tmp_path, "conformance", "--peer ours-fsdp2 torch --case experts")
    ours, theirs = found
    assert (ours["verdict"], ours["difference"]) == ("a number", 0)
    assert theirs["verdict"] == "refused" and "only supports 2D" in theirs["said"]
    assert "benchmarks.conformance --peer torch --case experts  ValueError" in printed


# What the rank with the most launches does at most in a step of 12 matrices of 4 shapes on 2 ranks:
# operations outside Newton-Schulz, batches in it, reads by the host, collectives.
LAUNCHES = {
    "plain": (22, 4, 1, 2),
    "modules": (40, 4, 2, 4),
    "fsdp2": (38, 6, 0, 7),
    "zero0": (43, 6, 1, 3),
    "zero1": (28, 5, 0, 2),
    "zero2": (28, 5, 0, 2),
    "zero3": (38, 6, 0, 6),
    "owned": (32, 4, 2, 3),
}


@pytest.mark.on_gloo  # the benchmark reads the arguments of torch's own collectives
@pytest.mark.parametrize("engine", LAUNCHES)
@on_ranks(2)
def test_a_step_launches_at_most_so_much(engine: str) -> None:
    setting = Setting(2, 3, 16, 8, 1, 4.0, "cpu", matrices_only=True)
    IMMEDIATE.clear()
    try:
        with built({OURS: systems(engine, setting)[OURS]}) as (system,):
            system.step(setting.batches(0), Hooks())
            watch = Watch(torch.distributed.get_rank(), 2)
            with watch.watching() as hooks:
                system.step(setting.batches(1), hooks)
    finally:
        IMMEDIATE.add("cpu")
    counts = gathered(watch.count)
    assert sum(count.matrices for count in counts) == setting.matrices
    most = max(counts, key=lambda count: count.launches())
    found = most.operations, most.calls, most.host_reads, most.collectives
    assert all(value <= bound for value, bound in zip(found, LAUNCHES[engine], strict=True)), (found, most)


def test_without_a_gpu_the_tests_on_one_say_so() -> None:
    usage_error = 4
    words = ("-m", "pytest", "tests/gpu/test_gpu.py", "--device", "cuda")
    assert "no GPU: torch" in python(*words, fails=usage_error, CUDA_VISIBLE_DEVICES="")
