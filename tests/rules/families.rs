//! A model family is one file of `src/model/arch`: nothing else asks which one a model is.

use regex::Regex;
use tandem::model::FAMILIES;

use crate::rooms::{code, files, repository};

#[test]
fn families_are_named_in_their_files_alone() {
    let src = repository().join("src");
    let names: Vec<&str> = FAMILIES.iter().map(|f| f.name).collect();
    let name = Regex::new(&format!(r#""(?:{})""#, names.join("|"))).unwrap();
    let mut wrong = Vec::new();
    let mut seen = 0;
    for path in files(&src) {
        let inside = path.strip_prefix(&src).unwrap().to_str().unwrap();
        // Tokenizers have names of their own, some of them those of the family that first used them.
        if !inside.ends_with(".rs") || inside.ends_with("/tests.rs") || inside.starts_with("text/tokenizer") {
            continue;
        }
        let code = code(&std::fs::read_to_string(&path).unwrap());
        let here = name.find_iter(&code).count();
        if inside.starts_with("model/arch/") {
            seen += here;
        } else if here > 0 {
            wrong.push(inside.to_owned());
        }
    }
    assert!(seen >= names.len(), "{seen} names in the families' own files: is the rule still right?");
    assert!(wrong.is_empty(), "families are named in {wrong:?}");
}
