//! Chat templates in a process of their own: the same prompts as in this one, and an end to hostile ones.

use std::path::Path;
use std::time::Duration;

use crate::support::command::{assert_error, json, run, stdout, tandem};
use tandem::Error;
use tandem::model::{export_hf_folder, load};
use tandem::tensor::DType;
use tandem::text::{ChatTemplate, Message, Sandbox};

fn sandbox() -> Sandbox {
    Sandbox::of_program(env!("CARGO_BIN_EXE_tandem"))
}

/// Most memory that any child of this process had, in bytes, and the processor's time that all had.
fn children() -> (u64, Duration) {
    // SAFETY: an rusage of zeroes is a valid one; getrusage writes one through the pointer.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_CHILDREN, &mut usage), 0);
        usage
    };
    let time = |t: libc::timeval| Duration::new(t.tv_sec as u64, t.tv_usec as u32 * 1000);
    (usage.ru_maxrss as u64 * 1024, time(usage.ru_utime) + time(usage.ru_stime))
}

#[test]
fn real_templates_render_as_they_do_in_this_process() {
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../fixtures/chat_templates.json")).unwrap();
    let mut checked = 0;
    for template in fixture["templates"].as_array().unwrap() {
        let text = |key: &str| template[key].as_str().unwrap();
        let case = &template["cases"][0];
        let messages: Vec<Message> = serde_json::from_value(case["messages"].clone()).unwrap();
        let here =
            ChatTemplate::new(text("source")).unwrap().render(&messages, true, text("bos"), text("eos"));
        let there = sandbox().render(text("source"), &messages, true, text("bos"), text("eos"));
        checked += 1;
        match (here, there) {
            (Ok(here), Ok(there)) => assert_eq!(here, there, "{}", text("name")),
            (Err(here), Err(there)) => assert_eq!(here.to_string(), there.to_string(), "{}", text("name")),
            (here, there) => panic!("{}: {here:?} here, {there:?} there", text("name")),
        }
    }
    assert!(checked >= 8, "the fixture lost its templates");
}

