//! A chat template is a program from a stranger: whatever it is, an answer or one error, no panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::text::{ChatTemplate, Message};

fuzz_target!(|source: &str| {
    if let Ok(template) = ChatTemplate::new(source) {
        let messages = [Message::new("system", "Be brief."), Message::new("user", "Hi"), Message::new("assistant", "")];
        for n in 0..=messages.len() {
            let _ = template.render(&messages[..n], n % 2 == 0, "<s>", "</s>");
        }
    }
});
