#!/bin/bash
# Builds llama-server from the source whose hash the signed manifest names. Nothing is fetched.
#
#   build_llama_server.sh [--source FILE] [--prefix DIR] [--cpu] [--jobs N] [--configure-only]
#                         [--root DIR] [--keep-build]
#
# FILE is the source package of llama-cpp-python, which holds llama.cpp; bring it to the device by
# hand. Default: PREFIX/src/<its name in manifest.json>. DIR/bin/llama-server is what is made,
# PREFIX by default /opt/rl-pipeline-runtime.
#
# On a Jetson (JetPack 6: L4T 36, CUDA 12; JetPack 7: L4T 38 or 39, CUDA 13) it is built for CUDA,
# architecture 87, without virtual memory management, which Orin's drivers refuse. Without nvcc
# nothing is built, unless --cpu says that a server on the CPU is wanted: slow, but it answers.
set -euo pipefail
umask 022

root=/ prefix='' source='' cpu='' jobs='' configure_only='' keep=''
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
die() { printf 'build: %s\n' "$*" >&2; exit 1; }
say() { printf 'build: %s\n' "$*" >&2; }
need_value() { [[ $# -ge 2 && -n $2 ]] || die "$1 needs a value"; }
while [[ $# -gt 0 ]]; do
  case $1 in
    --root) need_value "$@"; root=$2; shift 2 ;;
    --prefix) need_value "$@"; prefix=$2; shift 2 ;;
    --source) need_value "$@"; source=$2; shift 2 ;;
    --jobs) need_value "$@"; jobs=$2; shift 2 ;;
    --cpu) cpu=yes; shift ;;
    --configure-only) configure_only=yes; shift ;;
    --keep-build) keep=yes; shift ;;
    -h|--help) sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' "$here/build_llama_server.sh"; exit 0 ;;
    *) die "unknown option $1; see --help" ;;
  esac
done
prefix=${prefix:-/opt/rl-pipeline-runtime}
jobs=${jobs:-$(nproc)}
[[ $jobs =~ ^[1-9][0-9]?$ ]] || die "--jobs $jobs: expected 1 to 99"
for program in python3 cmake tar sha256sum; do
  command -v "$program" >/dev/null || die "$program is not installed"
done
command -v c++ >/dev/null || command -v g++ >/dev/null || die "no C++ compiler; install g++"
py() { python3 -S -E -B "$@"; }
fact() {
  py -c 'import json, sys; print(json.load(open(sys.argv[1]))["llama_cpp_source"][sys.argv[2]])' \
    "$here/manifest.json" "$1"
}
file=$(fact file) || die "$here/manifest.json names no source of llama.cpp"
wanted=$(fact sha256)
[[ $file =~ ^[A-Za-z0-9._-]+$ && $wanted =~ ^[0-9a-f]{64}$ ]] || die "manifest.json: bad source"
source=${source:-$prefix/src/$file}
[[ -f $source ]] || die "no source at $source: copy $file (sha256 $wanted) there, or name it with --source"
found=$(sha256sum -- "$source" | cut -d' ' -f1)
[[ $found == "$wanted" ]] || die "$source has sha256 $found, the signed manifest names $wanted; not built"

options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_SERVER=ON
  -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF
  -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF)
if [[ -n $cpu ]]; then
  say 'for the CPU (--cpu): expect a fraction of the speed of the GPU'
  options+=(-DGGML_CUDA=OFF)
  backend=cpu l4t=null
else
  release=$(py - "$here" "${root%/}/etc/nv_tegra_release" <<'PYTHON'
import sys
sys.path.insert(0, sys.argv[1])
from l4t import L4tError, parse_release_file
try:
    print(parse_release_file(open(sys.argv[2], encoding="utf-8").read()))
except (OSError, L4tError) as error:
    sys.exit(f"build: {error}")
PYTHON
  ) || die 'this is not a Jetson that is known; --cpu builds a server for the CPU'
  case ${release%%.*} in
    36) cuda=12 jetpack=6 ;;
    38|39) cuda=13 jetpack=7 ;;
    *) die "L4T $release: only JetPack 6 (L4T 36) and 7 (L4T 38, 39) are known" ;;
  esac
  nvcc=${CUDACXX:-$(command -v nvcc || true)}
  [[ -n $nvcc || ! -x /usr/local/cuda/bin/nvcc ]] || nvcc=/usr/local/cuda/bin/nvcc
  [[ -n $nvcc && -x $nvcc ]] || die "no nvcc: install the CUDA toolkit of JetPack $jetpack (nvidia-jetpack), or take --cpu"
  version=$("$nvcc" --version | sed -n 's/.*release \([0-9]*\)\..*/\1/p')
  [[ $version == "$cuda" ]] || die "$nvcc is CUDA ${version:-unknown}; JetPack $jetpack has CUDA $cuda. Set CUDACXX"
  say "for CUDA $version, architecture 87 (JetPack $jetpack)"
  backend="CUDA $version" l4t=\"$release\"
  options+=(-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=87 -DGGML_CUDA_NO_VMM=ON
    -DGGML_CUDA_NCCL=OFF "-DCMAKE_CUDA_COMPILER=$nvcc")
fi

mkdir -p "$prefix"
work=$prefix/.build.$$
trap '[[ -n $keep ]] || rm -rf "$work"' EXIT
mkdir "$work"
tar -xzf "$source" -C "$work" --no-same-owner --wildcards '*/vendor/llama.cpp/*'
tree=$(echo "$work"/*/vendor/llama.cpp)
[[ -f $tree/CMakeLists.txt ]] || die "$source holds no llama.cpp"
# Nothing may come over the network: a build that would fetch fails instead.
cmake -S "$tree" -B "$work/build" -DFETCHCONTENT_FULLY_DISCONNECTED=ON "${options[@]}" >"$work/configure.log" 2>&1 \
  || { tail -n 25 "$work/configure.log" >&2; die 'cmake did not configure llama.cpp'; }
if [[ -n $configure_only ]]; then
  say "configured with ${options[*]}"
  exit 0
fi
say "building with $jobs jobs; minutes on a desktop, about half an hour on an Orin Nano"
cmake --build "$work/build" --parallel "$jobs" --target llama-server >"$work/build.log" 2>&1 \
  || { tail -n 25 "$work/build.log" >&2; die 'llama-server did not build'; }
mkdir -p "$prefix/bin"
cp -- "$work/build/bin/llama-server" "$prefix/bin/.llama-server.$$"
"$prefix/bin/.llama-server.$$" --version >/dev/null 2>&1 || die 'the new llama-server does not start'
printf '{"source_sha256": "%s", "backend": "%s", "l4t": %s}\n' "$wanted" "$backend" "$l4t" >"$prefix/bin/.note.$$"
mv -T "$prefix/bin/.llama-server.$$" "$prefix/bin/llama-server"
mv -T "$prefix/bin/.note.$$" "$prefix/bin/llama-server.json"
say "$prefix/bin/llama-server is ready"
