//! The header of a message: role, channel, recipient, type. Where no header can go on, the message's text has begun: models
//! leave markers out, and what they say is not lost.

/// Most bytes of a section of a header. Names of functions have at most 64.
const LONGEST: usize = 256;

/// Whom a message is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Reasoning,
    Content,
    /// The function of this name.
    Call(String),
}

/// A header as far as it has come.
#[derive(Debug, Clone, Default)]
pub(super) struct Header {
    /// Whether a role follows. The prompt ends behind that of the first message.
    has_role: bool,
    role: String,
    /// Behind `<|channel|>`.
    channel: Option<String>,
    /// Behind `<|constrain|>`.
    of_type: Option<String>,
}

impl Header {
    /// Behind `<|start|>`.
    pub fn started() -> Header {
        Header { has_role: true, ..Header::default() }
    }

    /// Behind `<|channel|>`, where the role is known.
    pub fn in_channel() -> Header {
        Header { channel: Some(String::new()), ..Header::default() }
    }

    /// `<|channel|>` follows. Of two the last one counts.
    pub fn channel(&mut self) {
        (self.channel, self.of_type) = (Some(String::new()), None);
    }

    /// `<|constrain|>` follows.
    pub fn constrain(&mut self) {
        self.of_type = Some(String::new());
    }

    fn role_rules(&self) -> &'static Rules {
        if self.has_role { &ROLE } else { &NO_ROLE }
    }

    /// Takes one more character. Returns the beginning of the message's text if no header goes on so.
    pub fn push(&mut self, c: char) -> Option<String> {
        let role = self.role_rules();
        let (section, rules) = match (&mut self.of_type, &mut self.channel) {
            (Some(section), _) => (section, &TYPE),
            (None, Some(section)) => (section, &CHANNEL),
            (None, None) => (&mut self.role, role),
        };
        section.push(c);
        let found = scan(section, rules);
        found.is_over.then(|| section.split_off(found.text.unwrap_or(section.len())))
    }

    /// Whom the message is for.
    pub fn kind(&self) -> Kind {
        let channel = self.channel.as_deref().unwrap_or_default();
        let mut words = channel.split_whitespace().chain(self.role.split_whitespace());
        let recipient = words.find_map(|word| word.strip_prefix(TO).filter(|name| !name.is_empty()));
        if let Some(name) = recipient {
            return Kind::Call(name.strip_prefix("functions.").unwrap_or(name).to_owned());
        }
        match channel.split_whitespace().next() {
            Some("analysis") => Kind::Reasoning,
            _ => Kind::Content,
        }
    }

    /// Takes what is text of a header that ends without `<|message|>`: words that none has.
    pub fn take_rest(&mut self) -> String {
        let is_call = matches!(self.kind(), Kind::Call(_));
        let role = self.role_rules();
        let (section, rules) = match &mut self.channel {
            None => (&mut self.role, role),
            Some(section) => (section, &CHANNEL),
        };
        match scan(section, rules).text {
            Some(at) if self.of_type.is_none() && !is_call => section.split_off(at),
            // Perhaps the beginning of a header, and perhaps all that is said.
            None if !self.has_role && self.channel.is_none() && !is_call => std::mem::take(&mut self.role),
            _ => String::new(),
        }
    }
}

/// In front of a recipient.
const TO: &str = "to=";
/// In front of a function's name.
const FUNCTION: &str = "to=functions.";
/// The type of arguments.
const JSON: &str = "json";

/// What a section may have beside recipients.
struct Rules {
    /// First words that are no text, whatever follows.
    names: &'static [&'static str],
    /// Whether other words may be first.
    is_open: bool,
    /// Whether a type may follow.
    has_type: bool,
}

const ROLE: Rules =
    Rules { names: &["assistant", "user", "system", "developer", "tool"], is_open: true, has_type: false };
const NO_ROLE: Rules = Rules { names: &["assistant"], is_open: false, has_type: false };
const CHANNEL: Rules = Rules { names: &["analysis", "commentary", "final"], is_open: true, has_type: true };
const TYPE: Rules = Rules { names: &[JSON], is_open: true, has_type: false };

