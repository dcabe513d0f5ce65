"""Every family of transformers: what the routing says of each linear, beside what the judge saw of its outputs.

``python -m tests.support.families [FAMILY ...]`` prints the fused weights of families, how each was told, and what
cannot be built or run.
"""

import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn

from lwopt_backend.config.hosts import HostConfig
from lwopt_backend.groups.grouping import Given
from tests.support.judge import Judge, Outputs

CONFIGS = hf.models.auto.configuration_auto.CONFIG_MAPPING
FAMILIES = sorted(family for family in CONFIGS if CONFIGS[family] in hf.models.auto.modeling_auto.MODEL_MAPPING)
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")  # lists of a configuration, by layer
# What the judge cannot see, or sees otherwise than one would train it, by weight, with the reason
EXPLAINED = {
    r"\.q(_b)?_proj\.weight: q_nope, q_rope": "queries are joined again: W_UQ and W_QR of arXiv 2405.04434",
    r"self_attention\.query_key_value\.weight: q, k, v": "Falcon indexes with a list, which the meta device forgets",
    r"self_attn\.v_proj\.weight: ": "DiffLlama repeats each half of the heads of its values",
    r"compressor(\.indexer)?\.gate_proj\.weight: part0, part1": "a softmax over windows, for each channel by itself",
    r"sampling_offsets\.weight": "offsets of points on levels of an image; one small linear",
}


class Verdict(NamedTuple):
    """``how``: "whole", "cut" or "named" (it looks fused, and is not told), as the judge saw it; "unseen ..." if no
    forward pass used all of its outputs; or "wrong: ..."."""

    name: str
    how: str
    why: str


class Family(NamedTuple):
    verdicts: list[Verdict]
    failed: list[str]  # forward passes that ended in an error


def family(name: str) -> Family:
    """Build a family's model without memory, run what can be run of it, and judge. Raises what building raises."""
    model, judge, failed = built(name).eval(), None, []
    judge = Judge(model)
    parts = [module for module in model.modules() if isinstance(module, hf.PreTrainedModel)]
    for part in [*parts[1:], parts[0]]:
        try:
            with torch.no_grad(), torch.device("meta"), judge:
                part(**inputs(part))
        except Exception as error:  # of anybody's forward
            failed.append(f"{type(part).__name__}: {error!r}"[:120])
        judge.forget()
    return Family(list(verdicts(model, judge)), failed)


def built(name: str) -> nn.Module:
    """The model of a family's own configuration, of few layers, on the meta device."""
    config = CONFIGS[name]()
    for made, options in ((_few_layers(config), {"attn_implementation": "eager"}), (CONFIGS[name](), {})):
        try:
            with torch.device("meta"), torch.no_grad(), warnings.catch_warnings(action="ignore"):
                model: nn.Module = hf.AutoModel.from_config(made, dtype=torch.bfloat16, **options)
            return model
        except Exception:
            if not options:
                raise
    raise AssertionError


def _few_layers(config: Any) -> Any:
    for key, value in list(vars(config).items()):
        if isinstance(value, hf.PretrainedConfig):
            _few_layers(value)
        elif key in KINDS and isinstance(value, list):
            setattr(config, key, kinds := list(dict.fromkeys(value)))
            config.num_hidden_layers = len(kinds)
        elif type(value) is int and value > 2 and "layer" in key and ("num" in key or "n_" in key):
            setattr(config, key, 2)
    return config


def inputs(part: Any) -> dict[str, Any]:
    """Something for a part's main input."""
    config, size = part.config, getattr(part.config, "image_size", 224)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    shapes = {
        "input_ids": (1, 7),
        "decoder_input_ids": (1, 7),
        "pixel_values": (1, getattr(config, "num_channels", 3), height, width),
        "input_features": (1, getattr(config, "num_mel_bins", 80), 3000),
        "input_values": (1, 16000),
        "hidden_states": (1, 7, getattr(config, "hidden_size", 1)),
        "encoder_hidden_states": (1, 7, getattr(config, "hidden_size", 1)),
    }
    wanted = inspect.signature(part.forward).parameters
    names = {part.main_input_name, "decoder_input_ids"}.intersection(shapes).intersection(wanted)
    if getattr(config, "is_decoder", False) and "encoder_hidden_states" in wanted:
        names.add("encoder_hidden_states")
    dtypes = {name: torch.long if name.endswith("_ids") else torch.bfloat16 for name in names}
    found = {name: torch.zeros(shapes[name], dtype=dtype, device="meta") for name, dtype in dtypes.items()}
    return {**found, **({"use_cache": False} if "use_cache" in wanted else {})}


def verdicts(model: nn.Module, judge: Judge) -> Iterator[Verdict]:
    _, _, grouping = Given({"allow_no_matrix": True}, None).decide(HostConfig, model)
    for route in grouping.routes:
        if route.kind != "matrix" or len(route.shape) != 2:
            continue
        divided, seen = grouping.divided[route.name], judge.seen.get(route.name)
        runs = [(block.columns if route.transposed else block.rows).runs() for block in divided.blocks]
        ours = [frozenset(i for start, stop in each for i in range(start, stop)) for each in runs]
        told = f"{route.name}: {', '.join(block.name for block in divided.blocks)}"
        how = "named" if divided.looks_fused else "cut" if len(ours) > 1 else "whole"
        groups = [] if seen is None else seen.groups()
        if seen is None or sum(map(len, groups)) != seen.count:
            yield Verdict(route.name, f"unseen {how}", divided.reason)
        elif how == "named" or any(re.search(pattern, told) for pattern in EXPLAINED):
            yield Verdict(route.name, how, divided.reason)
        else:
            wrong = "" if how == "whole" and divided.reason else _difference(ours, groups)
            yield Verdict(route.name, f"wrong: {wrong}" if wrong else how, divided.reason)


def _difference(ours: list[Outputs], groups: list[Outputs]) -> str:
    if (
        {*ours} == {*groups} or len(ours) == 1 and (len(groups) == 1 or min(map(len, groups)) == 1)
    ):  # a row is no matrix
        return ""
    return f"expected parts of {[*map(len, groups)]} outputs, as the forward has them, found {[*map(len, ours)]}"


def main() -> None:
    warnings.simplefilter("ignore")
    hf.utils.logging.set_verbosity_error()
    total: Counter[str] = Counter()
    for name in sys.argv[1:] or FAMILIES:
        try:
            found = family(name)
        except Exception as error:  # e.g. of a package that is not installed
            print(f"{name}: not built: {error!r}"[:160])
            total["not built"] += 1
            continue
        total["families"] += 1
        for failed in found.failed:
            print(f"{name}: stopped in {failed}")
        shown = dict.fromkeys((re.sub(r"\.\d+(?=\.)", ".*", each.name), each.how, each.why) for each in found.verdicts)
        total.update(how.partition(":")[0] for _, how, _ in shown)
        for weight, how, why in shown:
            if how not in ("whole", "unseen whole") or why:
                print(f"{name}: {weight}: {how}{why and f' ({why})'}", flush=True)
    print(dict(total))


if __name__ == "__main__":
    main()
