# make demo      train the example agent          make demo GAME=tictactoe SEED=1
# make test      run the tests, except those of make compiled and make native, and the slow ones, which .ci/run slow runs
# make compiled  run the tests that compile functions with torch.compile
# make native    after a change to C++: run the kernels in guarded memory (the CUDA kernels in a simulator), and check
#                that injected faults are found
# make simulated  run the tests of the CUDA kernels in a simulator on the CPU, which also reports races
# make sanitized  run tests with an extension under AddressSanitizer and UndefinedBehaviorSanitizer
# make fuzz      compare random cases with independent formulas on all processors   make fuzz MINUTES=30
#                reproduce a failure with its seed: make fuzz SEED=12345 (random seeds without SEED)
# make versions  run the tests that depend on PyTorch's version with each version in VERSIONS, each in its own checkout
# make bench     run the benchmarks, and write bench/results/ and the tables of README.md and docs/
# make recipes   train other projects with their own loss and with ours, on the same data, and write
#                bench/results/clients.json and the tables of docs/coming_from.md; CHECKOUTS is the folder of these
#                projects, and missing ones are fetched from GitHub
# make matrix    test the operators and returns with each feature of PyTorch that can break them (torch.compile,
#                torch.func, DDP and so on), and write bench/results/matrix.json, its table and its picture
# make curves    train the example agents on all their games with two seeds, for an hour of one processor, and write and
#                draw bench/results/curves.json and ppo.json
# make docs      build the documentation site into build/docs; warnings, for example about broken links, are errors
# make drawings  compute the numbers of the site's pictures, and draw docs/images/
# make wheels    build, repair and check a wheel for each PyTorch of VERSIONS and TORCH and each Python of PYTHONS, in
#                dist/
# make lint      formatting, linters, types, messages of commits
# make gpu       on a machine with a GPU: build, test, run compute-sanitizer, and measure, in 9 minutes and without a
#                network; write bench/results/<name of the GPU>.json   make gpu PYTHON=python3 RESULTS=folder MINUTES=9
# make cuda-check  without a GPU, compile the CUDA kernels that have a budget, for seven generations of GPUs and with
#                the NVRTC of each supported PyTorch, and count their instructions; write
#                bench/results/instructions.json, and fail if a kernel exceeds its budget or spills registers
#
# Everything runs in .venv, which is created when needed; each target installs its dependencies there.
# Another PyTorch: make test TORCH=torch==2.11.0
TORCH ?= torch==2.13.0
PYTHON ?= python3
VERSIONS ?= 2.11.0 2.15.0
PYTHONS ?= 3.10 3.11 3.12 3.13 3.14
SEED ?= 0
GAME ?= cartpole
PYTEST_OPTIONS ?= -m "not slow and not compiled"
PYTEST_WORKERS ?= auto
RESULTS ?= bench/results
MINUTES ?= 9
VENV := .venv
CHECKOUTS ?= $(VENV)/checkouts
BIN := $(VENV)/bin
# Later installations, and constraints set on the machine, must not change the version of PyTorch. Python compiles
# modules to bytecode on their first import, which takes less time and space than compiling all of them. Python must be
# allowed to write the bytecode: otherwise every process compiles PyTorch's modules again, which takes 20 seconds with
# torch.compile.
export PYTHONDONTWRITEBYTECODE :=
PIP := PIP_CONSTRAINT=$(VENV)/request $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

SOURCES := $(shell find csrc -type f) setup.py pyproject.toml
CXX_FILES := $(shell find csrc tests/native tests/ptx -name '*.cu' -o -name '*.cpp' -o -name '*.h' -o -name '*.cuh')

TIDIED = $(patsubst %.cpp,$(VENV)/tidy/%.ok,$(shell cat $(VENV)/tidy/units 2> /dev/null))

.PHONY: demo test compiled native simulated sanitized fuzz versions bench recipes matrix curves docs drawings lint tidy gpu cuda-check wheels format clean force

demo: $(VENV)/examples $(VENV)/minatar
	$(BIN)/python examples/muzero/train.py --game $(GAME) --seed $(SEED)

