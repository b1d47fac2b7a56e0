//! Answers in channels: how they are split, whatever the pieces; what a grammar allows; what templates get.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;
use tandem::text::{
    CallFormat, Calls, Channels, Chat, ChatTemplate, Constraint, Content, Control, Conversation, Grammars,
    Json, Message, Part, Shape, Thinking, Tokenizer, Told, Tool, arrange,
};

use crate::support::spelling;

/// A piece of an answer: a control token, or some text.
#[derive(Debug, Clone)]
enum Piece {
    Control(Control),
    Text(String),
}

fn ids() -> Arc<[(u32, Control)]> {
    (1000..).zip(Control::ALL).map(|(id, (control, _))| (id, control)).collect()
}

/// Pieces of a text in which control tokens are written as they are.
fn pieces(text: &str) -> Vec<Piece> {
    let mut found = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let here = Control::ALL.iter().find(|(_, name)| rest.starts_with(name));
        if let Some((control, name)) = here {
            found.push(Piece::Control(*control));
            rest = &rest[name.len()..];
        } else {
            let next =
                Control::ALL.iter().filter_map(|(_, name)| rest.find(name)).min().unwrap_or(rest.len());
            found.push(Piece::Text(rest[..next].into()));
            rest = &rest[next..];
        }
    }
    found
}

/// The parts of an answer whose texts come in pieces of so many characters; adjacent parts of a kind are joined.
fn read(pieces: &[Piece], calls: bool, sizes: &[usize]) -> Vec<Part> {
    let mut channels = Channels::behind(&[1000], ids(), calls);
    let mut sizes = sizes.iter().copied().cycle();
    let mut all = Vec::new();
    // Text that is held back comes with a later token, but in front of a control token.
    let mut late = String::new();
    for piece in pieces {
        match piece {
            Piece::Control(control) => {
                let (id, _) = *ids().iter().find(|(_, known)| known == control).unwrap();
                all.extend(channels.push(id, &std::mem::take(&mut late)));
            }
            Piece::Text(text) => {
                let chars: Vec<char> = std::mem::take(&mut late).chars().chain(text.chars()).collect();
                let mut at = 0;
                while at < chars.len() {
                    let n = sizes.next().unwrap().max(1).min(chars.len() - at);
                    let text: String = chars[at..at + n].iter().collect();
                    at += n;
                    if at == chars.len() && n.is_multiple_of(2) {
                        late = text;
                    } else {
                        all.extend(channels.push(7, &text));
                    }
                }
            }
        }
    }
    all.extend(channels.push(8, &late));
    all.extend(channels.finish());
    let mut joined: Vec<Part> = Vec::new();
    for part in all {
        match (joined.last_mut(), part) {
            (Some(Part::Reasoning(a)), Part::Reasoning(b)) | (Some(Part::Content(a)), Part::Content(b)) => {
                a.push_str(&b)
            }
            (Some(Part::Arguments(i, a)), Part::Arguments(j, b)) if *i == j => a.push_str(&b),
            (_, part) => joined.push(part),
        }
    }
    joined
}

#[track_caller]
fn check(text: &str, wanted: &[Part]) {
    let pieces = pieces(text);
    for size in [1, 2, 3, 7, 1000] {
        assert_eq!(read(&pieces, true, &[size]), wanted, "{text:?} in pieces of {size}");
    }
}

fn reasoning(text: &str) -> Part {
    Part::Reasoning(text.into())
}
fn content(text: &str) -> Part {
    Part::Content(text.into())
}
fn call(name: &str, arguments: &str) -> [Part; 2] {
    [Part::Call(0, name.into()), Part::Arguments(0, arguments.into())]
}

