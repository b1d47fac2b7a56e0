//! The `openai` package for Python as a client, where it is installed: `pip install openai`. `TANDEM_TEST_PYTHON` names the
//! interpreter.

use std::process::Command;

use tandem::serve::{Keys, Options};

use super::world::World;

#[test]
fn the_openai_package_understands_all_answers() {
    let python = std::env::var("TANDEM_TEST_PYTHON").unwrap_or_else(|_| "python3".into());
    let found = Command::new(&python).args(["-c", "import openai; print(openai.__version__)"]).output();
    let version = match found {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        Ok(_) => return println!("skipped: SKIPPED: {python} has no package openai"),
        Err(e) => return println!("skipped: SKIPPED: {python}: {e}"),
    };
    let options =
        Options { keys: Keys::new(["sk-test"]).unwrap(), name: "tiny".into(), ..Options::default() };
    // Models of random weights: tokens without texts, then bytes with a template.
    let template = "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}<|turn|>";
    let plain = World { options: options.clone(), ..World::default() }.serve();
    let context = 4096;
    let spelling =
        World { options, spells: true, template: Some(template), context, chunk: 256, ..World::default() };
    let spelling = spelling.serve();
    for (served, script) in [(plain, "openai_client.py"), (spelling, "openai_forms.py")] {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/serve/");
        let url = format!("http://{}/v1", served.server.address());
        let output = Command::new(&python)
            .arg(format!("{folder}{script}"))
            .args([&url, "sk-test", "synthetic"])
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "openai {version}: {out}{err}");
        println!("openai {version}: {out}");
        served.wait_until_free();
    }
}
