"""Asks a server of Tandem everything that it can do, with the `openai` package.

    python openai_client.py http://127.0.0.1:8080/v1 KEY [synthetic] [forms]

With `synthetic` the model has random weights, and no tokenizer unless its answers can have `forms`. Exits with an assertion's message if an answer is wrong.
"""

import json
import sys

import openai

url, key = sys.argv[1:3]
synthetic = "synthetic" in sys.argv[3:]
forms = not synthetic or "forms" in sys.argv[3:]
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

# Forms.
book = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
        "authors": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["title", "year", "authors"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}},
                         "required": ["name"], "additionalProperties": False}},
}


def check_book(text):
    value = json.loads(text)
    assert list(value) == ["title", "year", "authors"], text
    assert isinstance(value["title"], str) and len(value["title"]) <= 40, text
    assert isinstance(value["year"], int) and 1000 <= value["year"] <= 2030, text
    assert 1 <= len(value["authors"]) <= 2 and all(list(a) == ["name"] for a in value["authors"]), text


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "book", "strict": True, "schema": schema}}


if forms:
    about = [{"role": "user", "content": "Which book do you like? Answer in JSON."}]
    for more in [{"temperature": 0}, {"seed": 1, "temperature": 1}, {"seed": 2, "n": 2, "frequency_penalty": 1}]:
        answer = ask(messages=about, response_format=form(book), max_tokens=900, **more)
        for choice in answer.choices:
            assert choice.finish_reason == "stop", choice
            check_book(choice.message.content)
        chunks = list(ask(messages=about, response_format=form(book), max_tokens=900, stream=True, **more))
        streamed = [c.choices[0] for c in chunks if c.choices[0].index == 0]
        assert "".join(c.delta.content or "" for c in streamed) == answer.choices[0].message.content
    assert ask(response_format={"type": "json_object"}, max_tokens=3).choices[0].finish_reason == "length"
    assert ask(response_format={"type": "text"}).choices[0].message.content
    completion = client.completions.create(model=model, prompt="A book:", max_tokens=900, extra_body={"response_format": form(book)})
    check_book(completion.choices[0].text)
    error = refused(openai.BadRequestError, lambda: ask(response_format=form({"type": "array", "uniqueItems": True})))
    assert error.param == "response_format" and "uniqueItems" in error.message, error

    # Tools.
    tools = [
        {"type": "function", "function": {"name": "add_book", "description": "Adds a book.", "parameters": book}},
        {"type": "function", "function": {"name": "list_books", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
    ]
    please = [{"role": "user", "content": "Please add the book Faust by Goethe of 1808."}]
    named = {"type": "function", "function": {"name": "add_book"}}
    for choice in [named, "required"]:
        wanted = dict(messages=please, tools=tools, tool_choice=choice, max_tokens=900, seed=5, parallel_tool_calls=False)
        answer = ask(**wanted).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None, answer
        (call,) = answer.message.tool_calls
        assert call.type == "function" and call.id and (choice == "required" or call.function.name == "add_book")
        if call.function.name == "add_book":
            check_book(call.function.arguments)
        begun, arguments, finish = [], "", None
        for chunk in ask(**wanted, stream=True):
            finish = chunk.choices[0].finish_reason or finish
            for part in chunk.choices[0].delta.tool_calls or []:
                assert part.index == 0
                if part.id:
                    begun.append(part.function.name)
                arguments += part.function.arguments or ""
        assert (begun, arguments, finish) == ([call.function.name], call.function.arguments, "tool_calls")
    turns = [*please, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "It is there now."}]
    after = ask(messages=turns, tools=tools, max_tokens=30).choices[0]
    assert after.message.content or after.message.tool_calls, after
    assert ask(messages=please, tools=tools, tool_choice="none").choices[0].message.tool_calls is None
    error = refused(openai.BadRequestError, lambda: ask(tools=tools, tool_choice={"type": "function", "function": {"name": "none"}}))
    assert error.param == "tool_choice", error

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
