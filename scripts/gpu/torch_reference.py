"""The vendor's kernels on the shapes that ours were measured on, measured the same way.

  python3 torch_reference.py kernels.json torch.json
  python3 torch_reference.py --sample torch.json          one shape of each kind instead of a table

Each call takes the next of enough copies of its large operand to find it cold; calls are recorded as a graph and
replayed. cuBLAS computes the plain product (no bias, no activation) with a 16-bit result, which is less work than ours.
Without CUDA the same lines run on the CPU at a sixteenth of their sizes: for a look at this program, not for numbers.
"""

import json
import os
import re
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as F
except ImportError as e:
    sys.exit(f"torch_reference.py: no torch on this machine ({e}); the vendor's column stays empty")

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
COLD_BYTES = 128 << 20 if CUDA else 1 << 16
# Rows and columns of the weights that benches/cuda/dense.rs names.
WEIGHTS = {
    "llama-3-8b qkv": (6144, 4096), "llama-3-8b o": (4096, 4096),
    "llama-3-8b gate_up": (28672, 4096), "llama-3-8b down": (4096, 14336),
    "smollm2-135m qkv": (960, 576), "smollm2-135m o": (576, 576),
    "smollm2-135m gate_up": (3072, 576), "smollm2-135m down": (576, 1536),
}
HEADS = {"llama-3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}
SAMPLE = [
    {"family": "decode-linear", "kernel": "linear_dense_bf16", "shape": "llama-3-8b o m=16"},
    {"family": "prefill-gemm", "kernel": "gemm_f16_128x256", "shape": "smollm2-135m down m=2048"},
    {"family": "decode-attention", "kernel": "decode_attention_bf16", "shape": "llama-3-8b batch=16 tokens=2048 rows=1 splits=4"},
    {"family": "prefill-attention", "kernel": "prefill_attention_f16", "shape": "smollm2-135m batch=1 tokens=1024 rows=1024"},
    {"family": "norm", "kernel": "rms_norm", "shape": "llama-3-8b rows=16"},
]


def size(n):
    """As it is on a device."""
    return n if CUDA else max(1, n // 16)


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def recorded(calls, launch):
    """Runs all calls; on a device as one graph."""
    def all_calls():
        for i in range(calls):
            launch(i)

    if not CUDA:
        return all_calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    return graph.replay


def seconds(calls, launch):
    calls = size(calls)
    for i in range(3):
        launch(i)
    synchronize()
    replay = recorded(calls, launch)
    replay()
    synchronize()

    def timed(batches):
        start = time.perf_counter()
        for _ in range(batches):
            replay()
        synchronize()
        return time.perf_counter() - start

    batches = max(1, min(10000, int(0.02 / max(timed(1), 1e-6)) + 1))
    return statistics.median(timed(batches) for _ in range(5)) / (batches * calls)


def copies(size):
    return max(1, min(64, -(-COLD_BYTES // size))) + 1


def linear(weight, m, dtype):
    n, k = map(size, WEIGHTS[weight])
    m = size(m)
    w = [torch.randn(n, k, device=DEVICE, dtype=dtype) for _ in range(copies(n * k * 2))]
    x = torch.randn(m, k, device=DEVICE, dtype=dtype)
    out = torch.empty(m, n, device=DEVICE, dtype=dtype)
    return seconds(64, lambda i: torch.mm(x, w[i % len(w)].t(), out=out))


def attention(model, batch, tokens, rows, dtype):
    heads, kv_heads, d = HEADS[model]
    causal = rows > 1
    batch, tokens, rows = size(batch), size(tokens), size(rows)
    q = torch.randn(batch, heads, rows, d, device=DEVICE, dtype=dtype)
    bytes_of_kv = batch * kv_heads * tokens * d * 4
    kv = [[torch.randn(batch, kv_heads, tokens, d, device=DEVICE, dtype=dtype) for _ in "kv"]
          for _ in range(copies(bytes_of_kv))]

    def launch(i):
        k, v = kv[i % len(kv)]
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return seconds(16 if causal else 64, launch)


def measure(line):
    dtype = torch.float16 if "f16" in line["kernel"].replace("bf16", "") else torch.bfloat16
    shape = line["shape"]
    numbers = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", shape)}
    name = re.split(r" \w+=", shape)[0]
    if line["family"] in ("decode-linear", "prefill-gemm"):
        return linear(name, numbers["m"], dtype)
    if line["family"] in ("decode-attention", "prefill-attention"):
        return attention(name, numbers["batch"], numbers["tokens"], numbers["rows"], dtype)
    return None


def lines_of(table):
    if table == "--sample":
        return SAMPLE
    if not os.path.exists(table):
        sys.exit(f"torch_reference.py: {table} is not there: our own kernels were not measured, there is nothing to compare")
    with open(table) as f:
        return json.load(f)["lines"]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    table, to = sys.argv[1:]
    out = {"torch": torch.__version__, "cuda": torch.version.cuda, "device": DEVICE, "lines": []}
    done = {}
    for line in lines_of(table):
        try:
            key = (line["family"], re.sub(r" splits=\d+", "", line["shape"]), "bf16" in line["kernel"])
            if key not in done:
                done[key] = measure(line)
                if CUDA:
                    torch.cuda.empty_cache()
            if done[key] is not None:
                out["lines"].append({"kernel": line["kernel"], "shape": line["shape"], "us": done[key] * 1e6})
        except Exception as e:
            out["lines"].append({"kernel": line["kernel"], "shape": line["shape"], "problem": str(e)[:200]})
        # Written as it grows: this program has a time limit.
        with open(to, "w") as f:
            json.dump(out, f)
    problems = [line for line in out["lines"] if "problem" in line]
    if table == "--sample" and problems:
        sys.exit(f"torch_reference.py: {problems[0]['kernel']} {problems[0]['shape']}: {problems[0]['problem']}")


if __name__ == "__main__":
    main()
