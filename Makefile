# make train         set everything up, then train a small GPT with layer-wise Muon under the deepspeed launcher
# make train-fsdp2   the same training on FSDP2, under torchrun
# make test          set everything up, then run the tests; those about DeepSpeed with the oldest one supported, too
# make test-oldest   only the latter
# make check         what is checked without running anything: ruff's rules, the format, types
# make compare       train AdamW and LayerWiseMuon on the same batches, after a small sweep of learning rates for each
#
# PYTHON=...     the interpreter to start from (default: python3); one that has torch keeps it
# CONFIG=...     another configuration to train with
# ARGS="..."     further arguments, e.g. make train ARGS="--steps 50 --data my_text/"

PYTHON ?= python3
ARGS ?=
train: CONFIG ?= configs/zero2_muon.json
train-fsdp2: CONFIG ?= configs/fsdp2_muon.json

.PHONY: train train-fsdp2 check test test-oldest compare environment clean
.DEFAULT_GOAL := train

train: environment
	@"$$(cat .make/python)" scripts/launch.py examples/train_gpt.py --deepspeed --deepspeed_config $(CONFIG) $(ARGS)

train-fsdp2: environment
	@"$$(cat .make/python)" scripts/launch.py --torchrun examples/train_gpt.py --engine fsdp2 --config $(CONFIG) $(ARGS)

compare: environment
	@"$$(cat .make/python)" examples/compare.py $(ARGS)

check: environment
	@"$$(cat .make/python)" -m ruff check .
	@"$$(cat .make/python)" -m ruff format --check .
	@"$$(cat .make/python)" scripts/typecheck.py

test: environment
	@OMP_NUM_THREADS=1 "$$(cat .make/python)" -m pytest -n 2 --dist loadfile $(ARGS)
ifeq ($(strip $(ARGS)),)
	@OMP_NUM_THREADS=1 "$$(cat .make/python)" scripts/oldest_deepspeed.py
endif

test-oldest: environment
	@OMP_NUM_THREADS=1 "$$(cat .make/python)" scripts/oldest_deepspeed.py $(ARGS)

environment:
	@$(PYTHON) scripts/environment.py > /dev/null

clean:
	rm -rf .venv .make runs
