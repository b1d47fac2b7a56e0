"""What programs print, as results."""

import collections
import json
import re
import subprocess


def said(text):
    """The sentence in which a program says why it failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marks = ("tandem: error: ", "bench cuda: ", "torch_reference.py: ", "device_map.py: ")
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


# GPUs that the program has machine code for; most seconds of the self-test on them.
MACHINE_CODE = ("7.5", "8.0", "8.6", "8.9", "9.0")
SELF_TEST = 20


def doctor(text):
    """What the doctor found: the devices, the verdict on each group of kernels, or why there is no device to prove anything on."""
    found = last_json(text)
    cuda = found["cuda"]
    problems = [cuda.get("problem"), cuda["kernels"].get("problem"), *(d.get("problem") for d in cuda["devices"])]
    problems += [] if cuda["devices"] else ["no GPU is visible"]
    groups = (found.get("self_test") or {}).get("groups")
    problems += [] if groups else ["no kernel was tested"]
    bad = [g["name"] for g in groups or [] if g["outcome"] in ("failed", "not_run")]
    problems += [f"the self-test failed: {', '.join(bad)}"] if bad else []
    # Of a GPU whose machine code is in the program: others' drivers compile for minutes. The stand-in keeps no time.
    seconds = (found.get("self_test") or {}).get("seconds", 0)
    ready = all(d.get("compute_capability") in MACHINE_CODE and not d["name"].startswith("Fake ") for d in cuda["devices"])
    problems += [f"the self-test took {seconds:.0f} s, not {SELF_TEST}"] if ready and seconds > SELF_TEST else []
    problem = next((p for p in problems if p), None)
    return {"report": found, **({"problem": problem} if problem else {})}


def last_json(text):
    """The JSON object that a program printed among other lines."""
    lines = [line for line in text.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def json_lines(text):
    """The answers of many requests, in the order of their prompts."""
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return {"answers": sorted(found, key=lambda answer: answer["index"])}


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
