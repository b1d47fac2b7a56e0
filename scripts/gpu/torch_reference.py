"""The vendor's kernels on the shapes that ours were measured on, measured the same way.

  python3 torch_reference.py kernels.json torch.json

Each call takes the next of enough copies of its large operand to find it cold; calls are recorded as a graph and
replayed. cuBLAS computes the plain product (no bias, no activation) with a 16-bit result, which is less work than ours.
"""

import json
import re
import statistics
import sys
import time

import torch
import torch.nn.functional as F

COLD_BYTES = 128 << 20
# Rows and columns of the weights that benches/cuda/dense.rs names.
WEIGHTS = {
    "llama-3-8b qkv": (6144, 4096), "llama-3-8b o": (4096, 4096),
    "llama-3-8b gate_up": (28672, 4096), "llama-3-8b down": (4096, 14336),
    "smollm2-135m qkv": (960, 576), "smollm2-135m o": (576, 576),
    "smollm2-135m gate_up": (3072, 576), "smollm2-135m down": (576, 1536),
}
HEADS = {"llama-3-8b": (32, 8, 128), "smollm2-135m": (9, 3, 64)}


def seconds(calls, launch):
    for i in range(3):
        launch(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            launch(i)
    graph.replay()
    torch.cuda.synchronize()

    def timed(batches):
        start = time.perf_counter()
        for _ in range(batches):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    batches = max(1, min(10000, int(0.02 / max(timed(1), 1e-6)) + 1))
    return statistics.median(timed(batches) for _ in range(5)) / (batches * calls)


def copies(size):
    return max(1, min(64, -(-COLD_BYTES // size))) + 1


def linear(weight, m, dtype):
    n, k = WEIGHTS[weight]
    w = [torch.randn(n, k, device="cuda", dtype=dtype) for _ in range(copies(n * k * 2))]
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return seconds(64, lambda i: torch.mm(x, w[i % len(w)].t(), out=out))


def attention(model, batch, tokens, rows, dtype):
    heads, kv_heads, d = HEADS[model]
    q = torch.randn(batch, heads, rows, d, device="cuda", dtype=dtype)
    size = batch * kv_heads * tokens * d * 4
    kv = [[torch.randn(batch, kv_heads, tokens, d, device="cuda", dtype=dtype) for _ in "kv"] for _ in range(copies(size))]
    causal = rows > 1

    def launch(i):
        k, v = kv[i % len(kv)]
        F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return seconds(16 if rows > 1 else 64, launch)


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


def main():
    ours = json.load(open(sys.argv[1]))["lines"]
    out = {"torch": torch.__version__, "cuda": torch.version.cuda, "lines": []}
    done = {}
    for line in ours:
        try:
            key = (line["family"], re.sub(r" splits=\d+", "", line["shape"]), "bf16" in line["kernel"])
            if key not in done:
                done[key] = measure(line)
                torch.cuda.empty_cache()
            if done[key] is not None:
                out["lines"].append({"kernel": line["kernel"], "shape": line["shape"], "us": done[key] * 1e6})
        except Exception as e:
            out["lines"].append({"kernel": line["kernel"], "shape": line["shape"], "problem": str(e)[:200]})
        # Written as it grows: this program has a time limit.
        json.dump(out, open(sys.argv[2], "w"))


if __name__ == "__main__":
    main()
