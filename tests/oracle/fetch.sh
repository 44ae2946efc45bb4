#!/bin/sh
# Fetches llama.cpp's own tools, as shipped in the source package of llama-cpp-python, into
# ${1:-.cache/llama_cpp_source}, and prints the folder to give as LLAMA_CPP_SOURCE.
set -eu
version=0.3.36
target=${1:-.cache/llama_cpp_source}
source="$target/llama_cpp_python-$version/vendor/llama.cpp"
if [ ! -f "$source/convert_hf_to_gguf.py" ]; then
    mkdir -p "$target"
    "${PYTHON:-python}" -m pip download --quiet --no-deps --no-binary llama-cpp-python \
        --dest "$target" "llama-cpp-python==$version" >&2
    tar -xzf "$target/llama_cpp_python-$version.tar.gz" -C "$target"
fi
cd "$source" && pwd
