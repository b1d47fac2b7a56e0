//! Variables for the chat template from the command line and from requests.

use tandem::text::{Json, is_template_variable};

/// Names and values, the later of equal names last.
pub type Variables = Vec<(String, Json)>;

/// Several variables as one argument.
#[derive(Debug, Clone, PartialEq)]
pub struct Object(pub Variables);

/// The template's variables on the command line.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct VariableArgs {
    /// A variable of the chat template, like enable_thinking=false; the value is JSON, or else a text. May be given several
    /// times.
    #[arg(long = "template-arg", value_name = "NAME=VALUE", value_parser = one)]
    pub template_args: Vec<(String, Json)>,
    /// Variables of the chat template as a JSON object.
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub chat_template_kwargs: Option<Object>,
}

impl VariableArgs {
    /// All of them, each once.
    pub fn all(&self) -> Variables {
        let object = self.chat_template_kwargs.iter().flat_map(|object| object.0.clone());
        merge(Vec::new(), object.chain(self.template_args.iter().cloned()))
    }

    /// Whether there is one.
    pub fn is_given(&self) -> bool {
        !self.template_args.is_empty() || self.chat_template_kwargs.is_some()
    }
}

/// `NAME=VALUE`; the value is JSON if it can be, else a text.
pub fn one(text: &str) -> Result<(String, Json), String> {
    let (name, value) = text.split_once('=').ok_or("NAME=VALUE is wanted")?;
    check(name)?;
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
}

/// A JSON object of variables.
pub fn object(text: &str) -> Result<Object, String> {
    let value: Json = serde_json::from_str(text).map_err(|e| format!("not a JSON object: {e}"))?;
    let Json::Object(entries) = value else { return Err("a JSON object is wanted".into()) };
    entries.iter().try_for_each(|(name, _)| check(name))?;
    Ok(Object(entries))
}

/// # Errors
/// If a template's variable of this name is not the user's to set.
pub fn check(name: &str) -> Result<(), String> {
    match name {
        "" => Err("the variable has no name".into()),
        name if !is_template_variable(name) => {
            Err(format!("{name} is no variable of its own: it comes from the request"))
        }
        _ => Ok(()),
    }
}

/// `base`, with `more` in place of equal names.
pub fn merge(mut base: Variables, more: impl IntoIterator<Item = (String, Json)>) -> Variables {
    for (name, value) in more {
        match base.iter_mut().find(|(other, _)| *other == name) {
            Some((_, old)) => *old = value,
            None => base.push((name, value)),
        }
    }
    base
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_json_or_else_a_text() {
        let value = |text: &str| one(text).unwrap().1;
        assert_eq!(value("a=false"), Json::Bool(false));
        assert_eq!(value("a=False"), "False".into());
        assert_eq!(value("a=1.0"), Json::Real(1.0));
        assert_eq!(value("a=low"), "low".into());
        assert_eq!(value("a=\"5\""), "5".into());
        assert_eq!(value("a="), "".into());
        assert_eq!(value("a=x=y"), "x=y".into());
        assert_eq!(value("a=null"), Json::Null);
        for (bad, want) in [("a", "NAME=VALUE"), ("=1", "no name"), ("messages=[]", "comes from the request")]
        {
            assert!(one(bad).unwrap_err().contains(want), "{bad}");
        }
        for (bad, want) in
            [("[]", "a JSON object"), ("{", "not a JSON object"), ("{\"tools\": 1}", "comes from")]
        {
            assert!(object(bad).unwrap_err().contains(want), "{bad}");
        }
        let Object(more) = object(r#"{"b": 1, "a": 2}"#).unwrap();
        let all = merge(vec![one("a=1").unwrap(), one("c=3").unwrap()], more);
        let names: Vec<_> = all.iter().map(|(name, value)| (name.as_str(), value.clone())).collect();
        assert_eq!(names, [("a", Json::Whole(2)), ("c", Json::Whole(3)), ("b", Json::Whole(1))]);
    }
}
