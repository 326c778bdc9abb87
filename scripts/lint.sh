#!/usr/bin/env bash
# Runs clang-tidy over our sources, as .clang-tidy says. Minutes on a small machine.
#   scripts/lint.sh [regex]   only files whose path matches; default: src, tools, examples
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
cmake --preset dev > /dev/null
filter=${1:-/(src|tools|examples)/}
python3 - "$filter" << 'END' | xargs -0 -P "$(nproc)" -n 1 clang-tidy -p build/dev --quiet \
  --extra-arg=-Wno-unknown-warning-option
import json, re, sys
files = {entry["file"] for entry in json.load(open("build/dev/compile_commands.json"))}
ours = sorted(f for f in files if re.search(sys.argv[1], f) and "/build/" not in f)
print(f"== lint: {len(ours)} files", file=sys.stderr)
sys.stdout.write("\0".join(ours))
END
echo "== lint: clean"
