#!/usr/bin/env bash
# Runs what needs a GPU: the tests labelled gpu, the same under compute-sanitizer, and the GPU bench.
#
#   scripts/gpu_tests.sh [BIN_DIR [OUT_DIR]]
#
# BIN_DIR holds cuda_copy_engine_test, cuda_session_test and gpu_copy_bench, built elsewhere and carried here (the
# CUDA runtime, gtest and this project are linked statically; a UCX with CUDA is found by LD_LIBRARY_PATH and
# UCX_MODULE_DIR). Without it they are built here first. Logs and
# gpu_copy_bench.jsonl go to OUT_DIR. Exits with 1 if anything failed.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
bin=${1:-}
out=${2:-$root/build/gpu-results}
sanitizer_limit=${KVSHARD_SANITIZER_LIMIT:-300s}
mkdir -p "$out"

if [ -z "$bin" ]; then
  bin=$root/build/gpu-bin
  cmake --preset cuda -S "$root" -B "$root/build/cuda" >"$out/build.log" &&
    cmake --build "$root/build/cuda" --target cuda_copy_engine_test cuda_session_test gpu_copy_bench >>"$out/build.log" ||
    { tail -n 30 "$out/build.log"; exit 1; }
  mkdir -p "$bin"
  cp "$root/build/cuda/tests/copy/cuda_copy_engine_test" "$root/build/cuda/tests/session/cuda_session_test" \
    "$root/build/cuda/bench/gpu_copy_bench" "$bin"
fi

failed=0
verdict() { # name, exit status
  if [ "$2" -eq 0 ]; then echo "ok      $1"; else echo "FAILED  $1 (exit $2, see $out)"; failed=1; fi
}
export KVSHARD_REQUIRE_GPU=1
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem --format=csv,noheader || true

# The bench has the GPU to itself.
"$bin/gpu_copy_bench" >"$out/gpu_copy_bench.jsonl" 2>"$out/gpu_copy_bench.log"
verdict "bench: bytes verified" $?
"$bin/cuda_copy_engine_test" --gtest_color=no >"$out/tests.log" 2>&1
verdict "tests" $?
grep -E "^\[  (FAILED|PASSED|SKIPPED)" "$out/tests.log"
"$bin/cuda_session_test" --gtest_color=no >"$out/session.log" 2>&1
verdict "session tests" $?
grep -E "^\[  (FAILED|PASSED|SKIPPED)" "$out/session.log"

# Small sizes. The sanitizer makes each launch wait for the stream before it, so the four tests that launch behind
# a stream which they hold would never end; and it does not see what another process wrote, so the tests of that
# are left out too.
if command -v compute-sanitizer >/dev/null; then
  export KVSHARD_TEST_BIG_BYTES=200000
  pids=()
  for tool in memcheck racecheck initcheck; do
    options=()
    # A test asks for more memory than there is, and is refused, as it should be.
    [ $tool = memcheck ] && options=(--report-api-errors no)
    timeout "$sanitizer_limit" compute-sanitizer --tool $tool --error-exitcode 9 "${options[@]}" \
      "$bin/cuda_copy_engine_test" --gtest_color=no \
      --gtest_filter='-*GathersTheFinalBytes*:*ScattersOnlyAfter*:*PullsOnlyAfter*:*AnotherDirection*:*AnotherProcess*' >"$out/$tool.log" 2>&1 &
    pids+=($!)
  done
  for tool in memcheck racecheck initcheck; do
    wait "${pids[0]}"
    verdict "compute-sanitizer $tool" $?
    pids=("${pids[@]:1}")
    grep -E "ERROR SUMMARY|RACECHECK SUMMARY|^\[  (FAILED|PASSED)" "$out/$tool.log"
  done
else
  echo "skipped compute-sanitizer: not installed"
fi
exit $failed
