//! Changes the structure of JSON, for readers that must survive any: parts replaced, removed, repeated, exchanged and taken from
//! other documents, and values at the limits. Used by tests and by a fuzz target.

use serde_json::{Value, json};

/// Changes `document` in a few places. `draw(n)` chooses below `n`; `donors` are documents to take parts from, and `parts` values
/// that are known to be dangerous.
pub fn mutate(
    document: &mut Value,
    donors: &[Value],
    parts: &[Value],
    draw: &mut impl FnMut(usize) -> usize,
) {
    for _ in 0..=draw(3) {
        let with = match draw(4) {
            0 => limit(draw),
            1 if !parts.is_empty() => parts[draw(parts.len())].clone(),
            2 => place(&mut document.clone(), draw).clone(),
            _ => place(&mut donors[draw(donors.len())].clone(), draw).clone(),
        };
        change(place(document, draw), with, draw);
    }
}

/// Some place in a document.
fn place<'v>(value: &'v mut Value, draw: &mut impl FnMut(usize) -> usize) -> &'v mut Value {
    let inside = match value {
        Value::Object(map) => map.len(),
        Value::Array(list) => list.len(),
        _ => 0,
    };
    if inside == 0 || draw(5) == 0 {
        return value;
    }
    let at = draw(inside);
    let next = match value {
        Value::Object(map) => map.values_mut().nth(at),
        Value::Array(list) => list.get_mut(at),
        _ => None,
    };
    place(next.expect("below its length"), draw)
}

fn change(here: &mut Value, with: Value, draw: &mut impl FnMut(usize) -> usize) {
    match (here, draw(4)) {
        (Value::Object(map), 0) if !map.is_empty() => {
            let key = map.keys().nth(draw(map.len())).expect("below its length").clone();
            map.remove(&key);
        }
        (Value::Object(map), 1) if !map.is_empty() => {
            let key = map.keys().nth(draw(map.len())).expect("below its length").clone();
            map.insert(key, with);
        }
        (Value::Array(list), 0) if !list.is_empty() => {
            list.remove(draw(list.len()));
        }
        (Value::Array(list), 1) if !list.is_empty() => {
            let (from, to) = (draw(list.len()), draw(list.len()));
            list[to] = list[from].clone();
        }
        (Value::Array(list), 2) => {
            let at = draw(list.len() + 1);
            (0..=draw(3)).for_each(|_| list.insert(at, with.clone()));
        }
        (here, _) => *here = with,
    }
}

/// A value at some limit.
fn limit(draw: &mut impl FnMut(usize) -> usize) -> Value {
    let texts =
        ["", " ", "a", "\u{2581}", "\0", "\u{1f600}", "<0x00>", "(a+)+$", "\\", "##", "</w>", "<unk>"];
    match draw(8) {
        0 => Value::Null,
        1 => json!(draw(2) == 0),
        2 => json!([0, 1, -1, i64::MAX, i64::MIN, 1 << 31, i64::from(u32::MAX), 1 << 24][draw(8)]),
        3 => json!([u64::MAX, u64::from(u32::MAX) + 1][draw(2)]),
        4 => json!([0.5, -0.5, 1e300, -1e300, 1e-300, f64::MAX][draw(6)]),
        5 => json!(texts[draw(texts.len())]),
        6 => json!(texts[draw(texts.len())].repeat([2, 64, 5000][draw(3)])),
        _ => [json!([]), json!({})][draw(2)].clone(),
    }
}