#[test]
fn refusals_keep_their_kind_and_words() {
    let render = |source: &str| sandbox().render(source, &[Message::new("user", "hi")], true, "", "");
    let raised = render("{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert!(matches!(&raised, Error::Run(m) if m.contains("roles must alternate")), "{raised:?}");
    let malformed = render("one\n{% if %}").unwrap_err();
    assert!(
        matches!(&malformed, Error::Format { problem, .. } if problem.contains("line 2")),
        "{malformed:?}"
    );
    let nobody = Sandbox::of_program("/no/such/program").render("", &[], true, "", "").unwrap_err();
    assert!(matches!(&nobody, Error::Run(m) if m.contains("no process")), "{nobody:?}");
    // A program that knows nothing of templates.
    assert!(Sandbox::of_program("/bin/false").render("x", &[], true, "", "").is_err());
    assert!(Sandbox::of_program("/bin/echo").render("x", &[], true, "", "").is_err());
}

#[test]
fn a_long_conversation_fits() {
    let long = "word ".repeat(1 << 20);
    let messages = [Message::new("user", &long)];
    let source = "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim + '\n' }}{% endfor %}";
    let prompt = sandbox().render(source, &messages, true, "", "").unwrap();
    assert_eq!(prompt.len(), "<user>\n".len() + long.trim().len());
}

/// Values that double with every turn, by each way there is.
fn doubling() -> Vec<String> {
    let loops = |init: &str, step: &str, last: &str| {
        format!(
            "{{% set ns = namespace(s={init}) %}}{{% for i in range(70) %}}{{% set ns.s = {step} %}}{{% endfor %}}{last}"
        )
    };
    vec![
        loops("'ab'", "ns.s ~ ns.s", ""),
        loops("'ab'", "ns.s + ns.s", ""),
        loops("'ab'", "ns.s * 2", ""),
        loops("'ab'", "ns.s.replace('a', 'aa')", ""),
        loops("'ab'", "ns.s | replace('a', 'aa')", ""),
        loops("'ab'", "[ns.s, ns.s] | join", ""),
        loops("'ab'", "ns.s.join(['ab', ns.s])", ""),
        loops("'ab'", "'%s%s' | format(ns.s, ns.s)", ""),
        loops("'ab'", "(ns.s ~ '\n' ~ ns.s) | indent(ns.s | length)", ""),
        loops("['a']", "ns.s + ns.s", "{{ ns.s | join }}"),
        loops("['a']", "ns.s + ns.s", "{{ 'b' in ns.s }}"),
        loops("['a']", "(ns.s + ns.s) | list", ""),
        loops("['a']", "ns.s * 2", "{{ ns.s | tojson }}"),
        loops("['a']", "[ns.s, ns.s]", "{{ ns.s | string | length }}"),
        loops("['a']", "[ns.s, ns.s]", "{{ ns.s == [ns.s[0], [ns.s[0][0], ns.s[1][1]]] }}"),
        "{% set ns = namespace(s='ab') %}{% for i in range(70) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}\
         {% set ns.s = t %}{% endfor %}"
            .into(),
        "{% macro f(s, n) %}{% if n %}{{ f(s ~ s, n - 1) }}{% else %}{{ s }}{% endif %}{% endmacro %}{{ f('ab', 22) }}\
         {{ f('ab' * 1000000, 12) }}"
            .into(),
    ]
}

#[test]
fn templates_that_grow_without_end_are_ended() {
    // Folded by the compiler, before anything is rendered.
    let folded = format!("{{{{ [{}] | length }}}}", "'a' * 100000000,".repeat(1000));
    let stars = format!("{{{{ {}1 }}}}", "'a' * 90000000 ~ ".repeat(1000));
    let mut sources = doubling();
    sources.extend([
        folded,
        stars,
        "{{ 'a' * 1000000000 }}".into(),
        "{% set x = ['a'] * 100000000 %}{{ x | list | length }}".into(),
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}x{% endfor %}{% endfor %}\
         {% endfor %}"
            .into(),
        "{{ range(99999) | map('string') | join('x' * 99999) }}".into(),
        "{{ messages[0].content.ljust(100000000000) }}{{ messages[0].content.center(100000000000) }}".into(),
        "{{ '%1000000000000d' | format(1) }}".into(),
    ]);
    let mut refused = 0;
    for source in &sources {
        let result = sandbox().render(source, &[Message::new("user", "hi")], true, "<s>", "</s>");
        let shown = source.chars().take(160).collect::<String>();
        match result {
            Err(e) => {
                let text = e.to_string();
                assert!(
                    matches!(e, Error::Capacity(_) | Error::Run(_) | Error::Format { .. }),
                    "{shown}: {text}"
                );
                assert!(
                    text.starts_with("chat template") && text.len() < 600 && !text.contains('\n'),
                    "{text}"
                );
                refused += 1;
            }
            // Harmless after all: the engine shares what is equal, or refuses to evaluate it.
            Ok(text) => assert!(text.len() < 1 << 20, "{shown}: wrote {} bytes", text.len()),
        }
    }
    assert!(refused * 4 >= sources.len() * 3, "{refused} of {} refused", sources.len());
    // Address space for the program, the work and the compiler's stack: nothing resident can be more.
    let (peak, time) = children();
    assert!(peak < 650 << 20, "a child had {peak} bytes");
    // The other tests here have children too, which take milliseconds.
    assert!(
        time < Duration::from_secs(2 * sources.len() as u64 + 30),
        "{time:?} for {} templates",
        sources.len()
    );
}

/// A folder of random weights, with a tokenizer of three words and the chat template `source`.
fn folder(source: &str, dir: &Path) {
    export_hf_folder(&load("synth:tiny-llama").unwrap(), dir, DType::BF16, 1).unwrap();
    let tokenizer = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"hi": 0, "there": 1, "?": 2}, "unk_token": "?"},
    });
    std::fs::write(dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(dir.join("chat_template.jinja"), source).unwrap();
}

#[test]
fn the_program_says_so_in_one_sentence() {
    let home = tempfile::tempdir().unwrap();
    let model = home.path().join("model");
    let generate = |extra: &[&str]| {
        let mut command = tandem(home.path());
        command.args(["generate", "-n", "2", "--json", "-m"]).arg(&model).args(extra).arg("hi");
        run(&mut command)
    };
    folder("{% for m in messages %}{{ m.content }} there {% endfor %}", &model);
    let report = json(&generate(&[]));
    assert_eq!(report["prompt_tokens"], 2, "{report}");
    folder(&doubling()[0], &model);
    assert_error(&generate(&[]), 1, "MiB of memory");
    let raw = generate(&["--raw"]);
    assert_eq!(raw.status.code(), Some(0), "{}", stdout(&raw));
}