#[test]
fn channels_are_reasoning_content_and_calls() {
    check(
        "<|channel|>analysis<|message|>2 and 2?<|end|><|start|>assistant<|channel|>final<|message|>4.<|return|>",
        &[reasoning("2 and 2?"), content("4.")],
    );
    let [begins, arguments] = call("look", "{\"city\": \"Ulm\"}");
    for header in [
        "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.look<|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.look json<|message|>",
        "<|channel|>commentary to=look<|message|>",
        " to=functions.look<|channel|>commentary json<|message|>",
        " to=functions.look<|channel|>commentary <|constrain|>json<|message|>",
        " to=functions.look<|channel|>analysis<|message|>",
    ] {
        let turn = format!(
            "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant{header}{{\"city\": \"Ulm\"}}<|call|>"
        );
        check(&turn, &[reasoning("Rain?"), begins.clone(), arguments.clone()]);
    }
    // What is said before a call is for the user, and a blank line parts what comes in two messages.
    check(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>analysis<|message|>A<|end|>\
         <|start|>assistant<|channel|>analysis<|message|>B<|end|><|start|>assistant<|channel|>final<|message|>C<|return|>",
        &[content("I look."), reasoning("A\n\nB"), content("\n\nC")],
    );
    // Spelled, a marker is a text like others: no quotation calls a function.
    let spelled = "<|start|>assistant<|channel|>commentary to=functions.look<|message|>{}<|call|>";
    let mut quoted = pieces("<|channel|>final<|message|>");
    quoted.push(Piece::Text(spelled.into()));
    assert_eq!(read(&quoted, true, &[1]), [content(spelled)]);
    // Where nobody asked for calls, their texts are content.
    let unasked = pieces("<|channel|>commentary to=functions.look<|message|>{}<|call|>");
    assert_eq!(read(&unasked, false, &[3]), [content("{}")]);
}

#[test]
fn what_is_malformed_is_read_without_loss() {
    for (text, wanted) in [
        ("Ahoy <b>", vec![content("Ahoy <b>")]),
        ("to be or", vec![content("to be or")]),
        ("to", vec![content("to")]),
        ("<|channel|>analysis<|message|>cut", vec![reasoning("cut")]),
        ("<|channel|>anal", vec![]),
        ("<|message|>Ahoy", vec![content("Ahoy")]),
        ("<|channel|>musing<|message|>Ahoy<|end|>", vec![content("Ahoy")]),
        ("<|channel|>finalAhoy!<|return|>", vec![content("Ahoy!")]),
        ("<|channel|>final Ahoy there you<|return|>", vec![content("Ahoy there you")]),
        ("<|channel|>final Ahoy<|return|>", vec![content("Ahoy")]),
        (
            "<|channel|>analysis A word<|start|>assistant<|channel|>final<|message|>B",
            vec![reasoning("A word"), content("B")],
        ),
        (
            "<|channel|>analysis<|message|>A<|channel|>final<|message|>B<|end|>",
            vec![reasoning("A"), content("B")],
        ),
        ("<|start|>assistant<|end|><|start|>user<|message|>Ahoy", vec![content("Ahoy")]),
        ("<|channel|>final<|message|>A<|message|>B<|constrain|>C<|end|>D!", vec![content("ABC\n\nD!")]),
    ] {
        check(text, &wanted);
    }
    check(
        "<|channel|>commentary to=functions.f <|constrain|>json{\"a\": 1}<|call|>",
        &call("f", "{\"a\": 1}"),
    );
    check("<|channel|>commentary to=functions.f json{\"a\": 1}<|call|>", &call("f", "{\"a\": 1}"));
    check("<|channel|>commentary to=functions.f {\"a\": 1}<|call|>", &call("f", "{\"a\": 1}"));
}

/// Words of headers, and texts that no header has.
fn any_piece() -> impl Strategy<Value = Piece> {
    let control = prop::sample::select(Control::ALL.map(|(control, _)| Piece::Control(control)).to_vec());
    let words = [
        "analysis",
        "final",
        "commentary ",
        " to=functions.f ",
        "to=",
        " json",
        "assistant",
        "user",
        "te",
        " ",
        "\n",
    ];
    let word = prop::sample::select(words.map(|word| Piece::Text(word.into())).to_vec());
    let said = prop::sample::select(SAID.map(|text| Piece::Text(text.into())).to_vec());
    prop_oneof![2 => control, 1 => word, 2 => said]
}

const SAID: [&str; 5] = ["Ahoy! ", "é…\n", "{\"a\": [1]}", "(<|end|>) ", "A long, long text. "];

