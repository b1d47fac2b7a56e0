//! Commands in documents name models that `tandem pull` knows.

use regex::Regex;

use crate::rooms::{files, repository};

/// Names of models behind `-m` and in variables: what is no file, no `synth:` and no word in capitals.
fn names(text: &str) -> Vec<String> {
    let model =
        Regex::new(r#"(?:[\s"]-m[\s"',]+|\bMODEL=)([a-z0-9][a-z0-9.-]*[a-z0-9])(?:[\s"'`),\\]|$)"#).unwrap();
    // Of other programs, `-m` is a mode or a module.
    let others =
        |name: &str| name.contains('.') || name == "venv" || name.bytes().all(|b| b.is_ascii_digit());
    model.captures_iter(text).map(|found| found[1].to_owned()).filter(|name| !others(name)).collect()
}

#[test]
fn commands_name_models_that_are_known() {
    let root = repository();
    let documents = ["docs", "packaging"].map(|folder| files(&root.join(folder)));
    let all = documents.into_iter().flatten().chain([root.join("README.md"), root.join("CHANGELOG.md")]);
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in all {
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        for name in names(&text) {
            seen += 1;
            if tandem::hub::find(&name).is_none() {
                wrong.push(format!("{}: {name}", path.strip_prefix(root).unwrap().display()));
            }
        }
    }
    assert!(seen > 3, "only {seen} names of models were found");
    assert!(wrong.is_empty(), "not known to `tandem pull`:\n{}", wrong.join("\n"));
}

#[test]
fn names_of_models_are_found() {
    let text = "install -m 755 x; python3 -m venv; serve -m smollm2 --port 1; CMD [\"-m\", \"gemma3-270m\"]; MODEL=tiny\\nARGS; -m synth:tiny -m a.gguf -m MODEL -m x/y";
    assert_eq!(names(text), ["smollm2", "gemma3-270m", "tiny"]);
}
