//! Components that may be one or a `Sequence` of several.

use serde::de::DeserializeOwned;
use serde_json::Value as Json;

/// Most components in a row. Real files have fewer than ten.
const MAX_STAGES: usize = 32;

/// Reads what `json` spells, the members of (nested) sequences in order, and makes a stage of each.
///
/// `name` is where `json` stands in the file, and `list` the key of a sequence's members.
///
/// # Errors
/// Which one is wrong, and why.
pub(super) fn flatten<Spelled: DeserializeOwned, Stage>(
    json: &Json,
    name: &str,
    list: &str,
    mut stage: impl FnMut(Spelled) -> Result<Stage, String>,
) -> Result<Vec<Stage>, String> {
    let mut stages = Vec::new();
    let mut waiting = vec![(name.to_owned(), json)];
    while let Some((name, json)) = waiting.pop() {
        let kind = json["type"].as_str().ok_or_else(|| format!("{name} has no type"))?;
        if kind == "Sequence" {
            let members = json[list].as_array().ok_or_else(|| format!("{name}.{list} is no list"))?;
            if members.len() + waiting.len() + stages.len() > MAX_STAGES {
                return Err(format!("{name}: more than {MAX_STAGES} components in a row"));
            }
            let named = members.iter().enumerate().map(|(i, json)| (format!("{name}.{list}[{i}]"), json));
            waiting.extend(named.rev());
            continue;
        }
        let place = |problem: String| format!("{name} ({kind}): {problem}");
        let spelled = serde_json::from_value(json.clone()).map_err(|e| place(e.to_string()))?;
        stages.push(stage(spelled).map_err(place)?);
    }
    Ok(stages)
}