proptest! {
    /// No piece of text is lost, and how the tokens divide the text makes no difference.
    #[test]
    fn any_split_of_any_answer_reads_the_same(
        pieces in prop::collection::vec(any_piece(), 0..24),
        sizes in prop::collection::vec(1usize..9, 1..6),
        calls in any::<bool>(),
    ) {
        let whole = read(&pieces, calls, &[1]);
        prop_assert_eq!(&read(&pieces, calls, &sizes), &whole);
        let text: String = whole.iter().map(|part| match part {
            Part::Reasoning(text) | Part::Content(text) | Part::Arguments(_, text) => text.as_str(),
            Part::Call(..) => "",
        }).collect();
        let mut rest = text.as_str();
        for piece in &pieces {
            if let Piece::Text(said) = piece && SAID.contains(&said.as_str()) {
                let at = rest.find(said.trim());
                prop_assert!(at.is_some(), "{said:?} is lost in {text:?}");
                rest = &rest[at.unwrap() + said.trim().len()..];
            }
        }
    }
}

#[test]
fn a_prompt_that_ends_inside_of_a_message_is_gone_on_with() {
    let tail = |text: &str| -> Vec<u32> {
        let id = |control: &Control| ids().iter().find(|(_, known)| known == control).unwrap().0;
        pieces(text)
            .iter()
            .map(|p| match p {
                Piece::Control(c) => id(c),
                Piece::Text(_) => 7,
            })
            .collect()
    };
    let inside = tail("<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Well");
    let mut channels = Channels::behind(&inside, ids(), true);
    assert!(channels.is_inside());
    assert_eq!(channels.push(7, ", yes"), [content(", yes")]);
    let behind = tail("<|start|>user<|message|>Hi<|end|><|start|>assistant");
    assert!(!Channels::behind(&behind, ids(), true).is_inside());
    let behind = tail("<|start|>user<|message|>Hi<|end|>");
    let mut channels = Channels::behind(&behind, ids(), true);
    let turn = tail("<|start|>assistant<|channel|>final<|message|>");
    let parts: Vec<Part> = turn
        .iter()
        .zip(["", "assistant", "", "final", ""])
        .flat_map(|(&id, text)| channels.push(id, text))
        .collect();
    assert_eq!((parts, channels.is_inside()), (vec![], true));
}

#[test]
fn a_terminal_shows_the_reasoning_as_other_models_write_it() {
    let told = |text: &str| {
        let mut told = Told::new(Channels::behind(&[], ids(), true));
        let mut shown = String::new();
        for piece in pieces(text) {
            shown += &match piece {
                Piece::Control(control) => {
                    told.push(ids().iter().find(|(_, known)| *known == control).unwrap().0, "")
                }
                Piece::Text(text) => told.push(7, &text),
            };
        }
        shown += &told.finish();
        (shown, told.content().to_owned())
    };
    let turn =
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>";
    assert_eq!(told(turn), ("<think>\nHm.\n</think>\n\nYes.".into(), "Yes.".into()));
    let cut = "<|channel|>analysis<|message|>Hm.";
    assert_eq!(told(cut), ("<think>\nHm.\n</think>\n\n".into(), String::new()));
    let call = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>";
    assert_eq!(told(call).0, "I look.\n<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>");
}

fn calls() -> Calls {
    let parameters = json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"],
                             "additionalProperties": false });
    let nothing = json!({ "type": "object", "properties": {}, "additionalProperties": false });
    let tools =
        vec![Tool { name: "look".into(), parameters }, Tool { name: "look_up".into(), parameters: nothing }];
    Calls { format: CallFormat::Harmony, tools, parallel: false }
}

fn compile(thinking: Thinking, content: Content, calls: Option<Calls>) -> (Arc<Tokenizer>, Constraint) {
    let tokenizer = spelling::harmony();
    let grammar = Shape { thinking, content, calls }.grammar().unwrap();
    let compiled = Grammars::new(Some(tokenizer.clone()), 512).compile(&grammar);
    (tokenizer, compiled.unwrap_or_else(|e| panic!("{e}: {grammar:?}")))
}

/// How many tokens of an answer are allowed, of all; and whether it is complete there, or may end there. Control tokens are
/// themselves, except for texts that are `spelled`.
fn follow(form: &(Arc<Tokenizer>, Constraint), text: &str, spelled: bool) -> (usize, usize, bool) {
    let tokens = form.0.encode(text, false, !spelled).unwrap();
    let mut guide = form.1.guide();
    for (i, &token) in tokens.iter().enumerate() {
        if !guide.mask().unwrap().allows(token) {
            return (i, tokens.len(), false);
        }
        if guide.take(token).unwrap() {
            return (i + 1, tokens.len(), true);
        }
    }
    let end = form.0.token_id("<|return|>").unwrap();
    (tokens.len(), tokens.len(), guide.mask().unwrap().allows(end))
}

