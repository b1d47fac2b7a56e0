"""Models on both sides under caps of the device's memory: their tokens against the CPU's, their times against the predicted ones."""

import json

import margin
import reading
from runner import program
from sizes import GPU, REHEARSAL

PROMPT = "The quick brown fox jumps over the lazy dog, and then it looks around for another one to jump over. "
# Six of different lengths: some live on the device, some on the host.
PROMPTS = [PROMPT * n for n in (1, 2, 1, 3, 1, 2)]
# Seen by a rehearsal already, which has another one's sizes.
for _sizes in (GPU, REHEARSAL):
    assert max(len(PROMPT) * _sizes.repeat, *map(len, PROMPTS)) + _sizes.tokens <= _sizes.context, "prompts longer than --ctx"
# Sublayers of a block on the CPU (1): attention alone in decode, as LIA chooses it for long contexts; and all of them.
LIA = {"attention": "prefill=0,0,0,0,0,0,decode=0,1,1,0,0,0", "all": "prefill=1,1,1,1,1,1,decode=1,1,1,1,1,1"}


def generate(model, sizes, device, more, prompt, logprobs=True):
    command = [program("tandem"), "generate", "-m", model, "--raw", "--json", "--temp", "0", "-n", str(sizes.tokens), "--ctx",
               str(sizes.context), "--device", device, *more]
    return command + (["--logprobs", "100"] if logprobs else []) + [prompt]


def answer(run, name, command, limit, sides=None):
    """Runs one generation. What it answered stays out of the results; what was planned and timed goes there. With `sides` ("gpu",
    "host"), it is a failure if one of them has no part of the model: then something else ran than was asked for."""
    kept = {}

    def read(text):
        found = reading.last_json(text)
        memory = found["plan"]["memory"]
        idle = [side for side in sides or () if not (memory.get(side) or {}).get("total")]
        problem = {"problem": f"nothing of the model is on the {idle[0]}"} if idle else {}
        kept.update({} if idle else found)
        return {"plan": slim(found["plan"]), "timings": found["timings"], **problem}

    run.part(name, command, limit, read=read)
    return kept or None


def slim(plan):
    """A plan without its tables."""
    predicted = plan.get("predicted") or {}
    times = {k: predicted[k] for k in ("by", "t_prefill_s", "t_decode_step_s", "why") if k in predicted}
    return {"strategy": plan.get("strategy"), "k": plan.get("k"), "memory": plan.get("memory"), "kv_pages": plan.get("kv_pages"),
            "predicted": times or None}


def cap(memory, share):
    """A cap that leaves a share of weights, keys and values on the device, beside all activations."""
    gpu = memory["gpu"]
    return int(gpu["activations"] + share * (gpu["weights"] + gpu["kv"]))


