//! `schemathesis` as a client, where it is installed: `pip install schemathesis`. `TANDEM_TEST_PYTHON` names the interpreter.

use std::process::Command;

use super::world::World;

/// What is checked of each answer to requests that the description allows and to others: that none is a failure of the server, and that its
/// status, type, headers and body are those of the description; and that what the description forbids is refused.
/// Not that all it allows is answered: which tokens there are, and which fields fit each other, it cannot say.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance";

/// What its command `st` runs.
const PROGRAM: &str = "from schemathesis.cli import schemathesis; schemathesis()";

#[test]
fn answers_are_as_the_openapi_document_says() {
    let python = std::env::var("TANDEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    match Command::new(&python).args(["-c", PROGRAM, "--version"]).output() {
        Ok(output) if output.status.success() => {}
        Ok(_) => return println!("skipped: SKIPPED: {python} has no package schemathesis"),
        Err(e) => return println!("skipped: SKIPPED: {python}: {e}"),
    }
    let template = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|turn|>";
    let spelling = World { spells: true, template: Some(template), ..World::default() };
    for world in [World::default(), spelling] {
        let served = world.serve();
        // It leaves files where it runs.
        let folder = tempfile::tempdir().unwrap();
        let output = Command::new(&python)
            .current_dir(folder.path())
            .args(["-c", PROGRAM, "run", "--no-color", "-n", "10", "--seed", "1", "-c", CHECKS])
            .args(["--phases", "coverage,fuzzing", "--continue-on-failure"])
            // Of some seeds most names of models that it draws have a slash, and it gives up; that says nothing of the server.
            .arg("--suppress-health-check=filter_too_much")
            .arg(format!("http://{}/openapi.json", served.server.address()))
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{out}{err}");
        println!("{}", out.lines().rev().find(|line| line.contains("generated")).unwrap_or_default());
        served.wait_until_free();
    }
}
