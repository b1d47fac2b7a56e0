#!/usr/bin/env bash
# Proves and measures the GPU's kernels on this machine: results.md, results.json, and a log of each part.
#
#   ./run.sh [--minutes 10] [--out FOLDER]
cd "$(dirname "$0")" || exit 1
command -v python3 >/dev/null || { echo "run.sh: needs python3" >&2; exit 1; }
[ -d bin ] || python3 -c 'import tarfile; tarfile.open("programs.tar.xz").extractall(".")' || exit 1
# Last, so that the machine's own library comes first.
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/lib/x86_64-linux-gnu:$PWD/lib"
exec python3 run.py "$@"