# Fill memory with a poison byte on allocation and release, so that reads of uninitialised or freed memory fail. Keep a
# compiler cache in each environment: versions of PyTorch cannot share one.
PYTEST = MALLOC_PERTURB_=165 TORCHINDUCTOR_CACHE_DIR=$$PWD/$(VENV)/inductor \
  $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist=loadgroup

test: $(VENV)/examples $(VENV)/minatar $(VENV)/pytest $(VENV)/clients $(VENV)/nvrtc $(VENV)/driver.so
	$(PYTEST) $(PYTEST_OPTIONS)

compiled: $(VENV)/examples $(VENV)/pytest
	$(PYTEST) -m "compiled and not slow"

native: $(VENV)/pytest $(VENV)/nvrtc $(VENV)/driver.so
	$(PYTEST) tests/native

# A simulated NVIDIA driver, which runs the kernels' PTX on the CPU.
$(VENV)/ptx/%.o: tests/ptx/%.cpp $(wildcard tests/ptx/*.h)
	@mkdir -p $(@D)
	$(CXX) -std=c++20 -O3 -march=native -fPIC -fvisibility=hidden -fno-strict-aliasing -fwrapv -ffp-contract=off -c $< -o $@

$(VENV)/driver.so: $(patsubst tests/ptx/%.cpp,$(VENV)/ptx/%.o,$(wildcard tests/ptx/*.cpp))
	$(CXX) -shared $^ -o $@.$$$$ && mv $@.$$$$ $@

# NVRTC compiles the kernels without a GPU. CUDA builds of PyTorch include it.
$(VENV)/nvrtc: $(VENV)/torch
	@$(BIN)/python -c "from cuda.bindings import nvrtc; nvrtc.nvrtcVersion()" 2> /dev/null || \
	  $(PIP) "cuda-bindings==13.0.*" "nvidia-cuda-nvrtc==13.0.*"
	@touch $@

# The NVRTC of newer versions of PyTorch, to compile with as well: for all GPUs, or for OTHER_TARGETS alone, and then
# nothing is written to bench/results/.
OTHER_NVRTC := $(VENV)/nvrtc-13.2

$(VENV)/nvrtc-%: $(VENV)/torch
	$(PIP) --no-deps --upgrade --target $@ "nvidia-cuda-nvrtc==$*.*"
	@touch $@

# Disassembles the kernels that NVRTC compiles.
$(VENV)/nvdisasm: $(VENV)/torch
	$(PIP) nvidia-cuda-nvdisasm
	@touch $@

SIMULATED := cuda cuda_policies cuda_rows extremes n_step_transitions returns td_steps

simulated: $(VENV)/pytest $(VENV)/nvrtc $(VENV)/driver.so
	PTX_RACES=1 GRADSCALE_CACHE_DIR=$(VENV)/kernels $(PYTEST) --simulated-kernels=$(VENV)/driver.so $(SIMULATED:%=tests/test_%.py) tests/fuzz/test_returns.py

# Compiles CPU kernels for the baseline alone, in a third of the time; `make native` runs them for all instruction sets.
BASELINE := -DGRADSCALE_X86_VARIANTS=0

# Tests of the kernels, and of the C++ code's use of tensors, lists of tensors and threads. Tests that run a compiler
# have the marker "compiled", and are excluded, because the compiler would run under the sanitizers.
SANITIZED := autograd captured_step flow flow_nonlinear loss n_step_transitions normalization returns td_steps statistics support tensors
SANITIZERS := -fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr -fno-sanitize-recover=all
PRELOADED := libasan.so libubsan.so libstdc++.so.6

$(VENV)/sanitized/built: $(VENV)/installed $(SOURCES) $(wildcard gradscale_ext/*.py gradscale_ext/*/*.py)
	CFLAGS="$(SANITIZERS) $(BASELINE) -O1 -g1 -fno-omit-frame-pointer" LDFLAGS="$(SANITIZERS)" \
	  $(BIN)/python setup.py --quiet build_py --build-lib $(VENV)/sanitized/lib \
	  build_ext --build-lib $(VENV)/sanitized/lib --build-temp $(VENV)/sanitized/temp
	@touch $@

