#!/usr/bin/env bash
# Builds a GPU kind on a machine that cannot reach a package index, from an unpacked llama.cpp:
#
#     benchmarks/gpu/build.sh LLAMA_CPP_FOLDER BUILD_FOLDER [CUDA_ARCH]
#
# On a machine with an index use `make native BACKEND=cuda` instead. The libraries, llama-server and
# llama-bench lie in BUILD_FOLDER/bin afterwards; point GUFO_NATIVE_DIR there.
set -euo pipefail
source_dir=$1 build=$2 arch=${3:-90}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
jobs=$(nproc)
cmake -S "$source_dir" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN' \
    -DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=$arch" -DGGML_CUDA_NCCL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON > "$build.configure.log"
ninja -C "$build" -j "$jobs" ${GUFO_TARGETS:-llama llama-common llama-server llama-bench} > "$build.ninja.log"
cmake -S "$here/native" -B "$build/overlay" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    "-DGUFO_LLAMA_SOURCE=$source_dir" "-DGUFO_LLAMA_BUILD=$build" >> "$build.configure.log"
ninja -C "$build/overlay" -j "$jobs" >> "$build.ninja.log"
cp "$build"/overlay/bin/libgufo.so "$build/bin/"
printf '{"kind": "cuda", "key": "by-hand"}\n' > "$build/bin/build.json"
