"""Proves and measures Tandem on this machine's GPU, in four calls of at most ten minutes (calls.py says what each runs).

  python3 run.py --call 1 [--out FOLDER] [--only PREFIX]...
  python3 run.py                                             all four, one after the other
  python3 run.py --rehearsal                                 on the stand-in for the driver: small sizes, the same parts

Whatever becomes of its parts, a call leaves three files in FOLDER: results.md, results.json (both of all calls so far there), and
logs.tar.xz, with the log of every part and the timelines. It exits with 1 if a part failed.
"""

import argparse
import json
import os
import shutil
import sys
import tarfile
import time

import calls
import report
from runner import HERE, Run
from sizes import GPU, REHEARSAL

# Of a file of results. Seconds at the end of a call, for the archive.
MOST_BYTES = 16 << 20
PACKING = 15


def load(path):
    try:
        with open(path) as f:
            return json.load(f)
    except (OSError, ValueError):
        return {}


def pack(logs, to):
    """One archive of all logs; of too many the largest stay out, by name."""
    files = sorted(os.listdir(logs), key=lambda name: os.path.getsize(os.path.join(logs, name)))
    left_out = []
    while True:
        with tarfile.open(to, "w:xz", preset=1) as archive:
            for name in files:
                archive.add(os.path.join(logs, name), arcname=f"logs/{name}")
        if os.path.getsize(to) <= MOST_BYTES or not files:
            return left_out
        left_out.append(files.pop())


def main():
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--call", type=int, choices=sorted(calls.CALLS), help="one of the four; without it all")
    options.add_argument("--minutes", type=float, help="for each call, instead of its own limit")
    options.add_argument("--out", default=HERE)
    options.add_argument("--only", action="append", default=[], metavar="PREFIX", help="parts whose names begin so")
    options.add_argument("--rehearsal", action="store_true", help="small sizes, for the stand-in")
    options = options.parse_args()
    out = os.path.abspath(options.out)
    os.makedirs(out, exist_ok=True)
    sizes = REHEARSAL if options.rehearsal else GPU
    path = os.path.join(out, "results.json")
    wanted = [options.call] if options.call else sorted(calls.CALLS)
    # A call continues what the calls before it left here; the first one, and a repeated one, begin anew.
    before = {} if 1 in wanted and not options.only else load(path)
    parts = {name: part for name, part in before.get("parts", {}).items() if options.only or part.get("call") not in wanted}
    if not options.only and 1 in wanted:
        shutil.rmtree(os.path.join(out, "logs"), ignore_errors=True)
    commit = os.path.join(HERE, "commit")
    results = {"commit": open(commit).read().split() if os.path.exists(commit) else ["unknown"], "rehearsal": options.rehearsal,
               "parts": parts}

    def save():
        with open(path, "w") as f:
            json.dump(results, f, indent=1)
        with open(os.path.join(out, "results.md"), "w") as f:
            f.write(report.markdown(results))

    ran = set()
    for call in wanted:
        limit = 60 * options.minutes if options.minutes else calls.LIMITS[call]
        begun = time.monotonic()
        print(f"call {call}, at most {limit:.0f} s", flush=True)
        run = Run(call, limit - PACKING, out, options.only, parts)
        try:
            calls.CALLS[call](run, sizes, save)
        except Exception as e:  # a mistake of this script must not cost what was measured
            run.found("run.py", {"outcome": "failed", "said": f"call {call}: {type(e).__name__}: {e}"})
        left_out = pack(run.logs, os.path.join(out, "logs.tar.xz"))
        if left_out:
            results["left_out"] = left_out
        took = time.monotonic() - begun
        parts.setdefault("calls", {"outcome": "ok", "seconds": {}})["seconds"][str(call)] = round(took, 1)
        save()
        ran.add(call)
    print(open(os.path.join(out, "results.md")).read())
    failed = [name for name, part in parts.items() if part["outcome"] not in ("ok", "skipped") and part.get("call") in ran]
    sys.exit(f"not ok: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
