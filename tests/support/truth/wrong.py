"""What today's product says wrongly of the models beside this file, and does not say to be unclear: expected failures.

By the reason, and by the model, the names of weights, as globs.
"""

WITHOUT_EXAMPLE: dict[str, dict[str, str]] = {
    "a head by a name that is not known": {
        "diffusion.Modulated": "final_layer.linear.weight",
        "diffusion.TwoStreams": "final.linear.weight",
        "diffusion.LongSkips": "unfold.weight",
        "recurrent.ScratchGru": "w_out",
    },
    "the forward is not followed, and several matrices are one": {
        "recurrent.OneLinearCell": "all_gates.weight",
        "agents.World": "posterior.weight",
    },
    "a name is taken for a head's": {
        "recurrent.TimeMix": "att.output.weight",
    },
    "one kernel of three dimensions": {
        "experts.Kernels": "o.wo",
    },
    "a table by the name of a weight": {
        "encoders.Detector": "squares.weight",
    },
    "taken for a table": {
        "graphs.Sampled": "w_near",
    },
    "cut where it is one": {
        "agents.Squashed": "mean_and_log_std.weight",
    },
}

WITH_EXAMPLE: dict[str, dict[str, str]] = {
    "whole, though it has parts": {
        "recurrent.ScalarDecay": "enter.weight",
    },
    "one kernel of three dimensions": {
        "experts.Kernels": "o.wo",
    },
    "a table by the name of a weight": {
        "encoders.Detector": "squares.weight",
    },
    "a head whose outputs are added up over nodes": {
        "graphs.Convolved": "readout",
    },
}
