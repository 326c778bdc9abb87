#!/usr/bin/env bash
# Makes the Debian packages of a shared kvshard, compiled as BUILD_DIR is (so that ccache has all of it),
# looks at what they need and hold, unpacks them without installing them, and runs use_installed.sh and the
# tools from there.
#   packages_test.sh SOURCE_DIR BUILD_DIR WORK_DIR CXX
set -euo pipefail
source=$1 like=$2 work=$3 cxx=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! command -v dpkg-shlibdeps > /dev/null; then
  echo "skipped: no dpkg-dev"
  exit 77
fi

mkdir -p "$work"
of_cache() { sed -n "s/^$1:[A-Z]*=//p" "$like/CMakeCache.txt"; }
type=$(of_cache CMAKE_BUILD_TYPE)
flags=CMAKE_CXX_FLAGS_${type^^}
launcher=$(command -v ccache || true)
cmake -S "$source" -B "$work/build" -G Ninja -DBUILD_SHARED_LIBS=ON -DCMAKE_CXX_COMPILER="$cxx" \
  ${launcher:+-DCMAKE_CXX_COMPILER_LAUNCHER="$launcher"} -DCMAKE_BUILD_TYPE="$type" "-D$flags=$(of_cache "$flags")" \
  -DKVSHARD_WERROR="$(of_cache KVSHARD_WERROR)" -DKVSHARD_ENABLE_UCX="$(of_cache KVSHARD_ENABLE_UCX)" \
  -DKVSHARD_ENABLE_PROMETHEUS="$(of_cache KVSHARD_ENABLE_PROMETHEUS)" \
  -DKVSHARD_ENABLE_CUDA=OFF -DKVSHARD_BUILD_TESTS=OFF -DKVSHARD_BUILD_TOOLS=ON -DKVSHARD_BUILD_BENCH=OFF \
  -DCMAKE_INSTALL_PREFIX=/usr > "$work/configure.log"
targets=(kvshard kvshard-registry kvshard-bench kvshard-trace)
[[ $(of_cache KVSHARD_ENABLE_PROMETHEUS) == OFF ]] || targets+=(kvshard_prometheus)
cmake --build "$work/build" --target "${targets[@]}"

unpacked=$work/unpacked
rm -rf "$unpacked"
mkdir -p "$unpacked/packages" "$unpacked/root"
(cd "$work/build" && cpack -G DEB -B "$unpacked/packages") > "$unpacked/cpack.log" || { cat "$unpacked/cpack.log"; exit 1; }

# must NAME FIELD REGEX: of the package's control file.
must() {
  local value
  value=$(dpkg-deb -f "$unpacked"/packages/"$1"_*.deb "$2")
  if ! [[ $value =~ $3 ]]; then
    echo "package $1: $2 is '$value', which does not match $3"
    exit 1
  fi
}
must libkvshard0 Depends 'libc6 \(>= '
must libkvshard0 Depends 'libssl3'
must libkvshard0 Depends 'libucx0'
must libkvshard-dev Depends 'libkvshard0 \(= '
must kvshard-tools Depends 'libkvshard0 \(= '
must kvshard-tools Depends 'libstdc\+\+6'
if [[ " ${targets[*]} " == *" kvshard_prometheus "* ]]; then
  must libkvshard-prometheus0 Depends 'libkvshard0 \(= '
  must libkvshard-prometheus0 Depends 'libprometheus-cpp-core'
  must libkvshard-prometheus-dev Depends 'libkvshard-prometheus0 \(= .*libkvshard-dev \(= '
fi
for package in "$unpacked"/packages/*.deb; do dpkg-deb -x "$package" "$unpacked/root"; done

# Each file is in the package that it belongs to.
held() { dpkg-deb -c "$unpacked"/packages/"$1"_*.deb | awk '{ print $6 }' | grep -v '/$' | sort; }
if held libkvshard0 | grep -vE '/lib/.*/libkvshard\.so\.0(\.[0-9.]+)?$' | grep -v '^\./usr/share/doc'; then
  echo "libkvshard0 holds more than the library"
  exit 1
fi
grep -qE '/libkvshard\.so$' <<< "$(held libkvshard-dev)"
grep -q '/usr/bin/kvshard-registry$' <<< "$(held kvshard-tools)"

"$here/use_installed.sh" "$unpacked/root/usr" "$unpacked" "$cxx"
LD_LIBRARY_PATH=$(dirname "$(find "$unpacked/root" -name libkvshard.so.0)") \
  "$unpacked/root/usr/bin/kvshard-registry" --help > "$unpacked/registry.log"
echo "packages: $(cd "$unpacked/packages" && echo *.deb)"
