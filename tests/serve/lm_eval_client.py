"""Log-likelihoods by lm-eval's own client, in batches of two and side by side.

    python lm_eval_client.py http://127.0.0.1:8080/v1/completions '[{"context", "text", "sum", "greedy"}]'

Exits with an assertion's message if a log-likelihood is not the given sum, to the last bit, or if it disagrees about what is greedy.
"""

import json
import sys

from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

url, wanted = sys.argv[1], json.loads(sys.argv[2])
for how in [{}, {"batch_size": 2}, {"num_concurrent": 4}]:
    model = LocalCompletionsAPI(model="any", base_url=url, max_length=400, **how)
    assert model.tokenizer_backend == "remote", model.tokenizer_backend
    ask = [
        Instance(request_type="loglikelihood", doc={}, arguments=(w["context"], w["text"]), idx=i)
        for i, w in enumerate(wanted)
    ]
    for (got, greedy), want in zip(model.loglikelihood(ask), wanted, strict=True):
        # Python adds the same numbers in the same order.
        assert (got, greedy) == (want["sum"], want["greedy"]), (how, got, greedy, want)
print(f"lm-eval: {len(wanted)} log-likelihoods, three ways")
