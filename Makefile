# onepass: `make demo` and `make test` work in a new clone; everything is installed in .venv.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
WORKERS ?= 2
SET ?= memory
N ?= 5000
SEED ?= 0
ONLY ?= *
ROTATION ?= $(shell date +%Y-%j)

BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
SOURCES := src tests tools examples

.PHONY: help demo test test-all test-newest gpu gpu-sanitize sanitize check docs golden oracle fuzz opdb bench prices calibrate clean

help:
	@echo "make demo     several real workloads: checked, explained, timed"
	@echo "make test     what continuous integration runs (WORKERS=$(WORKERS), ROTATION draws the sample of rotating tests)"
	@echo "make test-all every test"
	@echo "make test-newest  every test with the newest torch and Triton of pip, in $(NEWEST)"
	@echo "make gpu      the value suite on this machine's GPU, from the source folder (WORKERS, SECONDS of fuzzing)"
	@echo "make sanitize the test suite with kernels built by AddressSanitizer (gcc; slow)"
	@echo "make check    formatting, lint, types, limits of size and import cycles"
	@echo "make docs     the documentation as a site, build/site/index.html"
	@echo "make golden   regenerate the golden files"
	@echo "make oracle   every decision for a corpus and five chips beside the recorded ones; UPDATE=1 records them"
	@echo "make fuzz     N=5000 random programs from SEED=0 (resumes where it stopped)"
	@echo "make opdb     every sample of torch's operator database (resumes where it stopped)"
	@echo "make bench    speed beside eager, Inductor, XLA and hand-written kernels, on the GPU if there is one"
	@echo "              SET=contractions: attention and matmuls beside SDPA, flex_attention and cuBLAS, on a GPU"
	@echo "              SET=models: Llama, BERT, ResNet and others, whole (ONLY=words; RESUME=file, MINUTES=9: in parts)"
	@echo "make prices   every kernel's predicted time beside the measured one, on a GPU (RESUME=file)"
	@echo "make calibrate  the numbers that prices are made of, fitted to kernels measured on this GPU (TARGET=$(TARGET))"

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "setuptools>=68" wheel
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install --quiet --no-build-isolation -e ".[dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/onepass demo

PYTEST = -m pytest -q -n $(WORKERS) --dist worksteal tests
test: $(STAMP)
	ONEPASS_FUZZ_SECONDS=15 $(BIN)/python $(PYTEST) --rotate $(ROTATION)

test-all: $(STAMP)
	$(BIN)/python $(PYTEST)

# Everything again with versions that are not the pinned ones; gigabytes, so not for every change.
NEWEST ?= .venv-newest
test-newest:
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade "setuptools>=68" wheel torch triton
	$(NEWEST)/bin/python -m pip install --quiet --no-build-isolation -e ".[dev]"
	$(NEWEST)/bin/python -c "import torch, triton; print('torch', torch.__version__, 'triton', triton.__version__)"
	$(NEWEST)/bin/python $(PYTEST)

# From the source folder with the machine's own torch and triton: nothing is installed. A smoke test goes first.
GPU_PYTHON ?= $(PYTHON)
SECONDS ?= 120
GPU = PYTHONPATH=src:. ONEPASS_TEST_DEVICE=cuda ONEPASS_FUZZ_SECONDS=$(SECONDS) ONEPASS_FUZZ_SHARDS=$(WORKERS) \
  $(GPU_PYTHON) -m pytest -q
gpu:
	$(GPU) tests/gpu -k a_kernel_runs
	$(GPU) -n $(WORKERS) --dist worksteal tests/gpu tests/fuzz/test_named.py tests/opdb/test_opdb.py \
	  tests/backend/test_models.py tests/tiles/test_accuracy.py
	$(GPU) -n $(WORKERS) --dist worksteal tests/contractions -k "not build and not plan and not recognised"
	$(GPU) -n $(WORKERS) --dist load tests/fuzz/test_random_programs.py

OURS = --kernel-name regex=onepass_.*
gpu-sanitize:
	PYTHONPATH=src:. $(GPU_PYTHON) -m tests.gpu.representative
	for tool in "memcheck $(OURS)" "racecheck $(OURS)" initcheck; do PYTHONPATH=src:. PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
	  compute-sanitizer --error-exitcode 1 --tool $$tool $(GPU_PYTHON) -m tests.gpu.representative || exit 1; done

SANITIZER = $(shell gcc -print-file-name=libasan.so) $(shell gcc -print-file-name=libstdc++.so.6)
sanitize: $(STAMP)
	CC="gcc -fsanitize=address" LD_PRELOAD="$(SANITIZER)" \
	ASAN_OPTIONS=detect_leaks=0:verify_asan_link_order=0:detect_odr_violation=0:allocator_may_return_null=1:use_sigaltstack=0 \
	$(BIN)/python $(PYTEST)

check: $(STAMP)
	$(BIN)/ruff format --check $(wildcard $(SOURCES) benchmarks)
	$(BIN)/ruff check $(wildcard $(SOURCES) benchmarks)
	$(BIN)/mypy
	$(BIN)/python tools/budget.py

docs: $(STAMP)
	$(BIN)/python -c "import markdown" 2>/dev/null || $(BIN)/python -m pip install --quiet "markdown>=3.5"
	$(BIN)/python tools/site_pages.py

golden: $(STAMP)
	$(BIN)/python -m pytest -q --update-golden tests/golden tests/docs tests/tiles/test_builds.py

oracle: $(STAMP)
	PYTHONPATH=src:. $(BIN)/python -m tests.oracle --workers $(WORKERS) --only "$(ONLY)" $(if $(UPDATE),--update)

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --n $(N) --seed $(SEED) --workers $(WORKERS)

opdb: $(STAMP)
	$(BIN)/python -m tests.opdb --workers $(WORKERS)

# Libraries of models, for SET=models alone. timm without its requirements: they would bring torchvision.
MODELS := $(VENV)/.models
$(MODELS): $(STAMP)
	$(BIN)/python -m pip install --quiet "transformers>=5.17" pyyaml huggingface_hub safetensors
	$(BIN)/python -m pip install --quiet --no-deps "timm>=1.0.20"
	touch $@

bench: $(STAMP) $(if $(filter models,$(SET)),$(MODELS))
	$(BIN)/python -m benchmarks --set $(SET) $(if $(filter-out *,$(ONLY)),--only "$(ONLY)") \
	  $(if $(RESUME),--resume $(RESUME)) $(if $(MINUTES),--minutes $(MINUTES))

# From the source folder with the machine's own torch and triton, as `make gpu`.
prices:
	PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks.prices $(if $(RESUME),--resume $(RESUME))

# Numbers of this machine's GPU for ir/rates.py: candidates are planned, measured, and the table is fitted and printed.
TARGET ?= sm_90
MEASURED ?= build/candidates.json
CALIBRATE = PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks
calibrate:
	mkdir -p $(dir $(MEASURED))
	$(CALIBRATE).candidates --target $(TARGET) --plan $(MEASURED).plan
	$(CALIBRATE).candidates --measure $(MEASURED).plan --out $(MEASURED)
	$(CALIBRATE).calibrate $(MEASURED) --target $(TARGET)

clean:
	rm -rf $(VENV) $(NEWEST) build .pytest_cache .ruff_cache .mypy_cache
