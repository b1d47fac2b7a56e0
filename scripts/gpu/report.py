"""One Markdown table of everything, the most telling numbers first."""


def percent(value):
    return "" if value is None else f"{100 * value:.0f}%"


def verdict(value, goal):
    return "" if value is None else ("reached" if value >= goal else "missed")


def markdown(results):
    parts = results["parts"]
    rows = self_test(parts) + loading(parts) + headlines(parts) + hybrids(parts) + correctness(parts) + kernels(parts)
    rehearsal = "A REHEARSAL on the stand-in for the driver: no number here is a GPU's. " if results.get("rehearsal") else ""
    out = [f"{rehearsal}Commit {' '.join(results['commit'])}. {device(parts)}", ""]
    if results.get("left_out"):
        out += [f"Logs that were too large for the archive: {', '.join(results['left_out'])}.", ""]
    out += ["| what | case | result | of limit | torch | verdict |", "|---|---|---|---:|---:|---|"]
    out += ["| " + " | ".join(str(cell).replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows]
    return "\n".join(out) + "\n"


def device(parts):
    bench = parts.get("numbers kernels", {}).get("bench")
    if not bench:
        found = parts.get("doctor", {}).get("report", {}).get("cuda", {})
        names = [d["name"] for d in found.get("devices", [])]
        return f"{', '.join(names) or found.get('problem', 'no device')}."
    peaks = ", ".join(f"{name} {value:.0f} TFLOP/s" for name, value in bench["matrix_tflop_s"].items())
    return f"{bench['device']}, sm_{bench['sm']}, driver {bench['driver']}; copy {bench['copy_gb_s']:.0f} GB/s; {peaks}."


def torch_times(parts):
    bench = parts.get("numbers torch", {}).get("bench", {})
    lines = bench.get("lines", []) if bench.get("device") == "cuda" else []    # small sizes on a CPU compare with nothing
    return {(line["kernel"], line["shape"]): line["us"] for line in lines if "us" in line}


def lines_of(parts):
    """Lines of the kernel bench, each with the vendor's time as a multiple of ours."""
    reference = torch_times(parts)
    for line in parts.get("numbers kernels", {}).get("bench", {}).get("lines", []):
        other = reference.get((line["kernel"], line["shape"]))
        yield {**line, "speedup": other / line["us"] if other else None}


# What the issue asks of a data-centre GPU: name, which lines, which number, the least it may be.
# Rows to the host, the host's answer, the answer on the device.
ROUND_TRIP_US = 20

GOALS = [
    ("decode linear bf16, M = 1, copy bandwidth", "of_copy", 0.80,
     lambda l: l["family"] == "decode-linear" and "bf16" in l["kernel"] and "llama" in l["shape"] and l["shape"].endswith("m=1")),
    ("decode linear bf16, M <= 64, against cuBLAS", "speedup", 1.0,
     lambda l: l["family"] == "decode-linear" and "bf16" in l["kernel"] and "llama" in l["shape"]),
    ("4-bit linear, M <= 32, copy bandwidth", "of_copy", 0.70,
     lambda l: "q4" in l["kernel"] and "llama" in l["shape"] and any(l["shape"].endswith(f"m={m}") for m in (1, 2, 4, 8, 16, 32))),
    ("paged decode, >= 2k tokens, B >= 16, copy bandwidth", "of_copy", 0.80,
     lambda l: l["family"] == "decode-attention" and "llama" in l["shape"] and "tokens=2048" in l["shape"]),
    ("prefill GEMM, matrix peak", "of_peak", 0.60,
     lambda l: l["family"] == "prefill-gemm" and "bf16" in l["kernel"] and "llama" in l["shape"] and "m=2048" in l["shape"]),
    ("prefill attention, matrix peak", "of_peak", 0.50,
     lambda l: l["family"] == "prefill-attention" and "llama" in l["shape"] and "tokens=8192" in l["shape"]),
]


def self_test(parts):
    """What `doctor --gpu` says of each group of kernels."""
    rows = []
    found = parts.get("doctor", {}).get("report", {}).get("self_test") or {}
    for group in found.get("groups", []):
        shown = f"{group['checks']} checks of {group['kernels']} kernels, errors up to {100 * group['worst']:.0f}% of those allowed"
        failed = "; ".join(f"{kernel}: {why}" for kernel, why in list(group["failed"].items())[:3])
        rows.append(("self-test", group["name"], failed or group["why"] or shown, "", "", group["outcome"]))
    return rows


def seconds(value):
    return "?" if value is None else f"{1e3 * value:.2f} ms"


def hybrids(parts):
    """Caps and strategies: predicted times beside executed ones, requests by schedule, the baselines under the same caps."""
    rows = []
    for name, part in parts.items():
        if "executed" in part:
            predicted = (part["plan"].get("predicted") or {})
            executed = part["executed"]
            times = (f"prefill {seconds(executed['prefill_s'])} (predicted {seconds(predicted.get('t_prefill_s'))}), "
                     f"a step {seconds(executed['decode_step_s'])} (predicted {seconds(predicted.get('t_decode_step_s'))})")
            rows.append((name, part["plan"]["strategy"], times, "", "", f"{part['ratio']} x" if "ratio" in part else "no prediction"))
        elif name == "brim" and "share" in part:
            rows.append((name, "", f"{part['bytes']} of {part['of']} bytes planned", percent(part["share"]), "", part["outcome"]))
        elif name.startswith("baseline ") and "bench" in part:
            bench = part["bench"]
            rows.append((name, bench["model"], f"{bench['tok_s']:.1f} tok/s, prefill {seconds(bench['prefill_s'])}", "", "", part["outcome"]))
        for served in part.get("strategies", []):
            rows.append((name, served["strategy"], f"{served['throughput_tok_s']:.0f} tok/s", "", "", part["outcome"]))
    return rows


def loading(parts):
    """What the driver made of the kernels, and the peak of the matrix units, which every other number rests on."""
    rows = []
    load = parts.get("load", {})
    for file in load.get("bench", {}).get("files", []):
        most = max(file["kernels"], key=lambda k: k["registers"])
        local = [f"{k['kernel']} {k['local']} B" for k in file["kernels"] if k["local"]]
        shown = f"{file['ms']:.0f} ms, up to {most['registers']} registers"
        rows.append(("load", file["file"], shown, "", "", "local memory: " + ", ".join(local[:6]) if local else ""))
    if "bench" in load:
        rows.append(("load", "all files", f"{load['bench']['ms'] / 1000:.1f} s", "", "", load["outcome"]))
    peak = parts.get("peak", {})
    for name, rate in peak.get("bench", {}).get("matrix_tflop_s", {}).items():
        warning = [w for w in peak.get("warnings", []) if w.startswith(name)]
        rows.append(("peak", name, f"{rate:.0f} TFLOP/s", "", "", warning[0] if warning else "ok"))
    return rows


def headlines(parts):
    rows = []
    for name, part in parts.items():
        if name == "conformance":
            rows.append((name, "", counted(part), "", "", part["outcome"]))
        elif name.startswith("tokens "):
            detail = part.get("said", "")
            if "equal" in part:
                detail = f"{part['equal']} of {part['of']} tokens equal the CPU's, {part['sure']} had to be"
            if "worst" in part:
                detail += f"; log-probabilities within {part['worst']} of {part['bound']}"
            rows.append((name, "", detail, "", "", part.get("said", part["outcome"])))
    for result in parts.get("numbers llama-3.1-8b", {}).get("bench", {}).get("results", []):
        if result["kind"] == "decode":
            case = f"decode, batch {result['batch']}"
        else:
            case = f"prefill, {result['prompt']} tokens"
        copy = parts.get("numbers kernels", {}).get("bench", {}).get("copy_gb_s")
        of = percent(result["gb_s"] / copy) if copy and result.get("gb_s") else ""
        rows.append((parts["numbers llama-3.1-8b"]["bench"]["model"], case, f"{result['tok_s']['median']:.0f} tok/s", of, "", ""))
    lines = list(lines_of(parts))
    for what, number, goal, fits in GOALS:
        # Of several kernels for one shape the program takes the best.
        best = {}
        for line in filter(fits, lines):
            if line.get(number) is not None:
                best[line["shape"].split(" splits=")[0]] = max(best.get(line["shape"].split(" splits=")[0], 0), line[number])
        if not best:
            rows.append((what, "", "not measured", "", "", f"goal {percent(goal)}"))
            continue
        worst = min(best, key=best.get)
        shown = f"{percent(min(best.values()))} to {percent(max(best.values()))}"
        rows.append((what, f"worst: {worst}", shown, "", "", f"{verdict(best[worst], goal)} (goal {percent(goal)})"))
    for line in lines:
        if line["family"] == "exchange" and "collect" in line["shape"]:
            met = "reached" if line["us"] <= ROUND_TRIP_US else "missed"
            rows.append(("hand-over", line["shape"], f"{line['us']:.1f} µs", "", "", f"{met} (goal {ROUND_TRIP_US} µs)"))
    return rows


def counted(part):
    if not part.get("passed") and not part.get("failed"):
        return part.get("said", "")[:200]
    text = f"{part['passed']} passed, {part['failed']} failed, {part['skipped']} skipped"
    text += "".join(f"; {name}" for name in part.get("failures", [])[:4])
    return text + (f": {part['said'][:200]}" if "said" in part else "")


def correctness(parts):
    rows = []
    for name, part in parts.items():
        if name == "calls":
            for call, took in part["seconds"].items():
                rows.append((f"call {call}", "", f"{took} s", "", "", ""))
        elif name.startswith(("tests ", "repeat ")):
            rows.append((name, "", counted(part), "", "", part["outcome"]))
        elif "unreadable" in part and part["outcome"] == "ok":
            rows.append((name, "", "gave no result, see its log", "", "", part["unreadable"][:80]))
        elif part["outcome"] != "ok" and name != "conformance" and not name.startswith("tokens "):
            rows.append((name, "", part.get("said", "")[:200], "", "", part["outcome"]))
    return rows


def kernels(parts):
    rows = []
    for line in lines_of(parts):
        of = percent(line["of_copy"]) + " copy" + (f", {percent(line['of_peak'])} peak" if line["of_peak"] else "")
        against = f"{line['speedup']:.2f} x" if line["speedup"] else ""
        rows.append((line["kernel"], line["shape"], f"{line['us']:.1f} µs, {line['gb_s']:.0f} GB/s, {line['tflop_s']:.1f} TFLOP/s",
                     of, against, ""))
    return rows
