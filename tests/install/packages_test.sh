#!/usr/bin/env bash
# Makes the Debian packages of a shared build (install_shared_test.sh), looks at what they need and hold, unpacks
# them without installing them, and runs use_installed.sh and the tools from there.
#   packages_test.sh BUILD_DIR WORK_DIR CXX
set -euo pipefail
build=$1 work=$2 cxx=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
for tool in dpkg-shlibdeps file; do
  command -v "$tool" > /dev/null || { echo "skipped: there is no $tool"; exit 77; }
done

unpacked=$work/unpacked
rm -rf "$unpacked"
mkdir -p "$unpacked/packages" "$unpacked/root"
(cd "$build" && cpack -G DEB -B "$unpacked/packages") > "$unpacked/cpack.log" || { cat "$unpacked/cpack.log"; exit 1; }

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
if grep -q -E '^KVSHARD_ENABLE_PROMETHEUS:BOOL=(ON|1|TRUE)$' "$build/CMakeCache.txt"; then
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
