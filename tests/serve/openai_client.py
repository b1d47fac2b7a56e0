"""Asks a server of Tandem everything that it can do, with the `openai` package.

    python openai_client.py http://127.0.0.1:8080/v1 KEY [synthetic]

With `synthetic` the model has random weights and no tokenizer. Exits with an assertion's message if an answer is wrong.
"""

import sys

import openai

url, key = sys.argv[1:3]
synthetic = "synthetic" in sys.argv[3:]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=300)
model = client.models.list().data[0].id
assert client.models.retrieve(model).id == model
messages = [{"role": "user", "content": "Count to five."}]


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


def ask(**more):
    return client.chat.completions.create(**{"model": model, "messages": messages, "max_tokens": 16, **more})


# Whole and streamed.
whole = ask(seed=1)
text = whole.choices[0].message.content
assert text and whole.choices[0].message.role == "assistant"
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
chunks = list(ask(seed=1, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
assert chunks[0].choices[0].delta.role == "assistant"
assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason

# Several, stopped, scored.
several = ask(seed=1, n=2)
assert [c.index for c in several.choices] == [0, 1] and several.choices[0].message.content == text
stop = text[2:5]
stopped = ask(seed=1, stop=[stop])
assert stopped.choices[0].message.content == text[: text.index(stop)]
assert stopped.choices[0].finish_reason == "stop"
scored = ask(seed=1, logprobs=True, top_logprobs=3)
entries = scored.choices[0].logprobs.content
assert bytes(b for e in entries for b in e.bytes or []).decode() == text
assert all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in entries)

# Text completions.
completion = client.completions.create(model=model, prompt=["One,", "Two,"], max_tokens=4, seed=2, logprobs=2)
assert len(completion.choices) == 2 and len(completion.choices[0].logprobs.tokens) == 4
echoed = client.completions.create(model=model, prompt="One,", max_tokens=4, seed=2, echo=True)
assert echoed.choices[0].text == "One," + completion.choices[0].text
streamed = client.completions.create(model=model, prompt="One,", max_tokens=4, seed=2, stream=True)
assert "".join(c.choices[0].text for c in streamed) == completion.choices[0].text

# Errors.
refused(openai.AuthenticationError, lambda: client.with_options(api_key="wrong").chat.completions.create(
    model=model, messages=messages))
error = refused(openai.BadRequestError, lambda: ask(temperature=-1))
assert error.param == "temperature", error
error = refused(openai.BadRequestError, lambda: ask(messages=[{"role": "user", "content": "x " * 9000}]))
assert error.code == "context_length_exceeded", error
error = refused(openai.BadRequestError, lambda: ask(response_format={"type": "grammar"}))
assert error.param == "response_format", error
refused(openai.NotFoundError, lambda: client.models.retrieve("no-such-model"))
refused(openai.NotFoundError, lambda: client.embeddings.create(model=model, input="x"))

# A client that has enough.
stream = ask(stream=True, max_tokens=200)
next(iter(stream))
stream.close()

# Conversations, which random weights do not have.
if not synthetic:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Again."},
    ]
    assert ask(messages=turns, temperature=0).choices[0].message.content
print(f"{model}: all answers are as they should be")
