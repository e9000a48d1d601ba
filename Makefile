# Every target sets up what it needs. ARGS are passed on:
#
#     make pong ARGS="--total_steps 3000 --num_actors 2"

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
PYTHONS ?= python3.10 python3.11 python3.12 python3.13
FUZZ_SECONDS ?= 60
python := $(VENV)/bin/python
# Modules are compiled when they are imported, which most never are.
pip_install := $(python) -m pip install --quiet --disable-pip-version-check --no-compile
cpp_files := $(wildcard csrc/*.h csrc/*.cc tests/csrc/*.h tests/csrc/*.cc)
# Where it is set, each of pytest's workers rewrites all files of tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup pong poly test test-slow test-faults test-long csrc-test csrc-test-slow \
	proto fuzz wheel lint format bench gpu-bundle clean

help:
	@echo "make pong    train Pong with MonoBeast (ARGS=\"--flag value\")"
	@echo "make poly    the same with PolyBeast"
	@echo "make test    style, units, C++ and programs, in minutes (ARGS=\"-k name\")"
	@echo "make test-slow    what takes longer: odd environments, learning"
	@echo "make test-faults  programs that are killed, stopped and starved"
	@echo "make test-long    what takes longest: learning of all agents, the wheel, Slurm, Ray"
	@echo "make setup   the virtual environment $(VENV) and the C++ part, and nothing else"
	@echo "make wheel   wheels with all that the C++ part needs, in dist/"
	@echo "make fuzz    FUZZ_SECONDS (60) of random messages, for each side"
	@echo "make bench   steps per second of this machine, ten minutes"
	@echo "make gpu-bundle  what benchmarks/gpu.sh needs on a machine without a network"
	@echo "make lint    what CI checks of the style; make format mends it"
	@echo "make clean   removes $(VENV) and everything built"

setup: $(VENV)/.dev $(VENV)/.csrc

pong: $(VENV)/.run
	$(python) -m monobeast --env PongNoFrameskip-v4 $(ARGS)

poly: setup
	$(python) -m polybeast --env PongNoFrameskip-v4 $(ARGS)

# More workers than two cores need: most tests wait now and then, those of faults mostly.
test: lint csrc-test
	$(python) -m pytest -n 4 --dist worksteal $(ARGS)

test-slow: csrc-test-slow $(VENV)/.slow
	$(python) -m pytest -n 5 --dist worksteal -m "slow and not long" $(ARGS)

test-long: setup $(VENV)/.long
	$(python) -m pytest -n 3 --dist worksteal -m long $(ARGS) \
		tests/test_*.py tests/faults.py

test-faults: setup
	$(python) -m pytest -n 6 --dist worksteal $(ARGS) \
		tests/faults.py tests/dialing_faults.py

lint: setup
	$(python) -m ruff check .
	$(python) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(cpp_files)

format: setup
	$(python) -m ruff check --fix .
	$(python) -m ruff format .
	$(VENV)/bin/clang-format -i $(cpp_files)

# The C++ tests, with the sanitizers of memory, and with that of threads.
csrc-test: csrc-test-address
csrc-test-slow: csrc-test-thread
csrc-test-%: setup
	@$(MAKE) --no-print-directory -j 2 build/csrc/$*/tests
	@echo "C++ tests, $*"
	@build/csrc/$*/tests --minimal

# torchbeast/remote/torchbeast_pb2.py, which is committed: server hosts need no compiler.
proto: $(VENV)/.system
	protoc -Icsrc --python_out=torchbeast/remote csrc/torchbeast.proto

# What servers answer, then what learners ask. Found inputs go on from run to run.
fuzz: setup build/csrc/fuzz/fuzz_stream
	@mkdir -p build/corpus
	ASAN_OPTIONS=malloc_context_size=2:quarantine_size_mb=16 build/csrc/fuzz/fuzz_stream \
		-max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -timeout=10 \
		-rss_limit_mb=2048 -max_len=4096 -entropic=0 build/corpus tests/csrc/corpus
	$(python) -m tests.fuzz_requests --seconds $(FUZZ_SECONDS)

# One for each of these interpreters that is there, with gRPC's libraries inside.
wheel: $(VENV)/.dev $(VENV)/.system
	rm -rf build/wheels
	@for python in $(PYTHONS); do \
		$$python -c "" 2>/dev/null || { echo "make: no $$python here"; continue; }; \
		$$python -m pip wheel --quiet --disable-pip-version-check --no-deps \
			--wheel-dir build/wheels . || exit 1; \
	done
	@test -e build/wheels || { echo "make: no wheel was built" >&2; exit 1; }
	PATH="$(abspath $(VENV))/bin:$$PATH" $(python) -m auditwheel repair \
		--wheel-dir dist build/wheels/*.whl

# What benchmarks/gpu.sh needs on a machine with Python 3.12 and no network that has
# PyTorch, NumPy, OpenCV, TensorBoard, rich, psutil, pytest, pytest-xdist and hypothesis.
gpu-bundle: $(VENV)/.dev
	rm -rf dist/gpu
	$(MAKE) --no-print-directory wheel PYTHONS=python3.12
	mkdir -p dist/gpu build
	cp dist/torchbeast-*-cp312-*.whl dist/gpu
	grep -E '^(gymnasium|grpcio|protobuf|ale-py)' requirements.txt > build/gpu-requirements.txt
	$(python) -m pip download --quiet --disable-pip-version-check --dest dist/gpu \
		--no-deps farama-notifications --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \
		--platform manylinux_2_28_x86_64 --requirement build/gpu-requirements.txt
	du -sh dist/gpu

bench: setup
	$(python) benchmarks/throughput.py --rounds 1 --seconds 20 --limit_seconds 1.5 $(ARGS)

clean:
	rm -rf $(VENV) build dist *.so *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp file is newer than what was installed for it. The environment is made anew if
# it was broken off half-way, or if its Python is gone.
$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "make: $(PYTHON) is `$(PYTHON) -V 2>&1`, expected Python 3.10 or newer:" \
		"make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(MAKE) --no-print-directory \
		system-package PACKAGE=python3-venv
	@test ! -e $(VENV) || test -e $(VENV)/.made || test -e $(VENV)/.run || \
		{ echo "make: $(VENV) is there, and was not made by make:" \
		"move it away, or make VENV=/another/directory" >&2; exit 1; }
	rm -rf $(VENV)
	mkdir -p $(VENV)
	touch $(VENV)/.made
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.python requirements.txt
	$(pip_install) -r requirements.txt
	$(python) -c "import gymnasium, torch"
	touch $@

# What the examples ask for beyond that is for drawing, or another Gymnasium: --no-deps.
examples := $(wildcard examples/*/requirements.txt)
$(VENV)/.dev: $(VENV)/.run requirements-dev.txt $(examples)
	$(pip_install) -r requirements-dev.txt
	$(pip_install) --no-deps \
		$(examples:%=-r %)
	touch $@

