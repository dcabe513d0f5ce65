"""The families of four libraries: how one of each is built without memory, and something for its forward pass."""

import importlib
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.zoo.examples import Candidates, filled, zeros

# Not families: they have no forward, or hold models that are families
NO_MODELS = {"ModelMixin", "AutoModel", "CacheMixin", "MotionAdapter"}
ALIKE = 2  # layers of a run of equal ones that are kept
LAYERS = (
    "num_layers",
    "num_single_layers",
    "n_layers",
    "depth",
    "num_refiner_layers",
    "num_blocks",
    "n_refiner_layers",
)


Example = tuple[tuple[Any, ...], dict[str, Any]]


class Family(NamedTuple):
    """``example`` is what the forward of the model that ``build`` makes is given. ``whole``: it has its heads."""

    name: str
    build: Callable[[], nn.Module]
    example: Callable[[nn.Module], Example]
    whole: bool = True


def shortened(model: nn.Module) -> nn.Module:
    """The model with two of each run of equal layers: the others show nothing more."""
    for module in [*model.modules()]:
        if type(module) in (nn.Sequential, nn.ModuleList) and len(module) > ALIKE:
            kept: list[tuple[str, nn.Module | None]] = []
            last: list[Any] = []
            for key, layer in module._modules.items():
                like = [type(layer), *(param.shape for param in layer.parameters())] if layer is not None else [None]
                if len(like) == 1 or last[-ALIKE:] != [like] * ALIKE:
                    kept.append((key if type(module) is nn.Sequential else str(len(kept)), layer))
                last.append(like)
            module._modules = dict(kept)
    return model


# timm


def timm() -> Iterator[Family]:
    """For each module of timm, its smallest models with different classes inside."""
    import timm

    for module in timm.list_modules():
        names = sorted(timm.list_models(module=module), key=_size)
        for name in names[:1] + [one for one in names[1:] if _stem(one) != _stem(names[0])][:1]:

            def build(name: str = name) -> nn.Module:
                with torch.device("meta"):
                    made: nn.Module = timm.create_model(name, num_classes=10)
                return made

            yield Family(f"timm.{module}.{name}", build, _images)


def _stem(name: str) -> str:
    return name.split("_")[0].rstrip("0123456789")


def _size(name: str) -> tuple[int, int, str]:
    """Names of small models first."""
    words = (
        "test",
        "atto",
        "femto",
        "pico",
        "nano",
        "xxs",
        "xxt",
        "tiny",
        "xtiny",
        "mini",
        "xs",
        "s0",
        "b0",
        "m0",
        "_s",
    )
    rank = next((number for number, word in enumerate(words) if word in name), len(words))
    return ("384" in name or "512" in name) * 9 + rank, len(name), name


def _images(model: nn.Module) -> Example:
    size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
    return (torch.zeros(1, *size, device=next(model.parameters()).device),), {}


# torchvision


def torchvision() -> Iterator[Family]:
    """For each module of torchvision's models, the first by name; quantized ones have no parameters to train."""
    import torchvision.models

    done = set[str]()
    for name in sorted(torchvision.models.list_models(), key=_size):
        builder = torchvision.models.get_model_builder(name)
        module = builder.__module__.removeprefix("torchvision.models.")
        if module in done or module.startswith("quantization"):
            continue
        done.add(module)

        def build(name: str = name, builder: Any = builder) -> nn.Module:
            has_backbone = "weights_backbone" in inspect.signature(builder).parameters
            with torch.device("cpu" if "detection" in builder.__module__ else "meta"):
                more: dict[str, Any] = {"weights_backbone": None} if has_backbone else {}
                more |= (
                    {} if "ssd" in name or "detection" not in builder.__module__ else {"min_size": 96, "max_size": 160}
                )
                made: nn.Module = torchvision.models.get_model(name, weights=None, **more)
            return made

        yield Family(f"torchvision.{module}.{name}", build, _pictures)


def _pictures(model: nn.Module) -> Example:
    device, kind = next(model.parameters()).device, type(model).__module__
    if "detection" in kind:
        return ([torch.zeros(3, 128, 160, device=device)],), {}
    if "optical_flow" in kind:
        return tuple(torch.zeros(1, 3, 128, 128, device=device) for _ in range(2)), {"num_flow_updates": 2}
    if "video" in kind:
        side = 224 if "mvit" in kind else 112
        return (torch.zeros(1, 3, 16, side, side, device=device),), {}
    size = 299 if "inception" in kind else getattr(model, "image_size", 224)
    return (torch.zeros(1, 3, size, size, device=device),), {}


