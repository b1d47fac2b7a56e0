//! Which machine and device a measurement is of.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::device::DeviceInfo;
use crate::model::{ModelSpec, Weights};
use crate::simd::Isa;

/// Layout of the profile's file: raised whenever a field changes its meaning.
pub const SCHEMA: u32 = 4;

/// What has to be the same for a measurement to hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// [`SCHEMA`].
    pub schema: u32,
    /// Version of Tandem.
    pub version: String,
    /// The CPU, as it names itself.
    pub cpu: String,
    /// Threads that the engine takes: allowed cores, within the control group's quota.
    pub threads: u32,
    /// The tier of the CPU's kernels.
    pub isa: String,
    /// The device, if one was measured.
    pub device: Option<DeviceIdentity>,
    /// The model, if its operations were timed.
    pub model: Option<ModelIdentity>,
}

/// Which model: what the times of its operations depend on, the values of its weights aside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelIdentity {
    /// Its own name, or that of its file.
    pub name: String,
    /// Bytes of its weights.
    pub bytes: u64,
    /// A hash over its sizes and over the name, type and shape of each tensor: 16 hexadecimal digits.
    pub hash: String,
}

impl ModelIdentity {
    /// The identity of a loaded model; `source` names it if it has no name of its own.
    pub fn of(spec: &ModelSpec, weights: &Weights, source: &str) -> ModelIdentity {
        let mut tensors: Vec<String> =
            weights.iter().map(|(name, t)| format!("{name} {} {:?}", t.dtype, t.shape)).collect();
        tensors.sort_unstable();
        let name = if spec.name.is_empty() { source } else { &spec.name };
        let hash = digits(&format!("{spec:?}\n{}", tensors.join("\n")));
        ModelIdentity { name: name.to_owned(), bytes: weights.bytes(), hash }
    }
}

/// 16 hexadecimal digits of a hash.
pub(super) fn digits(text: &str) -> String {
    Sha256::digest(text).iter().take(8).map(|b| format!("{b:02x}")).collect()
}

/// Which device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceIdentity {
    /// As its driver names it.
    pub name: String,
    /// Its driver's version; 0 if it has none.
    pub driver: u32,
    /// Compute capability.
    pub sm: u32,
}

impl From<&DeviceInfo> for DeviceIdentity {
    fn from(info: &DeviceInfo) -> DeviceIdentity {
        DeviceIdentity { name: info.name.clone(), driver: info.driver, sm: info.sm }
    }
}

impl Identity {
    /// The identity of this machine and version, with `device` or without one.
    pub fn of_machine(device: Option<&DeviceInfo>) -> Identity {
        Identity {
            schema: SCHEMA,
            version: env!("CARGO_PKG_VERSION").into(),
            cpu: cpu_model(),
            threads: match device {
                Some(_) => crate::host::cores_beside_device() as u32,
                None => crate::host::allowed_cores() as u32,
            },
            isa: Isa::selected().unwrap_or(Isa::Reference).name().into(),
            device: device.map(DeviceIdentity::from),
            model: None,
        }
    }

    /// The same machine with a model.
    pub fn with_model(self, model: ModelIdentity) -> Identity {
        Identity { model: Some(model), ..self }
    }

    /// What is not as in `wanted`, in words: `None` if all is.
    pub fn difference(&self, wanted: &Identity) -> Option<String> {
        let name = |d: &Option<DeviceIdentity>| match d {
            None => "no device".to_owned(),
            Some(d) => format!("{} (driver {}, sm_{})", d.name, d.driver, d.sm),
        };
        let model = |m: &Option<ModelIdentity>| match m {
            None => "none".to_owned(),
            Some(m) => format!("{} ({} bytes, {})", m.name, m.bytes, m.hash),
        };
        let all = [
            ("schema", self.schema.to_string(), wanted.schema.to_string()),
            ("Tandem", self.version.clone(), wanted.version.clone()),
            ("the CPU", self.cpu.clone(), wanted.cpu.clone()),
            ("threads", self.threads.to_string(), wanted.threads.to_string()),
            ("the kernels' tier", self.isa.clone(), wanted.isa.clone()),
            ("the device", name(&self.device), name(&wanted.device)),
            ("the model", model(&self.model), model(&wanted.model)),
        ];
        let parts: Vec<String> = all
            .into_iter()
            .filter(|(_, found, want)| found != want)
            .map(|(what, found, want)| format!("{what} is {found} there and {want} here"))
            .collect();
        (!parts.is_empty()).then(|| parts.join("; "))
    }

    /// A name for its file: 16 hexadecimal digits of a hash over all of it.
    pub fn key(&self) -> String {
        digits(&serde_json::to_string(self).expect("strings and numbers"))
    }
}

/// `Intel(R) Xeon(R) Processor`, with family, model and stepping, since virtual machines give vague names.
pub(super) fn cpu_model() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    describe_cpu(&info)
}

fn describe_cpu(info: &str) -> String {
    let field = |name: &str| {
        let of = |l: &str| {
            let (key, value) = l.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        };
        info.lines().find_map(of)
    };
    let name = field("model name").unwrap_or_else(|| std::env::consts::ARCH.into());
    let numbers = ["cpu family", "model", "stepping"].map(field);
    match numbers {
        [Some(family), Some(model), Some(stepping)] => {
            format!("{name} (family {family}, model {model}, stepping {stepping})")
        }
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_is_named() {
        let here = Identity::of_machine(None);
        assert_eq!(here.difference(&here), None);
        let device = DeviceIdentity { name: "Tesla T4".into(), driver: 13000, sm: 75 };
        let there = Identity {
            version: "0.0.1".into(),
            cpu: "i486".into(),
            threads: here.threads + 1,
            device: Some(device),
            ..here.clone()
        };
        let said = there.difference(&here).unwrap();
        for part in [
            "Tandem is 0.0.1 there",
            "the CPU is i486 there",
            "threads is",
            "Tesla T4 (driver 13000, sm_75)",
            "no device here",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("schema"));
        assert_ne!(there.key(), here.key());
        assert_eq!((here.key().len(), here.key()), (16, here.clone().key()));
    }

    /// A description of a model names the same model as the model itself; other types are another model.
    #[test]
    fn a_model_is_known_without_its_weights() {
        use crate::model::{load, synth};
        let of = |name: &str| {
            let m = synth::outline(name).unwrap();
            ModelIdentity::of(&m.spec, &m.weights, &m.source)
        };
        for name in ["tiny-llama", "tiny-gemma3,dtype=q4_k", "tiny-opt,dtype=f16"] {
            let m = load(&format!("synth:{name}")).unwrap();
            assert_eq!(of(name), ModelIdentity::of(&m.spec, &m.weights, &m.source), "{name}");
        }
        assert_ne!(of("tiny-llama").hash, of("tiny-llama,dtype=q8_0").hash);
        assert_ne!(of("tiny-llama").hash, of("tiny-llama,layers=1").hash);
        let machine = Identity::of_machine(None);
        let said = machine.clone().with_model(of("tiny-llama")).difference(&machine).unwrap();
        assert!(said.starts_with("the model is tiny-llama (") && said.ends_with("none here"), "{said}");
    }

    #[test]
    fn a_cpu_has_its_numbers_beside_its_name() {
        let info = "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 207\nmodel name\t: Intel(R) Xeon(R) Processor\nstepping\t: 2\n";
        assert_eq!(describe_cpu(info), "Intel(R) Xeon(R) Processor (family 6, model 207, stepping 2)");
        assert_eq!(describe_cpu(""), std::env::consts::ARCH);
    }
}
