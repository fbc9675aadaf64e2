#!/bin/sh
# The whole HIP build, linked against the real ROCm libraries, on a machine that has neither ROCm nor an AMD GPU:
# a chroot of Debian packages in FOLDER, in which `native/build.py native --kind hip` runs on a copy of this checkout.
#
#   sudo native/hip_chroot.sh FOLDER [MIRROR]
#
# Needs root, mmdebstrap, about 6 GB of disk; 80 processor minutes.  Run again it goes on where it stopped.
# GPU_TARGETS (gfx1151), SUITE (forky); taskset -c 0 for one processor.  To remove it: umount FOLDER/root/proc, rm -r FOLDER.
set -eu
folder=${1:?usage: native/hip_chroot.sh FOLDER [MIRROR]}
checkout=$(cd "$(dirname "$0")/.." && pwd)
suite=${SUITE:-forky}
targets=${GPU_TARGETS:-gfx1151}
packages=python3,python3-venv,g++,cmake,ninja-build,hipcc,libamdhip64-dev,libhipblas-dev,librocblas-dev
root=$folder/root

mirror=${2:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: $(. /etc/os-release && echo "$VERSION_CODENAME")" | head -n 1)}
if [ ! -e "$folder/bootstrapped" ]; then
    rm -rf "$root"
    mkdir -p "$folder"
    # The system's own settings for fetching: proxies, time-outs, how old an index may be.
    apt-config dump Acquire > "$folder/acquire.conf"
    mmdebstrap --variant=apt --aptopt="$folder/acquire.conf" --include="$packages" "$suite" "$root" "$mirror"
    touch "$folder/bootstrapped"
fi

# The pinned archive may lie in the cache folder already; without it the chroot would need a package index.
cache=${GUFO_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/gufo-gguf}
mkdir -p "$root/build/cache/downloads"
cp -u "$cache"/downloads/*.tar.gz "$root/build/cache/downloads/" || {
    echo "no archive in $cache/downloads: run make check-hip or make native first" >&2
    exit 1
}
# Anew each time: a file deleted from the checkout would stay and be compiled.  Objects depend on contents, not on times.
rm -rf "$root/build/checkout"
mkdir -p "$root/build/checkout"
for part in native gufo_gguf pyproject.toml; do
    cp -r "$checkout/$part" "$root/build/checkout/"
done

mountpoint -q "$root/proc" || mount -t proc proc "$root/proc"
chroot "$root" env GUFO_CACHE_DIR=/build/cache HOME=/root \
    python3 /build/checkout/native/build.py native --kind hip --gpu-targets "$targets"

for library in "$root"/build/cache/native/lib-hip-*/; do
    inside=/${library#"$root"/}
    echo "$inside"
    # The files themselves, without the links that carry shorter names.
    find "$library" -name '*.so*' -type f -printf '%10s %f\n' | sort -k 2
    python3 "$checkout/native/check_hip.py" --library "$(ls "$library"libggml-hip.so* | head -n 1)"
    chroot "$root" nm -D --defined-only "${inside}libgufo.so" | grep -c ' T gufo_' | sed 's/$/ gufo_ symbols exported/'
    chroot "$root" sh -c "for file in $inside*.so; do ldd -r \$file; done 2>&1" | grep -E 'undefined|not found' || echo 'no symbol and no library missing'
    chroot "$root" python3 /build/checkout/native/check_hip.py --load "$inside"
done
chroot "$root" dpkg-query -W -f '${Package} ${Version}\n' hipcc libamdhip64-dev libhipblas-dev librocblas-dev 'clang-[0-9]*'