# diffusers


def diffusers() -> Iterator[Family]:
    """Every model of diffusers, of its own configuration with few layers."""
    import diffusers.models as found

    for name in sorted({name for names in found._import_structure.values() for name in names} - NO_MODELS):
        made = getattr(importlib.import_module("diffusers"), name, None) or getattr(found, name)
        if inspect.isclass(made) and issubclass(made, nn.Module):
            yield Family(f"diffusers.{name}", partial(_few_layers, made), _diffused)


def _few_layers(made: Any) -> nn.Module:
    few: dict[str, Any] = {}
    for key, one in inspect.signature(made.__init__).parameters.items():
        if type(one.default) is int and one.default > 2 and key in LAYERS:
            few[key] = 2
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        for options in ({**few, **SMALL.get(made.__name__, {})}, SMALL.get(made.__name__, {}), {}):
            try:
                model: nn.Module = made(**options)
                return model
            except Exception:
                if not options:
                    raise
    raise AssertionError


GIVEN: dict[str, dict[str, Any]] = {  # what no rule finds
    "AceStepTransformer1DModel": {"hidden_states": zeros(1, 16, 64), "context_latents": zeros(1, 16, 128)},
}
SMALL: dict[str, dict[str, Any]] = {
    "AutoencoderKLHunyuanImage": {
        **{"in_channels": 3, "out_channels": 3, "latent_channels": 8, "block_out_channels": (32, 64)},
        **{"layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 32},
    },
}


def _diffused(model: nn.Module) -> Example:
    config: Any = getattr(model, "config", {})
    return (), filled(model, _known(model, config), OPTIONAL)


# Arguments with a default that a pass of the whole model needs
OPTIONAL = (
    "encoder_hidden_states",
    "timestep",
    "timesteps",
    "class_labels",
    "pooled_projections",
    "img_ids",
    "txt_ids",
)
OPTIONAL += (
    "sample_posterior",
    "guidance",
    "encoder_hidden_states_mask",
    "img_shapes",
    "added_cond_kwargs",
    "global_hidden_states",
)
OPTIONAL += ("encoder_hidden_states_t5", "text_embedding_mask", "text_embedding_mask_t5", "image_meta_size", "style")
OPTIONAL += (
    "rotary_embedding",
    "image_rotary_emb",
    "encoder_attention_mask",
    "pooled_embeds",
    "encoder_hidden_states_llama3",
)
OPTIONAL += ("encoder_hidden_states_image", "image_embeds", "num_frames", "height", "width", "audio_num_frames", "fps")
OPTIONAL += (
    "encoder_hidden_states_2",
    "encoder_attention_mask_2",
    "pose_hidden_states",
    "face_pixel_values",
    "siglip_feats",
)
OPTIONAL += (
    "control_hidden_states",
    "visual_rope_pos",
    "image_latents",
    "text_encoder_layers",
    "condition_mask",
    "padding_mask",
)


def _known(model: nn.Module, config: Any) -> Candidates:
    """Values for arguments by their names, of the sizes that the configuration tells."""

    def of(*keys: str, default: int) -> int:
        for key in keys:
            value = config.get(key) if hasattr(config, "get") else None
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if type(value) is int and value > 0:
                return value
        return default

    channels = of("in_channels", "in_dim", "latent_channels", "in_chans", default=4)
    text = of(*TEXT_WIDTHS, default=64)
    texts = [zeros(1, 7, one) for one in dict.fromkeys([text, *(of(key, default=text) for key in TEXT_WIDTHS)])]
    size = of("sample_size", "image_size", default=32)
    size = min(size, 32) if size % 8 == 0 or size > 32 else 32
    inputs = [
        *(zeros(1, channels, size, size), zeros(1, 16, channels), zeros(1, channels, 3, 16, 16)),
        *(zeros(1, channels, 64), zeros(1, 3, channels, 16, 16), zeros(1, channels, 5, 32, 32)),
        *(zeros(1, channels, 8, 8), zeros(1, channels, 1, 16, 16), zeros(1, 3, 64, 64), zeros(1, 2, 2048)),
        *(zeros(1, 1, 2048), zeros(1, 3, 5, 64, 64), zeros(1, channels), zeros(16, channels)),
        *(zeros(1, 3, 9, 64, 64), zeros(1, 64, 4, 4), zeros(1, 3, 224, 224)),
    ]
    inputs += _first_inputs(model)
    texts += [zeros(1, 7, width) for width in _text_inputs(model)]
    when = [zeros(1), zeros(1, dtype=torch.long), zeros(1, 1), zeros(), lambda: 1]
    masks: list[Any] = [zeros(1, 7, dtype=torch.bool), zeros(1, 7, dtype=torch.long), zeros(1, 7), nothing]
    pooled = [zeros(1, of("pooled_projection_dim", "pooled_projections_dim", "pooled_embeds_dim", default=768))]
    head = of("attention_head_dim", default=64)
    pairs = [(zeros(n, width), zeros(n, width)) for n in (16, 256) for width in (head, head // 2)]
    turns: list[Any] = [nothing, *(lambda pair=pair: (pair[0](), pair[1]()) for pair in pairs)]
    image = of("image_embed_dim", "image_proj_dim", "image_proj_embed_dim", "image_dim", default=1280)
    sizes = [lambda: torch.full((1, 2), 64.0, device="meta")]
    names: dict[str, Any] = {
        **dict.fromkeys(
            ("sample", "hidden_states", "latents", "z_latent", "input", "z", "mel", "controlnet_cond"), inputs
        ),
        **dict.fromkeys(
            ("timestep", "timesteps", "t", "timestep_r", "r_timestep", "timestep_ratio", "fps", "sigma"), when
        ),
        **dict.fromkeys(("encoder_hidden_states", "text_bth", "source_hidden_states", "inputs_embeds"), texts),
        **dict.fromkeys(("encoder_attention_mask", "encoder_hidden_states_mask", "encoder_mask"), masks),
        **dict.fromkeys(("text_embedding_mask", "text_embedding_mask_t5"), masks),
        **dict.fromkeys(("pooled_projections", "pooled_embeds", "global_hidden_states"), pooled),
        **dict.fromkeys(("proj_embedding", "pooled_text_emb"), pooled),
        **dict.fromkeys(("image_rotary_emb", "rotary_embedding"), turns),
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), sizes),
        "x": [lambda: [torch.zeros(channels, 1, 8, 8, device="meta")], *inputs],
        "cap_feats": [lambda: [torch.zeros(7, of("cap_feat_dim", default=2560), device="meta")], *texts],
        "class_labels": [zeros(1, dtype=torch.long), nothing],
        "style": [zeros(1, dtype=torch.long)],
        "img_ids": [zeros(16, 3), zeros(16, 4), zeros(1, 16, 3), zeros(1, 16, 4), zeros(256, 3)],
        "txt_ids": [zeros(7, 3), zeros(7, 4), zeros(1, 7, 3), zeros(1, 7, 4)],
        "guidance": [zeros(1), nothing],
        "img_shapes": [lambda: [(1, 4, 4)], lambda: [[(1, 4, 4)]]],
        "added_cond_kwargs": [
            lambda: {"resolution": None, "aspect_ratio": None},
            lambda: {"text_embeds": zeros(1, 1280)(), "time_ids": zeros(1, 6)()},
            lambda: {"resolution": zeros(1, 2)(), "aspect_ratio": zeros(1, 1)()},
        ],
        "added_time_ids": [zeros(1, 3)],
        "sample_posterior": [lambda: False],
        "num_frames": [lambda: 4, lambda: 1],
        "height": [lambda: 2],
        "width": [lambda: 2],
        "position_ids": [zeros(1, 23, dtype=torch.long), zeros(1, 23, 3), zeros(23, 3)],
        "input_ids": [zeros(1, 16, 16, dtype=torch.long), zeros(1, 7, dtype=torch.long)],
        "target_input_ids": [zeros(1, 7, dtype=torch.long)],
        "micro_conds": [zeros(1, 5)],
        "encoder_hidden_states_image": [nothing, zeros(1, 257, image), zeros(1, 1, image)],
        "image_embeds": [nothing, zeros(1, 9, image), zeros(1, 9, 1152)],
        "text_lens": [lambda: torch.tensor([7], device="meta")],
        "prior_token_id": [zeros(1, 256, dtype=torch.long)],
        "prior_token_drop": [zeros(1, 256, dtype=torch.bool)],
        "encoder_hidden_states_t5": [zeros(1, 7, of("cross_attention_dim_t5", "text_embed_dim_t5", default=2048))],
        "image_meta_size": [zeros(1, 6)],
        "conditioning_scale": [lambda: 1.0],
        "context_latents": [zeros(1, 16, of("in_channels", default=192) - of("audio_acoustic_hidden_dim", default=64))],
        "image_latents": [zeros(1, 4, 3, 16, 16)],
        "clip_text_pooled": [zeros(1, 1, 1280)],
        "text_encoder_layers": [lambda: [zeros(1, 7, of("text_encoder_dim", default=2048))()] * 46],
        "visual_rope_pos": [lambda: [torch.arange(n, device="meta") for n in (3, 8, 8)]],
        "text_rope_pos": [lambda: torch.arange(7, device="meta")],
        "encodings_and_masks": [lambda: [(zeros(1, 7, 768)(), zeros(1, 7)())]],
        "decoder_input_tokens": [zeros(1, 16, of("input_dims", default=128))],
        "decoder_noise_time": [zeros(1)],
    }
    return names | {key: [make] for key, make in GIVEN.get(type(model).__name__, {}).items()}


def _first_inputs(model: nn.Module) -> list[Any]:
    """As the first layers of each kind take them."""
    found: dict[tuple[int, ...], Any] = {}
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and len(found) < 8:
            sides = {1: (64,), 2: (32, 32), 3: (5, 32, 32)}[module.weight.ndim - 2]
            found[(1, module.in_channels, *sides)] = zeros(1, module.in_channels, *sides)
        elif isinstance(module, nn.Linear) and len(found) < 8:
            found[1, 16, module.in_features] = zeros(1, 16, module.in_features)
    return [*found.values()]


def _text_inputs(model: nn.Module) -> list[int]:
    """The widths of what layers of the text take, by their names."""
    words = re.compile("context|text|caption|encoder|txt|cap_|cond|cross|add_[kqv]|to_k")
    found = [m.in_features for n, m in model.named_modules() if isinstance(m, nn.Linear) and words.search(n)]
    return [*dict.fromkeys(found)][:8]


def nothing() -> None:
    return None


TEXT_WIDTHS = ("joint_attention_dim", "cross_attention_dim", "caption_channels", "text_embed_dim", "text_dim")
TEXT_WIDTHS += ("encoder_hid_dim", "cap_feat_dim", "text_states_dim", "in_text_dim", "text_hidden_size", "context_dim")
TEXT_WIDTHS += ("text_in_dim", "txt_dim", "encoder_hidden_size", "cond_token_dim", "hidden_size")


# transformers

TASKS = 2  # models with heads of each family, beside the base model


def transformers() -> Iterator[Family]:
    """Every family of transformers as tests/support/families builds it, and models of its tasks, with heads."""
    import transformers as hf

    from tests.support import families

    tasks: dict[str, dict[str, None]] = {}
    for key, of in vars(hf.models.auto.modeling_auto).items():
        if key.startswith("MODEL_FOR_") and key.endswith("_MAPPING_NAMES") and "BACKBONE" not in key:
            for name, made in of.items():
                for one in (made,) if isinstance(made, str) else made:
                    tasks.setdefault(name, {})[one] = None
    for name in sorted({*families.FAMILIES, *tasks} & {*families.CONFIGS}):
        if name in families.FAMILIES:
            yield Family(f"transformers.{name}", partial(families.built, name), _of_transformers, whole=False)
        # Whose heads no embedding tells; a multiple choice has inputs of its own
        chosen = sorted(tasks.get(name, {}), key=lambda one: (bool(re.search("LM|Conditional|Choice", one)), one))
        for one in chosen[:TASKS]:
            build = partial(families.built, name, one)
            yield Family(f"transformers.{name}.{one}", build, _of_transformers)


def _of_transformers(model: nn.Module) -> Example:
    from tests.support import families

    return (), families.inputs(model)


LIBRARIES = {"timm": timm, "torchvision": torchvision, "diffusers": diffusers, "transformers": transformers}