#[track_caller]
fn allows(form: &(Arc<Tokenizer>, Constraint), text: &str) {
    let (n, all, ends) = follow(form, text, false);
    assert_eq!((n, ends), (all, true), "{text:?}");
}

#[track_caller]
fn refuses(form: &(Arc<Tokenizer>, Constraint), text: &str) {
    let (n, all, ends) = follow(form, text, false);
    assert!(n < all || !ends, "{text:?}");
}

const THOUGHT: &str = "<|channel|>analysis<|message|>Hm, {\"a\"}.<|end|><|start|>assistant";

#[test]
fn forms_hold_for_the_final_channel_alone() {
    let of = json!({ "type": "object", "properties": { "a": { "type": "integer" } }, "required": ["a"], "additionalProperties": false });
    let form = compile(Thinking::Channels, Content::Schema(of.clone()), None);
    for header in ["<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"] {
        allows(&form, &format!("{header}{{\"a\": 1}}"));
        allows(&form, &format!("{THOUGHT}{THOUGHT}{header}{{\"a\": 1}}"));
        refuses(&form, &format!("{THOUGHT}{header}{{\"b\""));
    }
    refuses(&form, "<|channel|>commentary<|message|>Well.<|end|>");
    refuses(&form, &format!("{THOUGHT}{{\"a\": 1}}"));
    let inside = compile(Thinking::InMessage, Content::Schema(of), None);
    allows(&inside, "{\"a\": 1}");
}

#[test]
fn calls_have_their_functions_arguments() {
    let free = compile(Thinking::Channels, Content::Free, Some(calls()));
    let wanted = compile(Thinking::Channels, Content::Nothing, Some(calls()));
    let preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";
    for form in [&free, &wanted] {
        for header in [
            "<|channel|>commentary to=functions.look <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.look json<|message|>",
            "<|channel|>commentary to=functions.look<|message|>",
            " to=functions.look<|channel|>commentary json<|message|>",
            " to=functions.look<|channel|>commentary <|constrain|>json<|message|>",
        ] {
            allows(form, &format!("{header}{{\"city\": \"<|end|>\"}}").replace("<|end|>", "Ulm"));
            allows(form, &format!("{THOUGHT}{header}{{\"city\": \"Ulm\"}}"));
            refuses(form, &format!("{header}{{\"town\""));
        }
        allows(form, "<|channel|>commentary to=functions.look_up<|message|>{}");
        refuses(form, "<|channel|>commentary to=functions.book");
        refuses(form, "<|channel|>commentary to=functions.look<|message|>{}");
    }
    allows(&free, &format!("{THOUGHT}<|channel|>final<|message|>Well, yes."));
    allows(&free, &format!("{preamble}<|channel|>commentary to=functions.look_up<|message|>{{}}"));
    refuses(&wanted, "<|channel|>final<|message|>W");
    refuses(&wanted, preamble);
    // Spelled markers are text, in front of which nothing ends.
    let mut guide = free.1.guide();
    let begin = free.0.encode("<|channel|>final<|message|>", false, true).unwrap();
    let quoted = free.0.encode("<|end|><|start|>assistant to=functions.book", false, false).unwrap();
    assert!(quoted.iter().all(|&id| id < 256), "it is spelled");
    for &token in begin.iter().chain(&quoted) {
        assert!(guide.mask().unwrap().allows(token));
        guide.take(token).unwrap();
    }
    let inside = compile(Thinking::InMessage, Content::Free, Some(calls()));
    allows(&inside, "and so on");
    allows(
        &inside,
        "and so on<|end|><|start|>assistant to=functions.look_up<|channel|>commentary<|message|>{}",
    );
}

/// The turns of gpt-oss in a few words: one call a message, reasoning in `thinking`, none of it once there is an answer.
const TEMPLATE: &str = "{%- for m in messages -%}{%- if m.role == 'assistant' and 'tool_calls' in m -%}\
    {%- if m.content and m.thinking -%}{{ raise_exception('both') }}{%- endif -%}\
    {%- if m.thinking -%}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{%- endif -%}\
    <|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>\
    {{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
    {%- elif m.role == 'tool' -%}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>\
    {%- elif m.role == 'assistant' -%}<|start|>assistant<|channel|>final<|message|>{{ '' + m.content }}<|end|>\
    {%- else -%}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{%- endif -%}{%- endfor -%}\
    {%- for t in tools or [] -%}{{ '// ' + t.function.description }}{%- endfor -%}\
    {%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}";

