#!/bin/sh
# Builds llama.cpp's own llama-quantize, llama-perplexity and llama-imatrix from the source that
# fetch.sh brings, once (about 3 minutes on 2 idle cores), and prints the folder they lie in, to be
# given as LLAMA_CPP_TOOLS. The settings are those with which pip builds llama-cpp-python's library:
# optimised for this machine, with OpenMP, so that speeds can be compared.
# build.sh SOURCE [TARGET [JOBS]]
set -eu
source=$1
target=${2:-.cache/llama_cpp_tools}
jobs=${3:-2}
tools="llama-quantize llama-perplexity llama-imatrix"
command -v cmake >/dev/null || { echo "cmake is missing: install it (Debian and Ubuntu: apt-get install cmake)" >&2; exit 2; }
missing=
for tool in $tools; do
    [ -x "$target/bin/$tool" ] || missing=yes
done
if [ -n "$missing" ]; then
    cmake -S "$source" -B "$target" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
        -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TOOLS=ON >&2
    # shellcheck disable=SC2086
    cmake --build "$target" --parallel "$jobs" --target $tools >&2
fi
cd "$target/bin" && pwd