sanitized: $(VENV)/sanitized/built $(VENV)/pytest
	LD_PRELOAD="$(foreach library,$(PRELOADED),$(shell $(CC) -print-file-name=$(library)))" PYTHONPATH=$(VENV)/sanitized/lib \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  $(BIN)/pytest -n $(PYTEST_WORKERS) --dist=loadgroup -m "not compiled" $(SANITIZED:%=tests/test_%.py) tests/fuzz

# MINUTES has another default here, and SEED is only used if it is given: its default is for the example agent.
fuzz: MINUTES := 30
fuzz: $(VENV)/pytest
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES) $(if $(filter command%,$(origin SEED)),--seed $(SEED))

versions: $(VERSIONS:%=version-%)

# Tests that depend on PyTorch's version.
VERSIONED := autograd captured_step compile compiled_updates context diagnose_capture diagnosis diagnosis_outside diagnosis_ranks distributed dtensor flow loss_contexts matrix monitor n_step_transitions normalization returns td_steps

version-%: .versions/%/.venv/torch $(VENV)/driver.so
	cp --recursive --preserve $(VENV)/ptx $(VENV)/driver.so .versions/$*/.venv/
	CFLAGS="-O1 $(BASELINE)" $(MAKE) --directory=.versions/$* .venv/pytest .venv/nvrtc TORCH=torch==$*
	cd .versions/$* && GRADSCALE_TEST_BACKEND=aot_eager $(PYTEST) -m "not any_version and not slow" \
	  $(VERSIONED:%=tests/test_%.py)

# CUDA builds are several gigabytes; uv installs them six times as fast as pip.
.versions/%/.venv/torch: $(VENV)/uv force
	@mkdir -p .versions/$*
	@git ls-files -z | tar --create --null --files-from=- | tar --extract --directory=.versions/$*
	@$(MAKE) --directory=.versions/$* .venv/torch TORCH=torch==$* \
	  PIP="$(CURDIR)/$(BIN)/uv pip install --no-cache --quiet --python .venv/bin/python" || \
	  $(MAKE) --directory=.versions/$* .venv/torch TORCH=torch==$*

bench: $(VENV)/examples $(VENV)/clients
	$(BIN)/python bench/install.py --json bench/results/install.json
	$(BIN)/python bench/loss.py --json bench/results/loss.json
	$(BIN)/python bench/heads.py --json bench/results/heads.json
	$(BIN)/python bench/policy_losses.py --json bench/results/policy_losses.json
	$(BIN)/python bench/flow.py --json bench/results/flow.json
	$(BIN)/python bench/returns.py --json bench/results/returns.json
	$(BIN)/python bench/gradients.py --json bench/results/gradients.json
	$(BIN)/python bench/parameters.py --json bench/results/parameters.json
	$(BIN)/python bench/monitor.py --json bench/results/monitor.json
	$(BIN)/python bench/captured_step.py --json bench/results/captured_step.json
	$(BIN)/python bench/ranks.py --json bench/results/ranks.json
	$(BIN)/python bench/hosts.py --json bench/results/hosts.json
	$(BIN)/python bench/throughput.py --json bench/results/actors.json --seconds 100
	$(BIN)/python bench/plot.py
	$(BIN)/python bench/readme.py

recipes: $(VENV)/examples $(VENV)/clients
	$(BIN)/python tools/against.py all "$(CHECKOUTS)" --json bench/results/clients.json
	$(BIN)/python bench/readme.py

matrix: $(VENV)/examples
	$(BIN)/python bench/matrix.py --json bench/results/matrix.json
	$(BIN)/python bench/readme.py
	$(BIN)/python docs/draw.py matrix

curves: $(VENV)/examples $(VENV)/minatar
	$(BIN)/python bench/curves.py --json bench/results/curves.json
	$(BIN)/python bench/ppo_curves.py --json bench/results/ppo.json
	$(BIN)/python bench/plot.py
	$(BIN)/python bench/readme.py

docs: $(VENV)/docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/docs
	@echo "built: build/docs/index.html"

drawings: $(VENV)/examples
	$(BIN)/python docs/draw.py

wheels: $(VENV)/uv
	UV=$(BIN)/uv .ci/wheels "$(sort $(VERSIONS) $(patsubst torch==%,%,$(TORCH)))" "$(PYTHONS)"