fn conversation() -> Conversation {
    let turns: Json = serde_json::from_str(
        r#"[{"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": "I look.", "reasoning_content": "Both.", "tool_calls": [
              {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"city": "Ulm"}}},
              {"id": "b", "type": "function", "function": {"name": "wait", "arguments": {}}}]},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {"role": "tool", "tool_call_id": "b", "content": "done"}]"#,
    )
    .unwrap();
    let turns = turns.list().iter().map(|turn| Message::from_json(turn.clone()).unwrap()).collect();
    let tools = r#"[{"type": "function", "function": {"name": "wait"}}]"#;
    Conversation { tools: Some(serde_json::from_str(tools).unwrap()), ..Conversation::new(turns) }
}

#[test]
fn turns_reach_the_template_as_it_expects_them() {
    let mut turns = conversation();
    arrange(&mut turns);
    let prompt = ChatTemplate::new(TEMPLATE).unwrap().render_conversation(&turns, "", "").unwrap();
    assert_eq!(
        prompt,
        "<|start|>user<|message|>Rain?<|end|><|start|>assistant<|channel|>analysis<|message|>Both.\n\nI look.<|end|>\
         <|start|>assistant to=functions.look<|channel|>commentary json<|message|>{\"city\": \"Ulm\"}<|call|>\
         <|start|>functions to=assistant<|channel|>commentary<|message|>\"rain\"<|end|>\
         <|start|>assistant to=functions.wait<|channel|>commentary json<|message|>{}<|call|>\
         <|start|>functions to=assistant<|channel|>commentary<|message|>\"done\"<|end|>// <|start|>assistant"
    );
}

/// gpt-oss's own template, whose file `TANDEM_TEST_HARMONY_TEMPLATE` names.
#[test]
fn the_template_of_gpt_oss_takes_any_turns() {
    let Some(path) = std::env::var_os("TANDEM_TEST_HARMONY_TEMPLATE") else {
        println!("skipped: TANDEM_TEST_HARMONY_TEMPLATE names no file");
        return;
    };
    let source = std::fs::read_to_string(path).unwrap();
    let mut turns = conversation();
    turns.variables.push(("reasoning_effort".into(), "low".into()));
    arrange(&mut turns);
    let prompt = ChatTemplate::new(&source).unwrap().render_conversation(&turns, "", "").unwrap();
    println!("{prompt}");
    for part in [
        "Reasoning: low\n",
        "type wait = () => any;",
        "<|start|>assistant<|channel|>analysis<|message|>Both.\n\nI look.<|end|>",
        "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{\"city\": \"Ulm\"}<|call|>",
        "<|start|>functions.look to=assistant<|channel|>commentary<|message|>\"rain\"<|end|>",
        "<|start|>functions.wait to=assistant<|channel|>commentary<|message|>\"done\"<|end|>",
    ] {
        assert!(prompt.contains(part), "{part}: {prompt}");
    }
    assert!(prompt.ends_with("<|start|>assistant"));
    let chat = Chat::new(Some(spelling::harmony()), Some(&source), 512);
    assert_eq!((chat.has_channels(), chat.call_format()), (true, Some(CallFormat::Harmony)));
}

#[test]
fn harmony_is_known_by_its_template_and_its_tokens() {
    let of = |tokenizer, template| {
        let chat = Chat::new(Some(tokenizer), Some(template), 512);
        (chat.has_channels(), chat.call_format())
    };
    assert_eq!(of(spelling::harmony(), TEMPLATE), (true, Some(CallFormat::Harmony)));
    // Without the tokens nobody can write it, and with them a template need not.
    assert_eq!(of(spelling::tokenizer(), TEMPLATE), (false, None));
    assert_eq!(of(spelling::harmony(), "{{ messages }}"), (false, Some(CallFormat::Hermes)));
    let ends: Vec<u32> = spelling::harmony().end_of_generation().collect();
    assert_eq!(ends.len(), 2, "<|end|> ends a message, and no answer");
}
