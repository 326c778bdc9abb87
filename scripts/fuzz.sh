#!/usr/bin/env bash
# Runs the libFuzzer targets of tests/fuzz one after the other, at low priority.
#   scripts/fuzz.sh [RUNS|SECONDSs] [TARGET...]    10000000 runs or, say, 600s each; all targets
# Needs clang and libclang-rt-dev. New inputs gather in build/fuzz/new/TARGET; a finding is left beside them
# and ends the script. To keep it from coming back: fix it, and copy the input to tests/fuzz/corpus/TARGET.
#   scripts/fuzz.sh --minimise [TARGET...]         keeps in the corpus, of it and the new ones, what adds coverage
# FUZZ_BUILD is the build directory, build/fuzz when unset.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

build=${FUZZ_BUILD:-build/fuzz}
limit=${1:-10000000}
(($# == 0)) || shift
targets=("$@")
((${#targets[@]})) || mapfile -t targets < <(sed -nE 's/^kvshard_fuzz\(([a-z_]+) .*/\1/p' tests/fuzz/CMakeLists.txt)

cmake --preset fuzz -B "$build" > /dev/null
ninja -C "$build" "${targets[@]/%/_fuzz}" > /dev/null

for target in "${targets[@]}"; do
  corpus=tests/fuzz/corpus/$target new=$build/new/$target
  mkdir -p "$new"
  if [[ $limit == --minimise ]]; then
    merged=$(mktemp -d)
    "$build/tests/fuzz/${target}_fuzz" -merge=1 -max_len=2048 "$merged" "$corpus" "$new" 2> /dev/null
    for input in "$merged"/*; do
      cp -n "$input" "$corpus/$(basename "$input" | cut -c1-16).bin"
    done
    rm -r "$merged"
    continue
  fi
  case $limit in
    *s) bound=-max_total_time=${limit%s} ;;
    *) bound=-runs=$limit ;;
  esac
  log=$build/new/$target.log
  # libFuzzer's weights of inputs take half of the time of a session, and more of that of a decoder.
  if ! nice -n 19 "$build/tests/fuzz/${target}_fuzz" "$bound" -entropic=0 -rss_limit_mb=1024 -timeout=10 -print_final_stats=1 \
    -artifact_prefix="$build/new/$target-" "$new" "$corpus" > "$log" 2>&1; then
    tail -n 60 "$log"
    echo "== fuzz: $target: a finding; the input is in $build/new"
    exit 1
  fi
  runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
  rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log")
  echo "== fuzz: $target: $runs executions, $rate a second, no finding, $(find "$new" -type f | wc -l) new inputs"
done