lint: $(VENV)/lint $(VENV)/tidy/units
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python bench/readme.py --check
	$(BIN)/python docs/write_api.py --check
	$(BIN)/python tests/commits.py
	@$(MAKE) --no-print-directory --jobs=$$(getconf _NPROCESSORS_ONLN) tidy

# A translation unit is checked again when one of its sources, a header or a check has changed.
tidy: $(TIDIED)

$(VENV)/tidy/build/with_torch.ok: $(filter %.cpp,$(SOURCES))
$(VENV)/tidy/%.ok: %.cpp $(filter %.h,$(SOURCES)) .clang-tidy
	@mkdir -p $(@D)
	$(BIN)/clang-tidy --quiet -p $(VENV)/tidy $< 2> $(@:.ok=.log) || { cat $(@:.ok=.log); exit 1; }
	@touch $@

# Writes the list of translation units, and compile_flags.txt, which clang-tidy reads.
$(VENV)/tidy/units: $(VENV)/lint setup.py tests/compile_flags.py $(filter %.cpp,$(SOURCES))
	@$(BIN)/python tests/compile_flags.py $(@D)

# Uses the existing Python, which has PyTorch: nothing is installed.
gpu:
	$(PYTHON) tests/gpu/run.py --results "$(RESULTS)" --minutes $(MINUTES)

cuda-check: $(VENV)/installed $(VENV)/nvrtc $(OTHER_NVRTC) $(VENV)/nvdisasm $(VENV)/driver.so
	$(BIN)/python tests/cuda_check.py --driver $(VENV)/driver.so $(OTHER_NVRTC:%=--nvrtc %) \
	  $(if $(OTHER_TARGETS),$(OTHER_TARGETS:%=--other-target %),--json bench/results/instructions.json)

format: $(VENV)/lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

clean:
	rm -rf $(VENV) .versions build dist gradscale_ext.egg-info gradscale_ext/_C.*.so gradscale_ext/_build.py

# If TORCH has changed, install this version and compile again.
$(VENV)/request: force
	@mkdir -p $(VENV)
	@echo "$(TORCH)" | cmp -s - $@ || echo "$(TORCH)" > $@

$(VENV)/torch: $(VENV)/request
	@if [ ! -x $(BIN)/python ]; then $(PYTHON) -m venv $(VENV) || { \
	  echo "make: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }; fi
	@echo "installing $(TORCH) into $(VENV)"
	$(PIP) "$(TORCH)" "setuptools>=77" wheel ninja numpy
	@touch $@

$(VENV)/installed: $(VENV)/torch $(SOURCES)
	@echo "compiling gradscale_ext; all messages are in $(VENV)/install.log"
	@rm -f $@
	@{ $(PIP) -vv --no-build-isolation --editable . 2>&1 && touch $@; } | tee $(VENV)/install.log | \
	  sed -un 's|^ *\(\[[0-9]*/[0-9]*\]\).* -o [^ ]*/\([^ /]*\)\.o.*|\1 \2 compiled|p'
	@[ -e $@ ] || { tail -n 40 $(VENV)/install.log >&2; exit 1; }

# Extras of pyproject.toml. The package itself is installed already.
$(VENV)/examples: EXTRAS := examples
$(VENV)/pytest: EXTRAS := test
$(VENV)/clients: EXTRAS := clients,runs,ray
$(VENV)/docs: EXTRAS := docs
$(VENV)/examples $(VENV)/pytest $(VENV)/clients $(VENV)/docs: pyproject.toml | $(VENV)/installed
	@echo "installing the packages of the extras $(EXTRAS)"
	@$(PIP) "gradscale-ext[$(EXTRAS)]"
	@touch $@

# Without MinAtar's dependencies: 240 MB that are only needed for drawing.
$(VENV)/minatar: $(VENV)/torch
	@$(PIP) --no-deps minatar==1.0.15
	@touch $@

$(VENV)/uv: $(VENV)/torch
	$(PIP) uv
	@touch $@

# The extra "lint" of pyproject.toml, without the package: linters run before anything is compiled.
$(VENV)/lint: $(VENV)/torch pyproject.toml
	$(PIP) $(shell sed -n 's/^lint = \[\(.*\)\]/\1/p' pyproject.toml | tr --delete ',"')
	@touch $@
