"""What other optimizers call otherwise: errors about unknown options and rules name ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lwopt_backend.spelling import suggestion

# Options of torch, Keller Jordan's Muon, dion, Moonlight, DeepSpeed, Megatron and Hugging Face. A name of ours without
# a rule is the same in all rules; one with is of that rule alone.
OPTIONS = {
    "learning_rate": "lr",
    "wd": "weight_decay",
    "epsilon": "eps",
    "mu": "momentum",
    "beta": "momentum",
    "use_nesterov": "nesterov",
    "backend_steps": "ns_steps",
    "newton_schulz_steps": "ns_steps",
    "num_ns_steps": "ns_steps",
    "coefficient_type": "ns_coefficients",
    "ns_coeffs": "ns_coefficients",
    "use_polar_express": "ns_coefficients",
    "adjust_lr": "adjust_lr_fn",
    "scale_mode": "adjust_lr_fn",
    "cautious_wd": "weight_decay_form",
    "use_gram_newton_schulz": "gram_aspect",
    "fp32_matmul_prec": "ns_dtype",
    "matrix_lr": "matrix.lr",
    "matrix_weight_decay": "matrix.weight_decay",
    "muon_lr": "matrix.lr",
    "muon_learning_rate": "matrix.lr",
    "muon_wd": "matrix.weight_decay",
    "muon_weight_decay": "matrix.weight_decay",
    "muon_momentum": "matrix.momentum",
    "muon_beta": "matrix.momentum",
    "muon_nesterov": "matrix.nesterov",
    "muon_use_nesterov": "matrix.nesterov",
    "muon_num_ns_steps": "matrix.ns_steps",
    "muon_ns_steps": "matrix.ns_steps",
    "muon_coefficient_type": "matrix.ns_coefficients",
    "muon_scale_mode": "matrix.adjust_lr_fn",
    "muon_extra_scale_factor": "matrix.extra_scale_factor",
    "ns_method": "matrix.gram_aspect",
    "elementwise_lr": "elementwise.lr",
    "elementwise_betas": "elementwise.betas",
    "elementwise_eps": "elementwise.eps",
    "elementwise_weight_decay": "elementwise.weight_decay",
    "scalar_lr": "elementwise.lr",
    "adam_lr": "elementwise.lr",
    "adamw_lr": "elementwise.lr",
    "adam_learning_rate": "elementwise.lr",
    "adam_wd": "elementwise.weight_decay",
    "adamw_wd": "elementwise.weight_decay",
    "adam_weight_decay": "elementwise.weight_decay",
    "adamw_weight_decay": "elementwise.weight_decay",
    "betas": "elementwise.betas",
    "adam_betas": "elementwise.betas",
    "adamw_betas": "elementwise.betas",
    "beta1": "elementwise.betas",
    "beta2": "elementwise.betas",
    "adam_beta1": "elementwise.betas",
    "adam_beta2": "elementwise.betas",
    "adam_eps": "elementwise.eps",
    "adamw_eps": "elementwise.eps",
    "adam_epsilon": "elementwise.eps",
}
RULES = {
    "adam": "adamw",
    "torch_adam": "adamw",
    "torch.optim.adamw": "adamw",
    "torch_adamw": "adamw",
    "fusedadam": "adamw",
    "adam8bit": "adamw",
    "dist_muon": "muon",
    "muonwithauxadam": "muon",
    "torch.optim.muon": "muon",
}
# What has no counterpart: what to do.
ADVICE = {
    "torch_adam": "leave it out: what is not a matrix is trained by torch's AdamW, 'adamw', already",
    "adam_w_mode": "leave it out: AdamW's weight decay is decoupled",
    "bias_correction": "leave it out: AdamW corrects its averages",
    "fp32_optimizer_states": "leave it out: state has the dtype of the masters",
    "max_grad_norm": "clip with gradient_clipping in ds_config.json, or with clip_grad_norm_",
    "clip_grad": "clip with gradient_clipping in ds_config.json, or with clip_grad_norm_",
    "gradient_clipping": "it stands beside the optimizer entry in ds_config.json; elsewhere call clip_grad_norm_",
    "use_muon": "the model's structure decides what is a matrix; 'include' and 'exclude' overrule it, by name",
    "algorithm": "the model's structure decides what is a matrix; 'include' and 'exclude' overrule it, by name",
    "muon_params": "pass the model; its structure decides what is a matrix, 'include' and 'exclude' overrule it",
    "adamw_params": "pass the model; its structure decides what is a matrix, 'include' and 'exclude' overrule it",
    "distributed_mesh": "leave it out: meshes are found from the model",
    "process_group": "leave it out: groups of ranks are found from the model, or are the engine's",
    "expert_params": "leave it out: experts are found from the mesh of their parameters, or are the engine's",
    "per_head_muon": "say how many heads a weight has: 'atoms': {'*.q_proj.weight': {'heads': 12}}",
    "num_heads": "say how many heads a weight has: 'atoms': {'*.q_proj.weight': {'heads': 12}}",
    "split_sizes": "say it by name: 'atoms': {'*.w_in.weight': {'split_sizes': [1024, 64]}}",
    "flatten": "say it by name: 'atoms': {'*.conv.weight': 'flatten'}",
}


def option_suggestion(name: str, known: Iterable[str], spelled: Callable[[str], str] = repr) -> str:
    """A clause for an error message: what the option ``name`` of others is called here, or the nearest known name.

    Known names are options of a section, or those of a whole optimizer, where ``"adamw.betas"`` is one in a section.
    """
    known = list(known)
    if name.lower() in ADVICE:
        return ADVICE[name.lower()]
    meant = _meant(name.lower(), known)
    return f"did you mean {spelled(meant)}?" if meant else suggestion(name, known, spelled)


def rule_suggestion(name: str, known: Iterable[str], others: Iterable[str]) -> str:
    """The same for the name of a rule. ``others`` are of the other kind, and no use where this one is wanted."""
    ours = RULES.get(name.lower(), name.lower())
    if ours in others:
        return f"{ours!r} is a rule of the other kind; known here: {', '.join(map(repr, known))}"
    return suggestion(ours, known)


def is_foreign(name: str) -> bool:
    """Whether others have an option of that name, which is called otherwise here or has no counterpart."""
    return name.lower() in OPTIONS or name.lower() in ADVICE


def _meant(name: str, known: list[str]) -> str | None:
    """Our name for what others call so, if it is a known one."""
    rule, _, key = OPTIONS.get(name, name).rpartition(".")
    of_sections = [candidate for candidate in known if candidate.endswith(f".{key}")]
    if rule == "elementwise":
        candidates = [f"elementwise_{key}", *(each for each in of_sections if each != f"matrix.{key}")]
    elif rule == "matrix":  # within a section there is nothing to say: it may be that of the other rule
        candidates = [key, f"matrix.{key}"] if any("." in each for each in known) else []
    else:
        candidates = [key, f"matrix.{key}", *of_sections]
    return next((candidate for candidate in candidates if candidate in known), None)
