#!/usr/bin/env bash
# Everything that needs no GPU: packages, format and layer checks, then build and tests three times:
# optimised, with the address and undefined-behaviour sanitizers, with the thread sanitizer. Where nvcc is
# there, the CUDA code and its tests are compiled too.
# After the optimised build's tests, those labelled rdma run in a virtual machine with RDMA devices.
#   scripts/test.sh [preset...]   only these: release, asan, tsan
# Ends with ctest's summary of the last run; each run has its own above.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Lets ccache find what another checkout compiled.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

presets=("$@")
((${#presets[@]})) || presets=(release asan tsan)
jobs=$(nproc)
failed=()

# build PRESET [TARGET...]: says nothing of what went well.
build() {
  local preset=$1 log
  shift
  log=$(mktemp)
  echo "== build: preset $preset, in build/$preset"
  if ! { cmake --preset "$preset" && cmake --build --preset "$preset" --parallel "$jobs" ${@:+--target "$@"}; } \
    > "$log" 2>&1; then
    grep -vE '^\[[0-9]+/[0-9]+\] (Building|Linking|Re-checking|Copying)' "$log" | tail -n 200
    rm -f "$log"
    return 1
  fi
  rm -f "$log"
}

scripts/setup.sh
echo "== format"
scripts/format.sh --check
echo "== layers"
scripts/check_layers.py

if command -v nvcc > /dev/null; then
  cmake --preset cuda > /dev/null
  # Its other tests are those of the release build.
  mapfile -t targets < <(ninja -C build/cuda -t targets all |
    sed -nE '/^cmake_/d; s/^([a-z0-9_-]*(cuda|gpu|kernel)[a-z0-9_-]*(test|bench)): phony.*/\1/p' | sort -u)
  build cuda kvshard "${targets[@]}"
  echo "== cuda: compiled the library and ${#targets[@]} programs (${targets[*]}); run them where a GPU is"
else
  echo "== cuda: skipped, there is no nvcc"
fi

# The tests labelled rdma, of a build that is there; alone, since the guest takes both cores. It is emulated: where
# other guests of the same host take these cores, it stalls for seconds, which RDMA's retry counters and the probe of
# paths cannot tell from a dead peer or a slow path. So what fails gets one more run, which the log shows.
rdma_tests() {
  local status=0
  echo "== test: label rdma of preset $1, in a virtual machine"
  KVSHARD_REQUIRE_RDMA=1 scripts/rdma_vm.sh -t 2400 \
    ctest --test-dir "build/$1" -L '^rdma$' --no-tests=error --repeat until-pass:2 \
      --output-on-failure 2>&1 | tee build/rdma.log || status=$?
  ((status != 125)) || { echo "== rdma: not run, there is no guest (see above)"; status=0; }
  return "$status"
}

for preset in "${presets[@]}"; do
  build "$preset"
  run=()
  # The thread sanitizer of GCC 12 cannot map its shadow under a kernel's full address randomisation.
  if [[ $preset == tsan ]] && setarch -R true 2> /dev/null; then run=(setarch -R); fi
  echo "== test: preset $preset"
  "${run[@]}" ctest --preset "$preset" --parallel "$jobs" 2>&1 | tee "build/$preset.log" || failed+=("$preset")
  [[ $preset != release ]] || rdma_tests "$preset" || failed+=(rdma)
done
if ((${#failed[@]})); then
  # Once more what they said, so that a long log ends with why.
  for preset in "${failed[@]}"; do
    echo "== what failed in $preset"
    said=$(awk '/^ *[0-9]+\/[0-9]+ Test +#/ { said = /\*\*\*(Failed|Timeout|Exception)/ }
      /^ +Start +[0-9]+:|^[0-9]+% tests passed/ { said = 0 } said' "build/$preset.log" | cut -c-400 | tail -n 80)
    echo "${said:-$(tail -n 40 "build/$preset.log")}"
  done
  echo "== tests failed in: ${failed[*]}"
  exit 1
fi
