"""What each call runs, in the order of doubt: what stands behind a part that fails means little.

  1  doctor --gpu, every file of kernels loaded, conformance, the peak of the matrix units, runtime, engine; then models on both
     sides under caps, their tokens against the CPU's; one run that fills the device
  2  profile, a large model, a mixture of experts, every kernel beside the vendor's, sums repeated with their bits compared, 10^5 rounds of rows
  3  predicted times beside executed ones under caps, timelines, requests by every schedule, Accelerate's device_map
  4  what failed before, every other test, the kernels of older GPUs
"""

import concurrent.futures
import json
import os
import sys

import hybrids
import reading
from runner import HERE, program

# Seconds. A machine is lent for ten minutes a command.
LIMITS = {1: 480, 2: 570, 3: 570, 4: 570}
# Modules of tests/gpu that are about the emulated device or the stand-in, whatever the machine has.
EMULATED = ("any_memory", "faults", "stand_in")


def as_json(path):
    def read(_):
        with open(path) as f:
            return {"bench": json.load(f)}
    return read


class Tests:
    """The test programs, a module at a time: a failure or a hang is one module's."""

    def __init__(self, run, sizes):
        self.run, self.sizes = run, sizes
        self.gpu = reading.modules(program("gpu"))

    def names(self):
        if self.sizes.tests:
            return [name for name in self.sizes.tests if name not in EMULATED]
        return [name for name in sorted(self.gpu) if name not in EMULATED]

    def module(self, name, which, limit, env=None):
        words = self.sizes.tests.get(which)
        tests = [t for t in self.gpu.get(which, [which]) if not words or any(word in t for word in words)]
        self.check(name, "gpu", limit, ["--exact", *tests], env)

    def check(self, name, which, limit, filters=(), env=None):
        self.run.part(name, [program(which), "--show-output", "--test-threads=2", "--skip", "stand_in::", *filters], limit, env,
                      reading.tests)


def skipped(run, sizes, name):
    if name in sizes.skip:
        run.skip(name, sizes.skip[name])
        return True
    return False


def doctor(run, sizes):
    return run.part("doctor", [program("tandem"), "doctor", "--gpu", "--json"], 60 + sizes.compile, read=reading.doctor)


def call_1(run, sizes, save):
    bench, tests = program("bench_cuda"), Tests(run, sizes)
    report = doctor(run, sizes).get("report", {})
    save()
    loaded = run.file("load.json")
    run.part("load", [bench, "--load", "--json", loaded], 2 * sizes.compile, read=as_json(loaded))
    save()
    tests.module("conformance", "conformance", sizes.compile)
    save()
    if not skipped(run, sizes, "peak"):
        peak = run.file("peak.json")
        run.part("peak", [bench, "--peak", "--json", peak], sizes.compile, read=lambda text: {
            **as_json(peak)(text), "warnings": [line for line in text.splitlines() if "is serialised" in line]})
        save()
    tests.check("tests runtime", "gpu_runtime", sizes.compile, sizes.runtime)
    tests.module("tests engine", "engine", 60 + sizes.compile)
    save()
    hybrids.tokens(run, sizes, sizes.small, sizes.small_blocks, save)
    hybrids.requests(run, sizes, sizes.small, sizes.small_blocks, save)
    hybrids.mixture(run, sizes, save)
    hybrids.brim(run, sizes, sizes.small, report)
    save()


def profile(run, sizes):
    """Measures what strategies decide by, unless a call before this one did on the same machine."""
    def read(text):
        limits = reading.last_json(text)["limits"]
        kept = {k: limits[k] for k in ("host_attention", "hand_over", "device", "link") if k in limits}
        return {"limits": kept}

    run.part("profile", [program("tandem"), "profile", "--quick", "--json"], 90 + sizes.compile, read=read)


