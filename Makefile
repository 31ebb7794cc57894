# SPDX-License-Identifier: Apache-2.0
# The commands of this project. CMake does the work; this file installs what is missing and remembers the options.

empty :=
space := $(empty) $(empty)
BUILD ?= build
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
FUZZ_SECONDS ?= 60
BENCH_FLAGS ?=
CMAKE_FLAGS ?=
# The plug-in for NVIDIA GPUs: auto (where a driver and nvcc are found), 1 or 0; and the compute capabilities it is for:
# those of this machine's GPUs, `all`, or such as "80 90".
CUDA ?= auto
CUDA_ARCHITECTURES ?=
# 1: to see whether the kernels compile, in a fraction of the time; they are slow.
CUDA_QUICK ?= 0
# Every build folder shares one copy of oneDNN.
export HALFSTEP_DEPS ?= $(CURDIR)/build/_deps
export CTEST_OUTPUT_ON_FAILURE = 1
# A file may take ten seconds to compile: how far the build is and how long it has taken is said with each.
export NINJA_STATUS = [%f/%t, %es]$(space)

CTEST = ctest --test-dir $(1) -j $(JOBS) --no-tests=error

# $(call configure,FOLDER,CMAKE OPTIONS): once; later builds reconfigure by themselves.
configure = @[ -e $(1)/build.ninja ] || [ -e $(1)/Makefile ] || \
	cmake -S . -B $(1) -G Ninja -DCMAKE_BUILD_TYPE=Release $(2) $(CMAKE_FLAGS)

# The main build folder: also when what is to be built for GPUs has changed.
configure_main = @scripts/cuda_options.sh "$(CUDA)" "$(CUDA_ARCHITECTURES)" "$(CUDA_QUICK)" $(BUILD)/cuda.cmake || exit 1; \
	{ [ -e $(BUILD)/build.ninja ] || [ -e $(BUILD)/Makefile ]; } && [ $(BUILD)/configured -nt $(BUILD)/cuda.cmake ] || \
	{ cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -C $(BUILD)/cuda.cmake $(CMAKE_FLAGS) && touch $(BUILD)/configured; }

.PHONY: all setup demo test cuda-emulated slow machines bench bench-kernels lint tidy tidy-changed format docs fuzz asan asan-part tsan install clean distclean help

all: setup  ## build the library, the program, the examples and the tests (the default)
	$(configure_main)
	@cmake --build $(BUILD) -j $(JOBS)

setup:
	@scripts/setup.sh build

demo: setup  ## install what is missing, build, and train a network in 16 bits and in float32
	$(configure_main)
	@cmake --build $(BUILD) -j $(JOBS) --target halfstep_cli
	@scripts/demo.sh $(BUILD)/bin/halfstep

test: all  ## install what is missing, build, and run the tests
	@$(call CTEST,$(BUILD)) -LE slow

cuda-emulated: setup  ## run the tests of ops, gradients, AMP, modules and optimizers on the CUDA plug-in compiled for the CPU
	$(configure_main)
	@cmake -DHALFSTEP_CUDA_EMULATED=ON $(BUILD) >/dev/null
	@cmake --build $(BUILD) -j $(JOBS)
	@$(call CTEST,$(BUILD)) -R '^emulated_cuda\.'

slow: all  ## run the tests that take minutes
	@$(call CTEST,$(BUILD)) -L slow

machines: all  ## train on two machines made of namespaces, over slow, lossy and cut networks (root; minutes)
	@$(call CTEST,$(BUILD)) -L machines

bench: setup  ## measure; a table beside PyTorch and JAX where they can be installed (BENCH_FLAGS=--quick)
	$(configure_main)
	@cmake --build $(BUILD) -j $(JOBS) --target bench_server
	@scripts/bench.sh $(BUILD) $(BENCH_FLAGS)

bench-kernels: setup  ## measure kernel by kernel
	$(configure_main)
	@cmake --build $(BUILD) -j $(JOBS) --target benchmarks
	@scripts/bench.sh --kernels $(BUILD)

lint:  ## check the layers' includes, file headers and formatting
	@scripts/setup.sh lint
	@scripts/lint.sh

# clang-tidy wants the command of each file, and the headers that protoc makes; nothing else is built.
configure_tidy = $(call configure,build-tidy,-DHALFSTEP_UNITY=OFF -DHALFSTEP_PRECOMPILE=OFF -DHALFSTEP_BUILD_TESTS=OFF \
	  -DHALFSTEP_BUILD_EXAMPLES=OFF -DHALFSTEP_BUILD_BENCHMARKS=OFF)

tidy: setup  ## run clang-tidy (minutes)
	@scripts/setup.sh tidy
	$(configure_tidy)
	@cmake --build build-tidy --target halfstep_protocols
	@scripts/tidy.sh build-tidy

tidy-changed: setup
	@scripts/setup.sh tidy
	$(configure_tidy)
	@cmake --build build-tidy --target halfstep_protocols
	@scripts/tidy.sh build-tidy --changed

format:  ## rewrite the sources in the project's format
	@scripts/setup.sh lint
	@scripts/lint.sh --fix

docs: setup  ## build the API reference into build/docs; undocumented public members fail it
	@scripts/setup.sh docs
	@scripts/check_docs.py --build $(BUILD)/docs
	@echo "The reference is in $(BUILD)/docs/html/index.html"

fuzz: setup  ## run every fuzz target for FUZZ_SECONDS (60)
	@scripts/setup.sh fuzz
	$(call configure,build-fuzz,-DCMAKE_CXX_COMPILER=clang++-19 -DCMAKE_CXX_FLAGS_RELEASE=-O1 -DHALFSTEP_BUILD_FUZZERS=ON \
	  -DHALFSTEP_BUILD_TESTS=OFF -DHALFSTEP_BUILD_CLI=OFF -DHALFSTEP_BUILD_EXAMPLES=OFF -DHALFSTEP_BUILD_BENCHMARKS=OFF)
	@cmake --build build-fuzz -j $(JOBS) --target fuzzers
	@scripts/fuzz.sh build-fuzz/fuzz $(FUZZ_SECONDS)

configure_asan = $(call configure,build-asan,-DHALFSTEP_SANITIZE=address$(comma)undefined -DCMAKE_CXX_FLAGS_RELEASE=-O1)

asan: setup  ## run the tests under the address and undefined-behaviour sanitizers
	$(configure_asan)
	@cmake -DHALFSTEP_CUDA_EMULATED=ON build-asan >/dev/null
	@cmake --build build-asan -j $(JOBS)
	@$(call CTEST,build-asan) -LE 'slow|lint|package|nosan'

asan-part: setup
	$(configure_asan)
	@scripts/asan_part.sh build-asan $(JOBS)

tsan: setup  ## run the tests under the thread sanitizer
	$(call configure,build-tsan,-DHALFSTEP_SANITIZE=thread -DCMAKE_CXX_FLAGS_RELEASE=-O1)
	@cmake --build build-tsan -j $(JOBS)
	@$(call CTEST,build-tsan) -LE 'slow|lint|package|nosan'

install: all  ## install into PREFIX (/usr/local)
	@cmake --install $(BUILD) --prefix "$(PREFIX)"

clean:  ## remove what was built, but not the downloads
	@rm -rf build-asan build-tsan build-fuzz build-tidy build-dev
	@[ ! -d $(BUILD) ] || find $(BUILD) -mindepth 1 -maxdepth 1 ! -name _deps ! -name peer-venv -exec rm -rf {} +

distclean:  ## remove everything that make brought
	@rm -rf build-asan build-tsan build-fuzz build-tidy build-dev $(BUILD)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

comma = ,
