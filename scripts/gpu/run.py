"""Runs every part with a limit of its own, and writes one table and one JSON whatever becomes of them.

A part that fails, hangs or crashes is one line of the result; the parts behind it run all the same.
"""

import argparse
import concurrent.futures
import glob
import json
import os
import re
import shutil
import subprocess
import sys
import time

import report

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.join(HERE, "bin")
GPU_ONLY = {"TANDEM_TEST_DEVICE": "cuda", "RUST_BACKTRACE": "1"}


class Run:
    def __init__(self, minutes, out):
        self.deadline = time.monotonic() + 60 * minutes
        self.out = out
        self.parts = {}

    def part(self, name, command, limit, env=None, read=None):
        """Runs one command; `read(output)` may turn what it printed into a result."""
        limit = min(limit, self.deadline - time.monotonic())
        if limit < 5:
            self.parts[name] = {"outcome": "not run: the time was up"}
            return self.parts[name]
        begun = time.monotonic()
        log = os.path.join(self.out, name.replace(" ", "-").replace("/", "-") + ".log")
        with open(log, "w") as to:
            try:
                process = subprocess.Popen(
                    command, stdout=to, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})},
                    cwd=HERE, start_new_session=True)
                try:
                    code = process.wait(timeout=limit)
                    outcome = "ok" if code == 0 else f"failed ({code})"
                except subprocess.TimeoutExpired:
                    # The group that this part started, nothing else.
                    os.killpg(process.pid, 9)
                    process.wait()
                    outcome = f"stopped after {limit:.0f} s"
            except OSError as e:
                outcome = f"did not start: {e}"
        with open(log, errors="replace") as f:
            text = f.read()
        part = {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "log": os.path.basename(log)}
        try:
            if read:
                part.update(read(text))
        except Exception as e:  # what cannot be read is said, and hides nothing else
            part["unreadable"] = f"{type(e).__name__}: {e}"
        if outcome != "ok":
            part["tail"] = text.strip().splitlines()[-12:]
        self.parts[name] = part
        print(f"{name}: {outcome} in {part['seconds']} s", flush=True)
        return part


def tests(text):
    """What the test programs of Rust print."""
    counts = re.findall(r"test result: \w+\. (\d+) passed; (\d+) failed", text)
    return {
        "passed": sum(int(p) for p, _ in counts), "failed": sum(int(f) for _, f in counts),
        "failures": sorted(set(re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M))),
        "skipped": len(re.findall(r"^skipped: ", text, re.M)),
    }


def last_json(text):
    """The JSON object that a program printed among other lines."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def sanitizer():
    found = shutil.which("compute-sanitizer")
    places = ["/usr/local/cuda*/bin/compute-sanitizer", "/opt/cuda/bin/compute-sanitizer"]
    places += [os.path.join(p, "nvidia/*/bin/compute-sanitizer") for p in sys.path if p]
    return found or next((hit for place in places for hit in sorted(glob.glob(place))), None)


def same_tokens(run, model, prompt, tokens):
    """Greedy tokens of the GPU and of this machine's CPU."""
    def generate(device):
        command = [f"{BIN}/tandem", "generate", "-m", model, "--raw", "--json", "--temp", "0", "-n", str(tokens),
                   "--ctx", "512", "--device", device, prompt]
        read = lambda text: {"answer": last_json(text)}
        return run.part(f"tokens {model} {device.split(':')[0]}", command, 90, read=read)

    cuda, cpu = generate("cuda"), generate("cpu")
    answers = [part.pop("answer", None) for part in (cuda, cpu)]
    if None in answers:
        return
    ids = [report.token_ids(answer) for answer in answers]
    equal = next((i for i, (a, b) in enumerate(zip(*ids)) if a != b), min(map(len, ids)))
    run.parts[f"tokens {model}"] = {
        "outcome": "ok" if ids[0] == ids[1] and ids[0] else "failed", "equal": equal, "of": max(map(len, ids))}


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=9.5)
    options.add_argument("--out", default=HERE)
    options = options.parse_args()
    os.makedirs(options.out, exist_ok=True)
    for stale in ("kernels.json", "torch.json"):
        if os.path.exists(os.path.join(options.out, stale)):
            os.remove(os.path.join(options.out, stale))
    run = Run(options.minutes, os.path.abspath(options.out))
    results = {"commit": open(os.path.join(HERE, "commit")).read().split(), "parts": run.parts}

    def save():
        with open(os.path.join(run.out, "results.json"), "w") as f:
            json.dump(results, f, indent=1)
        with open(os.path.join(run.out, "results.md"), "w") as f:
            f.write(report.markdown(results))

    # The order of doubt: if the wrappers are not what we think, nothing behind them means anything.
    run.part("doctor", [f"{BIN}/tandem", "doctor", "--json"], 60, read=lambda text: {"report": last_json(text)})
    run.part("conformance", [f"{BIN}/gpu_conformance", "--show-output"], 90, GPU_ONLY, tests)
    save()
    same_tokens(run, "synth:smollm2-135m", "The quick brown fox jumps over the lazy dog.", 48)
    save()

    decode = [f"{BIN}/tandem", "bench", "-m", "synth:llama-3.1-8b", "--device", "cuda", "--json", "--prompt", "512,2048",
              "--gen", "64", "--batch", "1,16,64", "--repeat", "3"]
    run.part("llama-3.1-8b", decode, 150, read=lambda text: {"bench": last_json(text)})
    save()

    table = os.path.join(run.out, "kernels.json")
    read = lambda _: {"bench": json.load(open(table))}
    run.part("kernels", [f"{BIN}/bench_cuda", "--json", table], 150, read=read)
    save()
    reference = os.path.join(run.out, "torch.json")
    run.part("torch", [sys.executable, "torch_reference.py", table, reference], 75,
             read=lambda _: {"bench": json.load(open(reference))})
    save()

    # Programs beside each other: most of their time is the reference on the CPU.
    programs = sorted(os.path.basename(p) for p in glob.glob(f"{BIN}/gpu_*"))
    programs = [p for p in programs if p != "gpu_conformance"]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: run.part(f"tests {p}", [f"{BIN}/{p}", "--show-output"], 100, GPU_ONLY, tests), programs))
    save()
    # The paths of older GPUs run on newer ones.
    old = [(sm, p) for sm in ("75", "80") for p in programs if p not in ("gpu_conformance", "gpu_engine")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda c: run.part(f"tests {c[1]} sm_{c[0]}", [f"{BIN}/{c[1]}"], 60,
                                         {**GPU_ONLY, "TANDEM_TEST_SM": c[0]}, tests), old))
    save()

    tool = sanitizer()
    if tool is None:
        run.parts["sanitizer"] = {"outcome": "not run: compute-sanitizer is not on this machine"}
    else:
        watched = [("memcheck", "gpu_conformance"), ("racecheck", "gpu_conformance"), ("memcheck", "gpu_linear"),
                   ("racecheck", "gpu_attention"), ("initcheck", "gpu_linear"), ("memcheck", "gpu_quant")]
        for kind, program in watched:
            if os.path.exists(f"{BIN}/{program}"):
                command = [tool, "--tool", kind, "--error-exitcode", "9", f"{BIN}/{program}"]
                env = {**GPU_ONLY, "PROPTEST_CASES": "4"}
                run.part(f"sanitizer {kind} {program}", command, 60, env, tests)
    save()
    print(open(os.path.join(run.out, "results.md")).read())


if __name__ == "__main__":
    main()
