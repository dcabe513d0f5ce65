#!/bin/sh
# torch 2.13.0: torch.distributed.checkpoint's save(), then format_utils.dcp_to_torch_save().
#
# Guess: the file has what torch.save() would have written: a converter keeps the keys and kinds of a state dict.
# Loops keep such entries: a table by the number of a source, a dictionary that is empty at the start.
#
# Seen: keys that are numbers, booleans or None become text, and an empty dictionary is gone, without a word.
# So sampler.load_state_dict(found["sampler"]) finds no key 3. Lists and tuples stay.

set -- torch==2.13.0
. "$(dirname "$0")/environment"
python -W ignore - <<'PY'
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

entries = {"seen": {3: torch.ones(1), False: 2, None: 4}, "waiting": {}, "pair": (torch.ones(1), []), "step": 7}
dcp.save(entries, checkpoint_id="checkpoint", no_dist=True)
dcp_to_torch_save("checkpoint", "file.pt")
found = torch.load("file.pt")
print("saved:", entries)
print("found:", found)
assert [*found["seen"]] == ["3", "False", "None"]
assert found.keys() == {"seen", "pair", "step"}
PY
