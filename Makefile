# make train         set everything up, then train a small GPT with layer-wise Muon under the deepspeed launcher
# make train-fsdp2   the same training on FSDP2, under torchrun
# make check         what is checked without running anything: ruff's rules, the format, types, the words of the pages
# make test          set everything up, then run the tests: everything once, in a quarter of an hour on two cores
# make test-full     whole tables in place of pairs, on gloo and on the strict transport, every launcher and page, the
#                    benchmarks, the oldest DeepSpeed and torch, what compares numbers as on CPUs with AVX2 and with SSE
#                    alone, and the package without each of its waits, which the sanitizer of streams has to find
# make test-versions parts of the tests with every other torch, DeepSpeed and transformers that is tested; ARGS=torch,
#                    ARGS=deepspeed, ARGS=transformers, ARGS=oldest or ARGS=torch==2.15.0 for some; TORCH_INDEX_URL
#                    names an index of CPU builds. ARGS=zoo, which it leaves out otherwise: every family of timm,
#                    torchvision, diffusers and transformers, and what is told of each weight, beside a judge
# make test-peers    clients and peers that are not ours, each in an environment of its own; ARGS="trl lightning" for some
# make test-faults   the fault campaign: kills, full disks, damaged and hostile files, bad settings; at most an hour
# make test-gpu      what needs an NVIDIA GPU, without a network: bits, waits, memory, several ranks on it, a benchmark;
#                    results go to runs/gpu, or to the folder $OUT
# make mutants       change one line of the core at a time, and run the tests that execute it: what does no test kill?
#                    ARGS="--count 60 --seed 1" draws, ARGS=FILE:LINE takes all of a line; the first run notes for each
#                    test which lines it executes, which takes as long as the tests
# make docs          build the pages in docs/ as a site, strictly, into site/
# make compare       train AdamW and LayerWiseMuon on the same batches, after a small sweep of learning rates for each;
#                    ARGS=--rules compares every published rule, with three seeds; ARGS=--cnn the words for
#                    convolutions, on scikit-learn's digits
#
# PYTHON=...     the interpreter to start from (default: python3); one that has torch keeps it
# CONFIG=...     another configuration to train with
# ARGS="..."     further arguments, e.g. make train ARGS="--steps 50 --data my_text/" or make test ARGS=tests/unit/plan/test_plan.py

PYTHON ?= python3
ARGS ?=
RUN = OMP_NUM_THREADS=1 "$$(cat .make/python)"
PYTEST = -m pytest -n 2 --dist loadfile --durations=15
# What compares numbers, and the kernels that torch, oneDNN and MKL take on CPUs with AVX2, and with SSE alone.
NUMERIC = tests/engines tests/checkpoint tests/unit/rules tests/docs/test_examples.py tests/docs/test_hugging_face.py \
	tests/docs/test_sixteen_bits.py
AVX2 = ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
SSE = ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2
OUT ?= runs/gpu
ON_GPU = CUBLAS_WORKSPACE_CONFIG=:4096:8 "$$(cat .make/python 2> /dev/null || echo $(PYTHON))"
train: CONFIG ?= configs/zero2_muon.json
train-fsdp2: CONFIG ?= configs/fsdp2_muon.json

.PHONY: train train-fsdp2 check test test-full test-versions test-peers test-faults test-gpu mutants docs compare environment clean
.DEFAULT_GOAL := train

train: environment
	@"$$(cat .make/python)" scripts/launch.py examples/train_gpt.py --deepspeed --deepspeed_config $(CONFIG) $(ARGS)

train-fsdp2: environment
	@"$$(cat .make/python)" scripts/launch.py --torchrun examples/train_gpt.py --engine fsdp2 --config $(CONFIG) $(ARGS)

compare: environment
ifneq ($(findstring --cnn,$(ARGS)),)
	@"$$(cat .make/python)" -m pip install --quiet scikit-learn
endif
	@"$$(cat .make/python)" examples/compare.py $(ARGS)

check: environment
	@"$$(cat .make/python)" -m ruff check .
	@"$$(cat .make/python)" -m ruff format --check .
	@"$$(cat .make/python)" scripts/typecheck.py
	@"$$(cat .make/python)" scripts/prose.py
	@"$$(cat .make/python)" -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@"$$(cat .make/python)" -m check_jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/*.yml

test: environment
	@$(RUN) $(PYTEST) $(ARGS)

test-full: environment
	@$(RUN) $(PYTEST) --full $(ARGS)
ifeq ($(strip $(ARGS)),)
	@$(AVX2) $(RUN) $(PYTEST) $(NUMERIC)
	@$(SSE) $(RUN) $(PYTEST) $(NUMERIC)
	@$(RUN) $(PYTEST) --transport strict
	@$(RUN) $(PYTEST) tests/gpu/test_gpu.py --device cpu
	@$(RUN) scripts/drop_waits.py
	@$(RUN) scripts/versions.py oldest
endif

test-versions: environment
	@$(RUN) scripts/versions.py $(ARGS)

test-peers: environment
	@$(RUN) scripts/beside.py peers $(ARGS)

test-faults: environment
	@$(RUN) scripts/beside.py faults $(ARGS)

# Without `environment`, which needs a network.
test-gpu:
	@$(ON_GPU) -m pytest tests/gpu/test_gpu.py --device cuda --junit-xml="$(OUT)/tests.xml" $(ARGS)
	@$(ON_GPU) -m benchmarks.step --device cuda --ranks 1 --engine plain fsdp2 zero1 zero2 zero3 owned \
		--layers 6 --width 2048 --tokens 2048 --json "$(OUT)/step.json"

mutants: environment
	@$(RUN) scripts/mutants.py $(ARGS)

docs: environment
	@$(RUN) scripts/beside.py docs $(ARGS)

environment:
	@$(PYTHON) scripts/environment.py > /dev/null

clean:
	rm -rf .venv .make runs site
