//! The filter `tojson`: Python's `json.dumps` with the arguments that `transformers` gives templates.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Longest result.
const MOST: usize = 16 << 20;

fn problem(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what}"))
}

/// How values are written.
struct Style {
    ensure_ascii: bool,
    /// The text for each level, on a line of its own.
    indent: Option<String>,
    /// Between items, and between key and value.
    separators: (String, String),
    sort_keys: bool,
}

/// `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, in the order in which the
/// arguments may be given without their names.
pub fn tojson(value: Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    if positional.len() > 4 {
        return Err(problem("takes at most 4 arguments"));
    }
    let argument = |place: usize, name: &str| -> Result<Option<Value>, Error> {
        let by_name: Option<Value> = named.get(name)?;
        match (positional.get(place), by_name) {
            (Some(_), Some(_)) => Err(problem(format!("{name} is given twice"))),
            (given, by_name) => Ok(given.cloned().or(by_name).filter(|v| !v.is_none() && !v.is_undefined())),
        }
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|v| v.is_true());
    let indent = match argument(1, "indent")? {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(flag) if flag.kind() == ValueKind::Bool => Some(" ".repeat(usize::from(flag.is_true()))),
        Some(n) if n.is_integer() => {
            let n = i128::try_from(n).unwrap_or(i128::MAX).clamp(0, 1 << 12);
            Some(" ".repeat(n as usize))
        }
        Some(_) => return Err(problem("indent is a number or a text")),
    };
    let separators = match argument(2, "separators")? {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => {
            let texts: Option<Vec<String>> =
                pair.try_iter()?.take(3).map(|v| v.as_str().map(str::to_owned)).collect();
            match texts.as_deref() {
                Some([item, key]) => (item.clone(), key.clone()),
                _ => return Err(problem("separators are two texts")),
            }
        }
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|v| v.is_true());
    named.assert_all_used()?;
    let mut out = String::new();
    write(&mut out, &value, &Style { ensure_ascii, indent, separators, sort_keys }, 0)?;
    Ok(Value::from(out))
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > 200 {
        return Err(problem("nested too deeply"));
    }
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = &style.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    };
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => text(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Map => {
            let mut entries: Vec<(Value, Value)> = Vec::new();
            for key in value.try_iter()? {
                let item = value.get_item(&key)?;
                match entries.iter_mut().find(|(k, _)| is_same_key(k, &key)) {
                    Some((_, old)) => *old = item,
                    None => entries.push((key, item)),
                }
            }
            if style.sort_keys {
                sort(&mut entries)?;
            }
            out.push('{');
            for (i, (key, item)) in entries.iter().enumerate() {
                out.push_str(if i > 0 { &style.separators.0 } else { "" });
                line(out, depth + 1);
                text(out, &key_text(key)?, style.ensure_ascii);
                out.push_str(&style.separators.1);
                write(out, item, style, depth + 1)?;
            }
            if !entries.is_empty() {
                line(out, depth);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut some = false;
            for item in value.try_iter()? {
                out.push_str(if some { &style.separators.0 } else { "" });
                some = true;
                line(out, depth + 1);
                write(out, &item, style, depth + 1)?;
            }
            if some {
                line(out, depth);
            }
            out.push(']');
        }
        other => return Err(problem(format!("{other} values have no JSON"))),
    }
    if out.len() > MOST {
        return Err(problem("the result is too long"));
    }
    Ok(())
}

/// The text of a key: Python writes numbers, booleans and `None` as such texts.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number => number(key),
        other => return Err(problem(format!("{other} values are no keys"))),
    })
}

/// A number or a bool as a number: in Python `True` is 1, as a key, too.
fn real(key: &Value) -> Option<f64> {
    match key.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(key.is_true()))),
        ValueKind::Number => f64::try_from(key.clone()).ok(),
        _ => None,
    }
}

/// Whether two keys that the template engine tells apart are one in Python.
fn is_same_key(a: &Value, b: &Value) -> bool {
    (a.kind() == ValueKind::Bool || b.kind() == ValueKind::Bool) && real(a).is_some() && real(a) == real(b)
}

/// Sorts by keys as Python does: texts among each other, or numbers; a mixture has no order.
fn sort(entries: &mut [(Value, Value)]) -> Result<(), Error> {
    if entries.iter().all(|(key, _)| key.as_str().is_some()) {
        entries.sort_by(|(a, _), (b, _)| a.as_str().cmp(&b.as_str()));
        return Ok(());
    }
    if entries.len() > 1 && entries.iter().any(|(key, _)| real(key).is_none()) {
        return Err(problem("keys of different types have no order"));
    }
    entries.sort_by(|(a, _), (b, _)| real(a).unwrap_or(0.0).total_cmp(&real(b).unwrap_or(0.0)));
    Ok(())
}

/// A text in quotes.
fn text(out: &mut String, text: &str, ensure_ascii: bool) {
    let quoted = serde_json::to_string(text).expect("text is always JSON");
    if !ensure_ascii {
        out.push_str(&quoted);
        return;
    }
    for c in quoted.chars() {
        if matches!(c, ' '..='~') {
            out.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            out.push_str(&format!("\\u{unit:04x}"));
        }
    }
}

/// A number as `json.dumps` writes it.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(x) if x.is_nan() => "NaN".into(),
        Ok(x) if x.is_infinite() => if x > 0.0 { "Infinity" } else { "-Infinity" }.into(),
        Ok(x) => float(x),
        Err(_) => value.to_string(),
    }
}

/// A float as Python's `repr` writes it: the fewest digits that give the same float, with an exponent below 1e-4 and
/// from 1e16 on.
pub fn float(x: f64) -> String {
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf" } else { "-inf" }.into();
    }
    let short = format!("{x:e}");
    let (digits, exponent) = short.split_once('e').expect("an exponent");
    let exponent: i32 = exponent.parse().expect("a number");
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.unsigned_abs());
    }
    // Rust's `{:?}` would change to exponents in the same places; `{}` never does.
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}
