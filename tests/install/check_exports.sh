#!/usr/bin/env bash
# A shared kvshard exports its own API and nothing else: what it was built from must not meet an engine's
# own copies. Of its C API it exports all.
#   check_exports.sh LIBRARY HEADER     HEADER is kvshard.h
set -euo pipefail
exported=$(nm -D -C --defined-only "$1" | cut -d' ' -f3-)
if ! grep -q '^kvshard::PageLayout::create' <<< "$exported"; then
  echo "$1 does not export the API"
  exit 1
fi
declared=$(sed 's|/\*.*||' "$2" | grep -oE '\bkvshard_[a-z_]+\(' | tr -d '(' | sort -u)
foreign=$(grep -vE '^((typeinfo|typeinfo name|vtable) for )?kvshard::' <<< "$exported" | grep -vxF "$declared" || true)
private=$(grep -E '^kvshard::(log|http|wire|ucx|c_api)::' <<< "$exported" || true)
mentions=$(grep -E 'spdlog|fmt::|httplib|nlohmann' <<< "$exported" || true)
if [[ -n $foreign$private$mentions ]]; then
  echo "$1 exports what is not its API:"
  printf '%s\n' "$foreign" "$private" "$mentions" | sed '/^$/d' | sort -u
  exit 1
fi
missing=$(comm -23 <(echo "$declared") <(sort -u <<< "$exported"))
if [[ -n $missing ]]; then
  printf '%s\n' "$1 does not export what $2 declares:" "$missing"
  exit 1
fi
echo "exports: $(wc -l <<< "$exported") symbols, $(wc -l <<< "$declared") of them of the C API"