def tokens(run, sizes, model, blocks, save):
    """Every way to run one model, each against the CPU's tokens as far as its margins go."""
    limit, prompt = 60 + sizes.compile, PROMPT * sizes.repeat
    cpu = answer(run, "hybrid cpu", generate(model, sizes, "cpu", [], prompt), limit)
    whole = answer(run, "hybrid whole", generate(model, sizes, "cuda", ["--strategy", "gpu-only"], prompt), limit,
                   ("gpu",))
    memory = (whole or {}).get("plan", {}).get("memory")
    most = str(cap(memory, 0.6)) if memory else "64MiB"
    far = ["--strategy", "helm", "--boundary", "1", "--kv-pages", "3", "--chunk", "32"]
    ways = {
        "helm": ["--strategy", "helm", "--boundary", str(blocks * 2 // 3), "--gpu-memory", most],
        **{f"lia {name}": ["--strategy", "lia", "--pinned", str(blocks // 3), "--policy", policy] for name, policy in LIA.items()},
        "stream": ["--strategy", "stream", "--gpu-memory", most],
        "far attend": [*far, "--far", "attend"],
        "far stream": [*far, "--far", "stream"],
        "auto": ["--strategy", "auto", "--gpu-memory", most, "--hardware", sizes.hardware],
    }
    compared(run, "whole", cpu, whole, blocks)
    for name, options in ways.items():
        got = answer(run, f"hybrid {name}", generate(model, sizes, "cuda", options, prompt), limit,
                     None if name == "auto" else ("gpu", "host"))
        compared(run, name, cpu, got, blocks)
        save()


def mixture(run, sizes, save):
    """A mixture of experts, with its experts on the device, on the CPU and on both."""
    limit, prompt, model = 60 + sizes.compile, PROMPT, sizes.mixture
    cpu = answer(run, "experts cpu", generate(model, sizes, "cpu", [], prompt), limit)
    ways = {
        "whole": (["--strategy", "gpu-only"], ("gpu",)),
        "ncmoe": (["--n-cpu-moe", str(sizes.mixture_blocks // 2)], ("gpu", "host")),
        "divided": (["--gpu-experts", "2"], ("gpu", "host")),
        "cpu-moe": (["--strategy", "cpu-moe"], ("gpu", "host")),
    }
    for name, (options, sides) in ways.items():
        got = answer(run, f"experts {name}", generate(model, sizes, "cuda", options, prompt), limit, sides)
        compared(run, f"experts {name}", cpu, got, sizes.mixture_blocks)
        save()


def compared(run, name, cpu, got, blocks):
    if cpu and got and run.wanted(f"tokens {name}"):
        run.found(f"tokens {name}", margin.compare(cpu, got, blocks))


def requests(run, sizes, model, blocks, save):
    """Requests by every strategy, each answer against the CPU's answer to its prompt alone."""
    limit = 60 + sizes.compile
    path = run.file("prompts.jsonl")
    with open(path, "w") as f:
        for prompt in PROMPTS:
            f.write(json.dumps({"prompt": prompt, "max_tokens": sizes.tokens}) + "\n")
    wants = []
    for n in sorted(set(len(p) // len(PROMPT) for p in PROMPTS)):
        command = generate(model, sizes, "cpu", [], PROMPT * n)
        wants.append((n, answer(run, f"requests cpu {n}", command, limit)))
    wants = dict(wants)
    for strategy in ("neo", "apex", "fastdecode", "auto"):
        kept = {}

        def read(text):
            kept.update(reading.json_lines(text))
            return {"requests": len(kept["answers"]),
                    "tok_s": [round(a["timings"]["decode_tok_s"] or 0, 1) for a in kept["answers"]]}

        command = [program("tandem"), "generate", "-m", model, "--prompts", path, "--raw", "--temp", "0", "--device", "cuda",
                   "--strategy", strategy, "--hardware", sizes.hardware, "--kv-pages", "8"]
        run.part(f"requests {strategy}", command, limit, read=read)
        answers = kept.get("answers")
        if not answers or not run.wanted(f"tokens requests {strategy}"):
            continue
        if len(answers) != len(PROMPTS):
            run.found(f"tokens requests {strategy}", {"outcome": "failed", "said": f"{len(answers)} answers to {len(PROMPTS)} prompts"})
            continue
        pairs = [(wants[len(p) // len(PROMPT)], a) for p, a in zip(PROMPTS, answers)]
        if all(want for want, _ in pairs):
            run.found(f"tokens requests {strategy}", margin.of_many(pairs, blocks))
        save()


def brim(run, sizes, model, report):
    """One run without a cap, whose keys and values are more than the device has: what is planned fills it to the brim."""
    devices = report.get("cuda", {}).get("devices", [])
    memory = devices[0]["memory"] if devices else 80 << 30
    context = sizes.small_context
    batch = min(4096, int(1.3 * memory / (context * sizes.small_kv_bytes)) + 1)
    command = [program("tandem"), "bench", "-m", model, "--device", "cuda", "--json", "--strategy", "helm", "--batch", str(batch),
               "--ctx", str(context), "--prompt", "0", "--gen", "2", "--repeat", "1"]

    def read(text):
        gpu = reading.last_json(text)["plan"]["memory"]["gpu"]
        share = gpu["total"] / gpu["available"]
        problem = {} if share > 0.8 else {"problem": f"only {share:.0%} of the device was used"}
        return {"share": round(share, 3), "bytes": gpu["total"], "of": gpu["available"], **problem}

    run.part("brim", command, 90 + sizes.compile, read=read)


def times(run, sizes, model, save):
    """Caps from 100% down: what was predicted beside what was executed, and timelines."""
    limit, prompt = 100 + sizes.compile, PROMPT * sizes.repeat
    command = generate(model, sizes, "cuda", ["--strategy", "gpu-only"], prompt, logprobs=False)
    whole = answer(run, "times whole", command, limit)
    memory = (whole or {}).get("plan", {}).get("memory")
    if not memory:
        return None
    caps = {share: cap(memory, share / 100) for share in sizes.caps}
    # Of 100% the whole model and what the plan keeps beside it.
    caps[100] = int(1.1 * memory["gpu"]["total"])
    for share, most in caps.items():
        for strategy in ("helm", "stream", "auto"):
            name = f"times {strategy} {share}%"
            options = ["--strategy", strategy, "--gpu-memory", str(most)]
            got = answer(run, name, generate(model, sizes, "cuda", options, prompt, logprobs=False), limit)
            if got:
                beside(run, name, got, prompt)
            # A timeline apart: with one, steps are launched kernel by kernel.
            if strategy != "auto" and share == sizes.caps[1]:
                drawn = [*options, "--timeline", run.file(f"timeline-{strategy}-{share}.json")]
                answer(run, f"timeline {strategy} {share}%", generate(model, sizes, "cuda", drawn, prompt, logprobs=False), limit)
            save()
    return caps


def beside(run, name, got, prompt):
    predicted = (got["plan"].get("predicted") or {})
    timings = got["timings"]
    part = run.parts[name]
    # The time to the first token has the loading of weights in it. Random weights have a token for each byte.
    seconds = {"prefill_s": len(prompt), "decode_step_s": 1}
    rates = {"prefill_s": timings["prefill_tok_s"], "decode_step_s": timings["decode_tok_s"]}
    executed = {what: seconds[what] / rate if rate else None for what, rate in rates.items()}
    part["executed"] = executed
    step = predicted.get("t_decode_step_s")
    if step and executed["decode_step_s"]:
        part["ratio"] = round(executed["decode_step_s"] / step, 3)
