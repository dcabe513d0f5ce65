"""``python -m tests.support.zoo [LIBRARY[.FAMILY] ...]``: what the product says of every model of four libraries.

Prints each family that stopped, each disagreement with the judge, and at the end families by kinds of weights, by how
they are told, and by what the judge says, with the false cuts apart. Fails where there is a false cut.
"""

import json
import sys
import time
import traceback
import warnings
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

from tests.support.judge import JudgeFailed
from tests.support.zoo import vision_operators
from tests.support.zoo.compare import Verdict, ran, verdicts
from tests.support.zoo.libraries import LIBRARIES, Family, shortened

# Cuts that the judge does not see, by family and the end of a weight's name, and why each is right
ARGUED = {
    ("transformers.falcon", "query_key_value.weight"): "71 heads of queries, a head of keys and one of values",
    ("transformers.focalnet", "projection_in.weight"): "queries, context, and gates, each of which is one row",
    ("transformers.embedding_gemma2", "per_layer_model_projection.weight"): "every layer takes its own outputs",
    ("transformers.embedding_gemma2_text", "per_layer_model_projection.weight"): "every layer takes its own outputs",
    ("diffusers.Flux2Transformer2DModel", "to_qkv_mlp_proj.weight"): "values and an MLP's outputs, side by side",
}


def argued(name: str, weight: str) -> str:
    """Why a cut is right that the judge calls false; empty if it is not."""
    found = (
        why for (family, end), why in ARGUED.items() if f"{name}.".startswith(f"{family}.") and weight.endswith(end)
    )
    return next(found, "")


def judged(family: Family) -> tuple[list[Verdict], str]:
    """Of one family, and why its pass stopped, if it did."""
    model = shortened(family.build().eval())
    args, kwargs = family.example(model)
    judge, stopped = ran(model, args, kwargs)
    if stopped:  # perhaps for want of a layer
        model = family.build().eval()
        args, kwargs = family.example(model)
        judge, stopped = ran(model, args, kwargs)
    example = None if stopped else (args, kwargs)
    return [*verdicts(model, judge, example, full=family.whole and not stopped)], stopped


def main() -> None:
    vision_operators.load()
    warnings.simplefilter("ignore")
    wanted = [word for word in sys.argv[1:] if not word.startswith("--")]
    log = next((Path(word.partition("=")[2]) for word in sys.argv[1:] if word.startswith("--json=")), None)
    total: dict[str, Counter[str]] = defaultdict(Counter)
    table: Counter[tuple[str, str, str, str]] = Counter()
    faults: list[tuple[str, Verdict]] = []
    unbuilt: Counter[str] = Counter()
    for library, families in LIBRARIES.items():
        if wanted and not any(word.partition(".")[0] == library for word in wanted):
            continue
        print(f"{library} {version(library)}", flush=True)
        for family in families():
            if wanted and not any(f"{family.name}.".startswith(f"{word}.") for word in wanted):
                continue
            begin = time.process_time()
            try:
                found, stopped = judged(family)
            except (Exception, JudgeFailed) as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")[:140]
                unbuilt[f"{library}: {said}"] += 1
                total[library]["not built"] += 1
                print(f"{family.name}: not built: {said}", flush=True)
                if "--trace" in sys.argv:
                    traceback.print_exc()
                continue
            total[library]["families"] += 1
            total[library]["stopped"] += bool(stopped)
            if stopped:
                print(f"{family.name}: stopped: {stopped}")
            for one in found:
                table[library, one.is_, one.told, one.fault] += 1
                total[library]["kinds of weights"] += 1
                if one.fault:
                    faults.append((family.name, one))
                    word = "" if not one.said else ", said to be unclear"
                    print(f"{family.name} | {one.weight} {one.shape} | {one.is_} | {one.fault}{word} | {one.why}")
            print(f"{family.name}: {len(found)} kinds, {time.process_time() - begin:.1f} s", flush=True)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps([family.name, stopped, [one._asdict() for one in found]]) + "\n")
    for library, counts in total.items():
        print(library, dict(counts))
    print("\nlibrary | what the judge saw | told as | fault | kinds of weights")
    for (library, is_, told, fault), count in sorted(table.items()):
        print(f"{library} | {is_} | {told} | {fault or 'none'} | {count}")
    cuts = [(name, one) for name, one in faults if one.fault == "false cut"]
    right = {(name, one.weight): why for name, one in cuts if (why := argued(name, one.weight))}
    print(f"\ncuts that the judge does not see: {len(right)}")
    for (name, weight), why in right.items():
        print(f"{name} | {weight} | {why}")
    cuts = [(name, one) for name, one in cuts if (name, one.weight) not in right]
    print(f"\nfalse cuts: {len(cuts)}")
    for name, one in cuts:
        print(f"{name} | {one.weight} {one.shape} | {one.is_} | {one.why}")
    print(f"\nnot built: {sum(unbuilt.values())}")
    if cuts:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
