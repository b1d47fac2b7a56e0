"""Runs every part with a limit of its own, and writes one table and one JSON whatever becomes of them.

A part that fails, hangs or crashes is one line of the result; the parts behind it run all the same. The order is that of
doubt: if a file does not load, or a wrapper is not what we think, nothing behind it means anything.

  load         every file of kernels compiled by the driver, on an empty cache: time, registers, local memory
  conformance  every wrapper of an instruction against the ISA
  peak         the matrix units alone: below 600 TFLOP/s on an H200, wgmma is serialised
  tests        the runtime, then the engine
  repeat       sums of split K a thousand times with the bits compared; 10^5 rounds of publish and collect
  numbers      tokens against the CPU's, the 8B model, every kernel, the vendor's kernels
  tests        everything else, then the kernels of older GPUs on this one
"""

import argparse
import collections
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import time

import margin
import report

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.join(HERE, "bin")

# Seconds. A limit counts from an empty cache: the driver then compiles a file when its first kernel is launched, the
# largest (quantised linear) for up to a minute on one core.
COMPILE = 120


class Run:
    def __init__(self, minutes, out, only):
        self.deadline = time.monotonic() + 60 * minutes
        self.out = out
        self.only = only
        self.parts = {}
        cache = os.path.join(out, "compute-cache")
        os.makedirs(cache, exist_ok=True)
        # An own cache, large enough for all targets: empty at first, and not the machine's to clear.
        self.env = {**os.environ, "TANDEM_TEST_DEVICE": "cuda", "RUST_BACKTRACE": "0", "CUDA_CACHE_PATH": cache,
                    "CUDA_CACHE_MAXSIZE": str(4 << 30)}

    def wanted(self, name):
        return not self.only or any(name.startswith(prefix) for prefix in self.only)

    def part(self, name, command, limit, env=None, read=None):
        """Runs one command; `read(output)` may turn what it printed into a result, or into a "problem"."""
        if not self.wanted(name):
            return {}
        limit = min(limit, self.deadline - time.monotonic())
        if limit < 5:
            self.parts[name] = {"outcome": "not run: the time was up"}
            return self.parts[name]
        begun = time.monotonic()
        log = os.path.join(self.out, name.replace(" ", "-").replace("/", "-").replace(":", "-") + ".log")
        with open(log, "w") as to:
            try:
                process = subprocess.Popen(command, stdout=to, stderr=subprocess.STDOUT, env={**self.env, **(env or {})},
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
                outcome = "did not start"
                to.write(f"{e}\n")
        with open(log, errors="replace") as f:
            text = f.read()
        part = {"outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "log": os.path.basename(log)}
        try:
            if read:
                part.update(read(text))
        except Exception as e:  # what cannot be read is said, and hides nothing else
            part["unreadable"] = f"{type(e).__name__}: {e}"
        if outcome == "ok" and "problem" in part:
            part["outcome"], part["said"] = "failed", part.pop("problem")
        elif outcome != "ok":
            part["said"] = said(text)
            part["tail"] = text.strip().splitlines()[-12:]
        self.parts[name] = part
        print(f"{name}: {part['outcome']} in {part['seconds']} s" + (f": {part['said']}" if "said" in part else ""), flush=True)
        return part


def said(text):
    """The sentence in which a program says why it failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = ("tandem: error: ", "bench cuda: ", "torch_reference.py: ")
    sentences = [line for line in lines if line.startswith(marks)]
    if not sentences:
        # Rust says where, and in the next line what. Tests may panic on purpose: what most of them say is the reason.
        sentences = [b for a, b in zip(lines, lines[1:]) if re.match(r"thread '.*panicked at ", a)]
    if sentences:
        return collections.Counter(sentences).most_common(1)[0][0]
    return lines[-1] if lines else "it said nothing"


def tests(text):
    """What the test programs of Rust print."""
    counts = re.findall(r"test result: \w+\. (\d+) passed; (\d+) failed", text)
    passed, failed = (sum(int(pair[i]) for pair in counts) for i in (0, 1))
    none = {} if passed + failed else {"problem": "no test ran: is the filter still right?"}
    return {
        "passed": passed, "failed": failed,
        "failures": sorted(set(re.findall(r"^test (\S+) \.\.\. FAILED", text, re.M))),
        "skipped": len(re.findall(r"^skipped: ", text, re.M)), **none,
    }


def devices(text):
    """What the doctor found, or why there is no device to prove anything on."""
    found = last_json(text)
    cuda = found["cuda"]
    problems = [cuda.get("problem"), cuda["kernels"].get("problem"), *(d.get("problem") for d in cuda["devices"])]
    problems += [] if cuda["devices"] else ["no GPU is visible"]
    problem = next((p for p in problems if p), None)
    return {"report": found, **({"problem": problem} if problem else {})}


def last_json(text):
    """The JSON object that a program printed among other lines."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def same_tokens(run, model, layers, prompt, tokens):
    """Greedy tokens of the GPU and of this machine's CPU, as far as their margins say that they must be equal."""
    if not run.wanted("numbers tokens"):
        return

    def generate(device):
        command = [f"{BIN}/tandem", "generate", "-m", model, "--raw", "--json", "--temp", "0", "-n", str(tokens),
                   "--ctx", "512", "--logprobs", "100", "--device", device, prompt]
        read = lambda text: {"answer": last_json(text)}
        return run.part(f"numbers tokens {model} {device}", command, 60 + COMPILE, read=read)

    cuda, cpu = generate("cuda"), generate("cpu")
    answers = [part.pop("answer", None) for part in (cuda, cpu)]
    if None not in answers:
        run.parts[f"tokens {model}"] = margin.compare(answers[1], answers[0], layers)


def modules(program):
    """The modules of a program of tests by name, each with its tests."""
    try:
        listed = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    found = {}
    for test in re.findall(r"^(\S+): test$", listed, re.M):
        words = test.split("::")
        found.setdefault(words[1] if words[0] == "kernels" else words[0], []).append(test)
    return found


def measure(run, save):
    bench, out = f"{BIN}/bench_cuda", run.out
    program = lambda name: os.path.join(BIN, name)
    as_json = lambda path: lambda _: {"bench": json.load(open(path))}

    def check(name, which, limit, filters=(), env=None):
        run.part(name, [program(which), "--show-output", *filters], limit, env, tests)

    run.part("doctor", [program("tandem"), "doctor", "--json"], 60, read=devices)
    loaded = os.path.join(out, "load.json")
    run.part("load", [bench, "--load", "--json", loaded], 3 * COMPILE, read=as_json(loaded))
    save()
    # A module at a time: a failure or a hang is one module's.
    gpu = modules(program("gpu"))
    module = lambda name, which, limit, env=None: check(name, "gpu", limit, ["--exact", *gpu.get(which, [which])], env)
    module("conformance", "conformance", COMPILE)
    save()
    peak = os.path.join(out, "peak.json")
    run.part("peak", [bench, "--peak", "--json", peak], COMPILE, read=lambda text: {
        "bench": json.load(open(peak)), "warnings": [l for l in text.splitlines() if "is serialised" in l]})
    save()
    check("tests runtime", "gpu_runtime", COMPILE)
    module("tests engine", "engine", 60 + COMPILE)
    save()
    for which, one in (("gemm", "results_repeat_bit_for_bit"), ("linear", "results_repeat_bit_for_bit"),
                       ("quant", "sums_of_splits_repeat_bit_for_bit"),
                       ("exchange", "rounds::every_round_of_publish_and_collect_carries_its_own_rows")):
        check(f"repeat {which}", "gpu", COMPILE, ["--exact", f"kernels::{which}::{one}"])
    save()

    same_tokens(run, "synth:smollm2-135m", 30, "The quick brown fox jumps over the lazy dog.", 48)
    decode = [program("tandem"), "bench", "-m", "synth:llama-3.1-8b", "--device", "cuda", "--json", "--prompt", "512,2048",
              "--gen", "64", "--batch", "1,16,64", "--repeat", "3"]
    run.part("numbers llama-3.1-8b", decode, 60 + COMPILE, read=lambda text: {"bench": last_json(text)})
    save()
    table = os.path.join(out, "kernels.json")
    run.part("numbers kernels", [bench, "--json", table], 90 + COMPILE, read=as_json(table))
    save()
    vendor = os.path.join(out, "torch.json")
    run.part("numbers torch", [sys.executable, "torch_reference.py", table, vendor], 75, read=as_json(vendor))
    save()

    # Modules beside each other: most of their time is the reference on the CPU.
    # (`faults` is about the emulated device, whatever the machine has.)
    rest = [m for m in sorted(gpu) if m not in ("conformance", "engine", "faults")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda m: module(f"tests {m}", m, COMPILE), rest))
    save()
    # The paths of older GPUs run on newer ones.
    for sm in ("75", "80"):
        env = {"TANDEM_TEST_SM": sm}
        run.part(f"load sm_{sm}", [bench, "--load"], 3 * COMPILE, env)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda m: module(f"tests {m} sm_{sm}", m, COMPILE, env), ["conformance", *rest]))
        save()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--minutes", type=float, default=9.5)
    options.add_argument("--out", default=HERE)
    options.add_argument("--only", action="append", default=[], metavar="PREFIX", help="parts whose names begin so")
    options = options.parse_args()
    out = os.path.abspath(options.out)
    os.makedirs(out, exist_ok=True)
    for stale in ("load.json", "peak.json", "kernels.json", "torch.json"):
        # What a part of an earlier run measured is not this run's.
        if not options.only and os.path.exists(os.path.join(out, stale)):
            os.remove(os.path.join(out, stale))
    run = Run(options.minutes, out, options.only)
    commit = os.path.join(HERE, "commit")
    results = {"commit": open(commit).read().split() if os.path.exists(commit) else ["unknown"], "parts": run.parts}

    def save():
        with open(os.path.join(out, "results.json"), "w") as f:
            json.dump(results, f, indent=1)
        with open(os.path.join(out, "results.md"), "w") as f:
            f.write(report.markdown(results))

    try:
        measure(run, save)
    except Exception as e:  # a mistake of this script must not cost what was measured
        run.parts["run.py"] = {"outcome": "failed", "said": f"{type(e).__name__}: {e}"}
    save()
    print(open(os.path.join(out, "results.md")).read())
    failed = [name for name, part in run.parts.items() if part["outcome"] != "ok"]
    sys.exit(f"not ok: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
