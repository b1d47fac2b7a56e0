"""Runs commands one by one, each with a limit and a log of its own; a part that fails, hangs or crashes is one line of the results."""

import os
import shlex
import subprocess
import time

import reading

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.path.join(HERE, "bin")
# Of a command line, on the machines that the bundle is for.
MOST_CHARACTERS = 2000


def program(name):
    return os.path.join(BIN, name)


class Run:
    """The parts of one call, which has until `deadline`."""

    def __init__(self, call, seconds, out, only, parts):
        self.call = call
        self.deadline = time.monotonic() + seconds
        self.out = out
        self.only = only
        self.parts = parts
        self.logs = os.path.join(out, "logs")
        home, cache = os.path.join(out, "home"), os.path.join(out, "compute-cache")
        for folder in (self.logs, home, cache):
            os.makedirs(folder, exist_ok=True)
        # Caches of its own: empty at first, and not the machine's to clear. A machine that comes after another one has none.
        self.env = {**os.environ, "TANDEM_TEST_DEVICE": "cuda", "RUST_BACKTRACE": "0", "TANDEM_HOME": home,
                    "CUDA_CACHE_PATH": cache, "CUDA_CACHE_MAXSIZE": str(4 << 30)}

    def wanted(self, name):
        return not self.only or any(name.startswith(prefix) for prefix in self.only)

    def left(self):
        return self.deadline - time.monotonic()

    def file(self, name):
        """Where a part may write what goes into the archive of logs."""
        return os.path.join(self.logs, name)

    def part(self, name, command, limit, env=None, read=None):
        """Runs one command; `read(output)` may turn what it printed into a result, or into a "problem"."""
        if not self.wanted(name):
            return {}
        limit = min(limit, self.left())
        part = self.parts[name] = {"call": self.call, "outcome": "not run: the time was up"}
        line = shlex.join(command)
        if len(line) > MOST_CHARACTERS:
            part["outcome"], part["said"] = "failed", f"a command line of {len(line)} characters, at most {MOST_CHARACTERS}"
            return part
        if limit < 5:
            print(f"{name}: {part['outcome']}", flush=True)
            return part
        begun = time.monotonic()
        log = self.file(f"{self.call}-" + "".join(c if c.isalnum() or c in "._" else "-" for c in name) + ".log")
        with open(log, "w") as to:
            to.write(f"$ {line}\n")
            to.flush()
            outcome = self.execute(command, env, to, limit)
        with open(log, errors="replace") as f:
            text = f.read().split("\n", 1)[1]
        part.update({"outcome": outcome, "seconds": round(time.monotonic() - begun, 1), "log": os.path.basename(log)})
        try:
            if read:
                part.update(read(text))
        except Exception as e:  # what cannot be read is said; of a program that ended well it is a failure
            part["unreadable"] = f"{type(e).__name__}: {e}"
            if outcome == "ok":
                part["problem"] = f"it ended well and its output cannot be read: {part['unreadable']}"
        if outcome == "ok" and "problem" in part:
            part["outcome"], part["said"] = "failed", part.pop("problem")
        elif outcome != "ok":
            part["said"] = reading.said(text)
            part["tail"] = text.strip().splitlines()[-12:]
        if part["outcome"] != "ok":
            part["command"] = command
        print(f"{name}: {part['outcome']} in {part['seconds']} s" + (f": {part['said']}" if "said" in part else ""), flush=True)
        return part

    def execute(self, command, env, to, limit):
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=to, stderr=subprocess.STDOUT,
                                       env={**self.env, **(env or {})}, cwd=HERE, start_new_session=True)
        except OSError as e:
            to.write(f"{e}\n")
            return "did not start"
        try:
            code = process.wait(timeout=limit)
            return "ok" if code == 0 else f"failed ({code})"
        except subprocess.TimeoutExpired:
            # The group that this part started, nothing else.
            os.killpg(process.pid, 9)
            process.wait()
            return f"stopped after {limit:.0f} s"

    def skip(self, name, why):
        """A part that this machine lacks something for: said loudly, and no failure."""
        if self.wanted(name):
            self.parts[name] = {"call": self.call, "outcome": "skipped", "said": why}
            print(f"{name}: SKIPPED: {why}", flush=True)

    def found(self, name, part):
        """A result that was computed from others."""
        self.parts[name] = {"call": self.call, **part}
        print(f"{name}: {part['outcome']}" + (f": {part['said']}" if "said" in part else ""), flush=True)
