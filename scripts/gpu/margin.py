"""Tokens of two devices, compared as far as rounding lets them be.

Random weights lead by little. So the log-probabilities of likely tokens are compared at every step, within what the
arithmetic allows, and the tokens themselves where the lead is beyond that; once one differs, the texts are two.
"""

import math


def bound(layers):
    """By how many standard deviations of the logits a row may be off: tests/support/rounding.rs, bf16 weights and cache."""
    u = 2.0 ** -9
    e = math.sqrt(768) * 2.0 ** -24
    cpu = 4 * math.sqrt(3 * layers) * (math.sqrt(2 * e * u) + u * math.sqrt(2 / 3) + e)
    activations = 4 * u / math.sqrt(3) * math.sqrt(4 * layers + 1)
    accelerator = 4 * math.sqrt(7 * layers) * 2.0 ** -8 / math.sqrt(3)
    return cpu + activations + accelerator


def compare(want, got, layers):
    """Answers of `tandem generate --json --logprobs K`; a part of the results."""
    # Logits of `synth:` models have a standard deviation of 1: normed activations by rows of variance 1/columns. The
    # largest error of any logit is 6/4 of the bound, the log of the sum of all moves by less; a lead is lost to two.
    most = bound(layers)
    worst, sure, equal = 0.0, 0, 0
    steps = list(zip(want["tokens"], got["tokens"], want["logprobs"], got["logprobs"]))
    problem = "" if steps else "no tokens"
    for step, (a, b, left, right) in enumerate(steps):
        other = dict(map(tuple, right["top"]))
        # Tokens at the end of one list may be just beyond the other's.
        common = [(p, other[i]) for i, p in left["top"] if i in other]
        off = max((abs(p - q) for p, q in common), default=math.inf)
        worst = max(worst, off)
        if not off <= 2 * most or 2 * len(common) < len(left["top"]):
            problem = f"token {step}: log-probabilities off by {off:.3f}, at most {2 * most:.3f}"
            break
        lead = left["top"][0][1] - left["top"][1][1]
        sure += lead > 3 * most
        if a != b:
            if lead > 3 * most:
                problem = f"token {step} is {b}, not {a}, which leads by {lead:.3f}"
            break
        equal += 1
    outcome = "failed" if problem else "ok"
    part = {"outcome": outcome, "equal": equal, "of": len(steps), "sure": sure, "worst": round(worst, 4), "bound": round(2 * most, 4)}
    return {**part, "said": problem} if problem else part


def of_many(pairs, layers):
    """Answers of many requests, of which only tokens are known, against the answers to each alone with log-probabilities: a part
    of the results. Where two texts part, the first one's lead is within what rounding may take."""
    most = bound(layers)
    equal = of = sure = 0
    problem = "" if pairs else "no answers"
    for index, (want, got) in enumerate(pairs):
        of += len(want["tokens"])
        for step, (a, b, left) in enumerate(zip(want["tokens"], got["tokens"], want["logprobs"])):
            lead = left["top"][0][1] - left["top"][1][1]
            sure += lead > 3 * most
            if a != b:
                if lead > 3 * most and not problem:
                    problem = f"request {index}, token {step} is {b}, not {a}, which leads by {lead:.3f}"
                break
            equal += 1
        if len(got["tokens"]) != len(want["tokens"]) and not problem:
            problem = f"request {index}: {len(got['tokens'])} tokens, not {len(want['tokens'])}"
    part = {"outcome": "failed" if problem else "ok", "equal": equal, "of": of, "sure": sure, "bound": round(2 * most, 4)}
    return {**part, "said": problem} if problem else part