# What slow tests need: Kubernetes' schemas, Triton's interpreter, EnvPool, ONNX, trackers,
# Optuna, and what executes a notebook.
$(VENV)/.slow: $(VENV)/.dev
	$(pip_install) \
		--constraint requirements.txt kubernetes-validate==1.34.1 triton==3.8.0 \
		envpool==1.2.5 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 \
		wandb==0.31.0 optuna==5.0.0 nbclient==0.11.0 ipykernel==7.4.0
	touch $@

# What long tests need: the engines that fleets run on, and one more tracker.
$(VENV)/.long: $(VENV)/.dev
	@command -v slurmctld >/dev/null && command -v munged >/dev/null || \
		$(MAKE) --no-print-directory system-package \
		PACKAGE="slurmctld slurmd slurm-client munge"
	$(pip_install) \
		--constraint requirements.txt ray==2.60.0 mlflow-skinny==3.17.2
	touch $@

# The C++ part, built in place.
$(VENV)/.csrc: $(VENV)/.dev $(VENV)/.system setup.py pyproject.toml $(wildcard csrc/*)
	$(pip_install) --no-build-isolation \
		--no-deps --editable .
	$(python) -c "import libtorchbeast"
	touch $@

# What it is built from is looked for before anything is installed, so that an environment
# of conda or Homebrew will do.
system_packages := g++ pkg-config libgrpc++-dev libprotobuf-dev protobuf-compiler doctest-dev
$(VENV)/.system: $(VENV)/.python
	@command -v c++ >/dev/null && command -v protoc >/dev/null && \
	pkg-config --exists grpc++ protobuf && \
	echo '#include <doctest/doctest.h>' | c++ -x c++ -E - >/dev/null 2>&1 || \
		$(MAKE) --no-print-directory system-package PACKAGE="$(system_packages)"
	touch $@

# The C++ tests' objects: build/csrc/<build>/<file>.o.
builds := thread address
thread_flags := -O1 -g -fsanitize=thread
address_flags := -O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all
CXXFLAGS_TESTS := -std=c++17 -Wall -Wextra -Wshadow -pthread -Icsrc -Ibuild/csrc \
	-MMD -MP
test_objects := $(patsubst tests/csrc/%.cc,%.o,$(wildcard tests/csrc/test_*.cc)) main.o \
	torchbeast.pb.o
corpus_objects := test_corpus.o fuzz_stream.o  # Only for the sanitizers of memory.
thread_objects := $(filter-out $(corpus_objects),$(test_objects))
address_objects := $(test_objects) fuzz_stream.o

build/csrc/torchbeast.pb.cc: csrc/torchbeast.proto
	@mkdir -p build/csrc
	protoc -Icsrc --cpp_out=build/csrc $<

define csrc_build
build/csrc/$(1)/%.o: tests/csrc/%.cc build/csrc/torchbeast.pb.cc
	@mkdir -p build/csrc/$(1)
	c++ $$(CXXFLAGS_TESTS) $$($(1)_flags) -c $$< -o $$@

build/csrc/$(1)/torchbeast.pb.o: build/csrc/torchbeast.pb.cc
	@mkdir -p build/csrc/$(1)
	c++ -std=c++17 -pthread $$($(1)_flags) -c $$< -o $$@

build/csrc/$(1)/tests: $($(1)_objects:%=build/csrc/$(1)/%)
	c++ $$($(1)_flags) -pthread $$^ -o $$@ `pkg-config --libs grpc++ protobuf`
endef
$(foreach build,$(builds),$(eval $(call csrc_build,$(build))))
-include $(wildcard build/csrc/*/*.d)