/// What is known of a section.
struct CallScan {
    /// Where its text begins, if it has one.
    text: Option<usize>,
    /// Whether no header goes on so.
    is_over: bool,
}

fn scan(section: &str, rules: &Rules) -> CallScan {
    let (mut text, mut is_named, mut is_typed) = (None, false, false);
    for word in section.split_whitespace() {
        let start = word.as_ptr() as usize - section.as_ptr() as usize;
        let over = |at: usize| CallScan { text: Some(text.unwrap_or(at)), is_over: true };
        // Another character may change what the last word is.
        let may_be = |known: &str| start + word.len() == section.len() && known.starts_with(word);
        let wrong = word.find(|c: char| !c.is_ascii_alphanumeric() && !"_-.=".contains(c));
        if word.starts_with(TO) || may_be(TO) {
            let is_function = word.starts_with(FUNCTION);
            match wrong {
                Some(at) if is_function => return over(start + at),
                Some(_) => return over(start),
                // Another recipient is one only in a header that is complete.
                None if !is_function && !may_be(FUNCTION) => text = Some(text.unwrap_or(start)),
                None => {}
            }
            continue;
        }
        if !is_named {
            if let Some(name) = rules.names.iter().find(|name| word.starts_with(**name)) {
                // Text may touch the name.
                if word.len() > name.len() {
                    return over(start + name.len());
                }
                is_named = true;
            } else if !rules.names.iter().any(|name| may_be(name)) {
                if !rules.is_open || wrong.is_some() {
                    return over(start);
                }
                (is_named, text) = (true, Some(start));
            }
            continue;
        }
        if rules.has_type && !is_typed && (word == JSON || may_be(JSON)) {
            is_typed = word == JSON;
            continue;
        }
        match word.strip_prefix(JSON).filter(|_| rules.has_type && !is_typed && wrong == Some(JSON.len())) {
            Some(_) => return over(start + JSON.len()),
            None if !rules.has_type || is_typed || wrong.is_some() => return over(start),
            None => (is_typed, text) = (true, Some(text.unwrap_or(start))),
        }
    }
    match section.len() > LONGEST {
        true => CallScan { text: Some(text.unwrap_or(0)), is_over: true },
        false => CallScan { text, is_over: false },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_begins_where_no_header_goes_on() {
        for (section, rules, text) in [
            ("final", &CHANNEL, None),
            (" commentary to=functions.a_b json", &CHANNEL, None),
            ("final{\"a\"", &CHANNEL, Some("{\"a\"")),
            ("final The answer", &CHANNEL, Some("The answer")),
            ("finally", &CHANNEL, Some("ly")),
            ("commentary to=functions.f{", &CHANNEL, Some("{")),
            ("commentary json{", &CHANNEL, Some("{")),
            ("commentary json {", &CHANNEL, Some("{")),
            ("final Hello,", &CHANNEL, Some("Hello,")),
            ("comment", &CHANNEL, None),
            ("comment!", &CHANNEL, Some("comment!")),
            ("é", &CHANNEL, Some("é")),
            ("json {", &TYPE, Some("{")),
            ("answer", &TYPE, None),
            (" to=functions.f", &NO_ROLE, None),
            ("assistant t", &NO_ROLE, None),
            ("assistant to be", &NO_ROLE, Some("to be")),
            ("to=5% of", &NO_ROLE, Some("to=5% of")),
            ("to=it all", &NO_ROLE, Some("to=it all")),
            ("Ahoy", &NO_ROLE, Some("Ahoy")),
            ("user", &ROLE, None),
            ("assistantAhoy", &ROLE, Some("Ahoy")),
            ("Ahoy there", &ROLE, Some("Ahoy there")),
        ] {
            let found = scan(section, rules);
            let begins = found.text.filter(|_| found.is_over).map(|at| &section[at..]);
            assert_eq!(begins, text, "{section:?}");
        }
        assert!(scan(&"a".repeat(300), &CHANNEL).is_over);
    }
}
