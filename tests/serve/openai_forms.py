"""Asks a server of Tandem for answers of a form and for calls of functions, with the `openai` package.

    python openai_forms.py http://127.0.0.1:8080/v1 KEY

The model may be any that has a tokenizer and a chat template, also one of random weights. Exits with an assertion's message
if an answer is wrong.
"""

import json
import sys

import openai

url, key = sys.argv[1:3]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=600)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Count to five."}]


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


# Space of a model whose tokens are bytes: one of random weights says much of it.
space = {"9": -100, "10": -100, "13": -100, "32": -100}


def ask(**more):
    return client.chat.completions.create(
        **{"model": model, "messages": messages, "max_tokens": 16, "logit_bias": space, **more})


book = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2030},
        "authors": {"type": "array", "minItems": 1, "maxItems": 2, "items": {"$ref": "#/$defs/person"}},
    },
    "required": ["title", "year", "authors"],
    "additionalProperties": False,
    "$defs": {"person": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}},
                         "required": ["name"], "additionalProperties": False}},
}


def check_book(text):
    value = json.loads(text)
    assert list(value) == ["title", "year", "authors"], text
    assert isinstance(value["title"], str) and len(value["title"]) <= 12, text
    assert isinstance(value["year"], int) and 1000 <= value["year"] <= 2030, text
    assert 1 <= len(value["authors"]) <= 2 and all(list(a) == ["name"] for a in value["authors"]), text


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "book", "strict": True, "schema": schema}}


about = [{"role": "user", "content": "Which book do you like? Answer in JSON."}]
for more in [{"temperature": 0}, {"seed": 1, "temperature": 1}, {"seed": 2, "n": 2, "frequency_penalty": 1}]:
    answer = ask(messages=about, response_format=form(book), max_tokens=2500, **more)
    for choice in answer.choices:
        assert choice.finish_reason == "stop", choice
        check_book(choice.message.content)
    chunks = list(ask(messages=about, response_format=form(book), max_tokens=2500, stream=True, **more))
    streamed = [c.choices[0] for c in chunks if c.choices[0].index == 0]
    assert "".join(c.delta.content or "" for c in streamed) == answer.choices[0].message.content
assert ask(response_format=form(book), max_tokens=3).choices[0].finish_reason == "length"
assert ask(response_format={"type": "text"}).choices[0].message.content
completion = client.completions.create(model=model, prompt="A book:", max_tokens=2500, logit_bias=space, extra_body={"response_format": form(book)})
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
    wanted = dict(messages=please, tools=tools, tool_choice=choice, max_tokens=2500, seed=5, parallel_tool_calls=False)
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
print(f"{model}: all forms are as they should be")