fuzz_flags := -std=c++17 -O2 -g -fsanitize=address,undefined -fno-sanitize-recover=all \
	-Icsrc -Ibuild/csrc
build/csrc/fuzz/fuzz_stream: tests/csrc/fuzz_stream.cc build/csrc/torchbeast.pb.cc $(wildcard csrc/*.h)
	@command -v clang++ >/dev/null || $(MAKE) --no-print-directory system-package \
		PACKAGE="clang"
	@mkdir -p build/csrc/fuzz
	clang++ $(fuzz_flags) -c build/csrc/torchbeast.pb.cc -o build/csrc/fuzz/torchbeast.pb.o
	clang++ $(fuzz_flags) -fsanitize=fuzzer tests/csrc/fuzz_stream.cc \
		build/csrc/fuzz/torchbeast.pb.o -o $@ `pkg-config --libs grpc++ protobuf`

# Installs PACKAGE where that is possible without asking; says what to type where not.
.PHONY: system-package
system-package:
	@if command -v apt-get >/dev/null && [ "`id -u`" = 0 ]; then \
		apt-get update -q && apt-get install -qy $(PACKAGE); \
	elif command -v apt-get >/dev/null && sudo -n true 2>/dev/null; then \
		sudo apt-get update -q && sudo apt-get install -qy $(PACKAGE); \
	else \
		echo "make: $(PACKAGE) is missing. Type this, then make again:" >&2; \
		echo "    sudo apt-get update && sudo apt-get install -y $(PACKAGE)" >&2; \
		exit 1; \
	fi