def call_2(run, sizes, save):
    bench, tests = program("bench_cuda"), Tests(run, sizes)
    profile(run, sizes)
    save()
    decode = [program("tandem"), "bench", "-m", sizes.large, "--device", "cuda", "--strategy", "gpu-only", "--json", "--prompt", sizes.prompts, "--gen",
              str(sizes.generated), "--batch", sizes.batches, "--repeat", str(sizes.repeats)]
    run.part("numbers llama-3.1-8b", decode, 90 + sizes.compile, read=lambda text: {"bench": reading.last_json(text)})
    save()
    # The same kernel by kernel: what recording a step gains.
    run.part("numbers llama-3.1-8b without graphs", decode, 90 + sizes.compile, {"TANDEM_GRAPHS": "off"},
             read=lambda text: {"bench": reading.last_json(text)})
    save()
    # A mixture of experts, whole on the device and with its experts on the CPU.
    for name, strategy in (("whole", "gpu-only"), ("cpu-moe", "cpu-moe")):
        command = [program("tandem"), "bench", "-m", sizes.large_mixture, "--device", "cuda", "--strategy", strategy, "--json", "--prompt",
                   sizes.prompts, "--gen", str(sizes.generated), "--batch", "1", "--repeat", str(sizes.repeats)]
        run.part(f"numbers experts {name}", command, 90 + sizes.compile, read=lambda text: {"bench": reading.last_json(text)})
        save()
    table = run.file("kernels.json")
    if not skipped(run, sizes, "numbers kernels"):
        run.part("numbers kernels", [bench, "--json", table, *sizes.bench], 120 + sizes.compile, read=as_json(table))
        save()
    if not skipped(run, sizes, "numbers torch"):
        vendor = run.file("torch.json")
        torch(run, "numbers torch", ["torch_reference.py", table, vendor], 75, as_json(vendor))
        save()
    for which, one in sizes.rounds:
        tests.check(f"repeat {which}", "gpu", sizes.compile, ["--exact", f"kernels::{which}::{one}"])
    save()


def has(module):
    import importlib.util
    return importlib.util.find_spec(module) is not None


def torch(run, name, command, limit, read, needs=("torch",)):
    missing = [module for module in needs if not has(module)]
    if missing:
        run.skip(name, f"this machine's python3 has no {', '.join(missing)}")
    else:
        run.part(name, [sys.executable, *command], limit, read=read)


def call_3(run, sizes, save):
    profile(run, sizes)
    save()
    caps = hybrids.times(run, sizes, sizes.few, save)
    schedules = ["gpu-only", "neo", "apex", "fastdecode", "auto"]
    trace = [program("tandem"), "bench", "-m", sizes.few, "--device", "cuda", "--trace", sizes.trace, "--strategy",
             ",".join(schedules), "--json", "--timeline", run.file("timeline-trace.json")]

    def served(text):
        found = reading.last_json(text)
        missing = sorted(set(schedules) - {s["strategy"] for s in found["strategies"]})
        failed = [s["strategy"] for s in found["strategies"] if s["failed"]]
        problem = {"problem": f"no figures of {missing}; requests failed by {failed}"} if missing or failed else {}
        keys = ("strategy", "throughput_tok_s", "makespan_s", "gpu_busy", "cpu_busy", "link_busy", "ttft_s", "tpot_s")
        return {"strategies": [{k: s.get(k) for k in keys} for s in found["strategies"]], **problem}

    run.part("trace", trace, 150 + sizes.compile, read=served)
    save()
    # The same caps by what others use: weights that do not fit are fetched layer by layer.
    for share in sizes.caps[1:] if caps else ():
        out = run.file(f"device-map-{share}.json")
        command = ["device_map.py", sizes.few, str(caps[share]), str(sizes.tokens), out]
        torch(run, f"baseline device_map {share}%", command, 120, as_json(out), ("torch", "transformers", "accelerate"))
        save()


def call_4(run, sizes, save):
    again(run, sizes)
    save()
    bench, tests = program("bench_cuda"), Tests(run, sizes)
    # Modules beside each other: most of their time is the reference on the CPU.
    rest = [name for name in tests.names() if name not in ("conformance", "engine")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda m: tests.module(f"tests {m}", m, sizes.compile), rest))
    save()
    # The paths of older GPUs run on newer ones.
    for sm in ("80", "75"):
        env = {"TANDEM_TEST_SM": sm}
        run.part(f"load sm_{sm}", [bench, "--load"], 2 * sizes.compile, env)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda m: tests.module(f"tests {m} sm_{sm}", m, sizes.compile, env), ["conformance", *rest]))
        save()


def again(run, sizes):
    """Parts of other calls that failed, once more, with everything said: their results stay as they were."""
    for name, part in list(run.parts.items()):
        if part.get("call") not in (None, 4) and part.get("command") and part["outcome"] != "ok":
            run.part(f"again {name}", part["command"], 60 + sizes.compile, {"RUST_BACKTRACE": "1"})


CALLS = {1: call_1, 2: call_2, 3: call_3, 4: call_4}
