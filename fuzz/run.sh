#!/bin/sh
# Fuzzes one target on stable Rust: fuzz/run.sh TARGET [libFuzzer options], e.g. fuzz/run.sh gguf -max_total_time=60
# The flags are those that `cargo fuzz` passes with `--sanitizer none`; only its sanitizers need nightly.
set -eu
cd "$(dirname "$0")"
target=${1:?usage: fuzz/run.sh TARGET [libFuzzer options]}
shift
host=$(rustc -vV | sed -n 's/^host: //p')
(cd .. && cargo run --quiet --locked --example fuzz_seeds)
# FUZZ_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_OPT_LEVEL=1 builds in a fraction of the time what fuzzes more slowly.
# GPU code is not fuzzed, and takes minutes to compile.
export TANDEM_NO_CUDA=1
RUSTFLAGS="-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares --cfg fuzzing -Ccodegen-units=${FUZZ_CODEGEN_UNITS:-1}" \
    cargo build --quiet --release --target "$host" --bin "$target"
mkdir -p "corpus/$target" "artifacts/$target"
# Not exec: the target asks what its children took, and would be told of the compiler's.
"target/$host/release/$target" -rss_limit_mb=2048 -artifact_prefix="artifacts/$target/" "$@" "corpus/$target"
