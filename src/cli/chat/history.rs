//! What has been said.

use std::path::Path;

use serde::{Deserialize, Serialize};
use tandem::text::Message;
use tandem::{Error, Result, atomic_file};

use super::no_conversation;

/// Most bytes of a file with a conversation.
const MOST: u64 = 64 << 20;

/// A message of a file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Said {
    role: String,
    content: String,
}

/// The messages of a conversation: a system text, then the user and the assistant in turns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    system: Option<String>,
    turns: Vec<(String, String)>,
}

impl History {
    /// Begins anew with this system text.
    pub fn set_system(&mut self, text: Option<String>) {
        (self.system, self.turns) = (text, Vec::new());
    }

    /// Begins anew with the same system text.
    pub fn clear(&mut self) {
        self.turns.clear();
    }

    /// The messages for an answer to `text`.
    pub fn with(&self, text: &str) -> Vec<Message> {
        let mut all = self.said();
        all.push(said("user", text));
        all.into_iter().map(|s| Message::new(s.role, s.content)).collect()
    }

    /// A turn is over.
    pub fn push(&mut self, text: &str, answer: String) {
        self.turns.push((text.to_owned(), answer));
    }

    /// Messages so far.
    pub fn len(&self) -> usize {
        2 * self.turns.len() + usize::from(self.system.is_some())
    }

    fn said(&self) -> Vec<Said> {
        let system = self.system.iter().map(|text| said("system", text));
        let turns =
            self.turns.iter().flat_map(|(user, answer)| [said("user", user), said("assistant", answer)]);
        system.chain(turns).collect()
    }

    /// Writes all messages, as an API takes them: completely or not at all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(&self.said()).expect("strings");
        atomic_file::replace(path, |to| writeln!(to, "{text}"))
    }

    /// Reads a conversation.
    ///
    /// # Errors
    /// The file cannot be read, or is none.
    pub fn read(path: &Path) -> Result<History> {
        let size = std::fs::metadata(path).map_err(|e| Error::io(path, e))?;
        if !size.is_file() || size.len() > MOST {
            return Err(no_conversation(path, format!("a file of at most {} MiB is wanted", MOST >> 20)));
        }
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, e))?;
        let all: Vec<Said> = serde_json::from_str(&text).map_err(|e| no_conversation(path, e))?;
        let mut all = all.into_iter().peekable();
        let system = all.next_if(|s| s.role == "system").map(|s| s.content);
        let mut turns = Vec::new();
        while let Some(user) = all.next() {
            match all.next() {
                Some(answer) if user.role == "user" && answer.role == "assistant" => {
                    turns.push((user.content, answer.content));
                }
                _ => {
                    let why = "user and assistant are wanted in turns, behind at most one system message";
                    return Err(no_conversation(path, why));
                }
            }
        }
        Ok(History { system, turns })
    }
}

fn said(role: &str, content: &str) -> Said {
    Said { role: role.into(), content: content.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("talk.json");
        let mut history = History::default();
        history.set_system(Some("be brief".into()));
        history.push("hi", "hello \"you\"\n".into());
        history.write(&path).unwrap();
        assert_eq!(History::read(&path).unwrap(), history);
        assert_eq!((history.len(), history.with("and?").len()), (3, 4));
        for (text, why) in [
            ("[", "EOF"),
            ("{}", "expected a sequence"),
            (r#"[{"role": "user", "content": "a"}]"#, "in turns"),
            (r#"[{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]"#, "in turns"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = History::read(&path).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
