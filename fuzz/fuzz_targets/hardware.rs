//! Text as a description of a machine: one error, or a machine whose figures are numbers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tandem::plan::hardware;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(machine) = hardware::parse("fuzz.toml", text) else { return };
    assert!((1..=4096).contains(&machine.cpu.cores), "{machine:?}");
    // NaN and infinity are null in JSON.
    let written = serde_json::to_value(&machine).expect("it can be written");
    each(&written, &mut |figure| {
        assert!(figure.as_f64().is_none_or(|x| x >= 0.0) && !figure.is_null(), "{machine:?}");
    });
});

fn each(value: &serde_json::Value, see: &mut dyn FnMut(&serde_json::Value)) {
    match value {
        serde_json::Value::Object(fields) => fields.values().for_each(|v| each(v, see)),
        serde_json::Value::Array(list) => list.iter().for_each(|v| each(v, see)),
        leaf => see(leaf),
    }
}
