//! What a user says to the program and not to the model.

use std::path::PathBuf;

/// Printed by `/help`.
pub const HELP: &str = "\
/system [TEXT]    tell the model TEXT before the conversation, which begins anew; without TEXT, nothing
/clear            begin anew, with the same system text
/save FILE        write the conversation as JSON
/load FILE        go on with a conversation that /save has written
/set NAME VALUE   temp, top_k, top_p, min_p, repeat_penalty, seed, max_tokens
/stats            tokens, speed, and what did not have to be computed again
/bye              leave, as Ctrl-D does
\"\"\"               begins and ends a text of several lines
Ctrl-C            stops an answer
";

/// A command.
#[derive(Debug, PartialEq)]
pub enum Command {
    Help,
    System(Option<String>),
    Clear,
    Save(PathBuf),
    Load(PathBuf),
    Set(String, String),
    Stats,
    Bye,
}

impl Command {
    /// The command that `line` is; `None` if it is for the model.
    ///
    /// # Errors
    /// What is wrong with it, in a sentence.
    pub fn parse(line: &str) -> Result<Option<Command>, String> {
        let Some(line) = line.trim().strip_prefix('/') else { return Ok(None) };
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let wanted = |what: &str| match rest {
            "" => Err(format!("/{name}: {what} is wanted")),
            text => Ok(text.to_owned()),
        };
        let alone = |command: Command| match rest {
            "" => Ok(command),
            _ => Err(format!("/{name}: takes nothing more, and there is '{rest}'")),
        };
        let command = match name {
            "help" | "?" => alone(Command::Help)?,
            "system" => Command::System((!rest.is_empty()).then(|| rest.to_owned())),
            "clear" => alone(Command::Clear)?,
            "save" => Command::Save(wanted("a file")?.into()),
            "load" => Command::Load(wanted("a file")?.into()),
            "set" => {
                let both = wanted("a name and a value, like temp 0.7,")?;
                let (setting, value) = both
                    .split_once(char::is_whitespace)
                    .ok_or_else(|| format!("/set {both}: a value is wanted"))?;
                Command::Set(setting.to_owned(), value.trim().to_owned())
            }
            "stats" => alone(Command::Stats)?,
            "bye" | "exit" | "quit" => alone(Command::Bye)?,
            _ => return Err(format!("/{name}: no such command; /help lists them")),
        };
        Ok(Some(command))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands() {
        assert_eq!(Command::parse("what is 1/2?"), Ok(None));
        assert_eq!(Command::parse(" /system be brief "), Ok(Some(Command::System(Some("be brief".into())))));
        assert_eq!(Command::parse("/system"), Ok(Some(Command::System(None))));
        assert_eq!(Command::parse("/save a b.json"), Ok(Some(Command::Save("a b.json".into()))));
        assert_eq!(Command::parse("/set temp  0.7"), Ok(Some(Command::Set("temp".into(), "0.7".into()))));
        assert_eq!(Command::parse("/quit"), Ok(Some(Command::Bye)));
        for (line, why) in [
            ("/save", "a file is wanted"),
            ("/set temp", "a value is wanted"),
            ("/set", "a name and a value"),
            ("/clear all", "takes nothing more"),
            ("/frobnicate", "no such command"),
        ] {
            let error = Command::parse(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }
}
