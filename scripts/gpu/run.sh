#!/usr/bin/env bash
# Proves and measures the GPU's kernels on this machine: results.md, results.json, and a log of each part.
#
#   ./run.sh --call 1 [--out FOLDER] [--only PREFIX]...      then 2, 3 and 4; without --call all of them
#
# Needs a driver and python3; torch, transformers and accelerate, if they are there, give baselines. Parts come in the order of doubt
# (calls.py). Compiled kernels are kept in FOLDER/compute-cache, so that a later call starts where the first had to stop.
cd "$(dirname "$0")" || exit 1
command -v python3 >/dev/null || { echo "run.sh: needs python3" >&2; exit 1; }
[ -d bin ] || python3 -c 'import tarfile; tarfile.open("programs.tar.xz").extractall(".")' || exit 1
# Last, so that the machine's own library comes first.
export LD_LIBRARY_PATH="${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/lib/x86_64-linux-gnu:$PWD/lib"
exec python3 run.py "$@"
