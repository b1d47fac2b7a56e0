//! The library's names of settings, as the flags that set them.

/// Names whose flag is another word.
const RENAMED: [(&str, &str); 3] =
    [("context", "--ctx"), ("temperature", "--temp"), ("learns_lengths", "--lengths")];

/// Names whose flag is the same word, with dashes.
const SAME: [&str; 32] = [
    "boundary",
    "chunk",
    "cohorts",
    "deterministic",
    "device",
    "far",
    "fixed_experts",
    "frequency_penalty",
    "gpu_experts",
    "gpu_memory",
    "hardware",
    "host",
    "kv_pages",
    "kv_type",
    "limit",
    "min_p",
    "n_cpu_moe",
    "pinned",
    "policy",
    "port",
    "presence_penalty",
    "rate",
    "raw",
    "repeat_last_n",
    "repeat_penalty",
    "spec",
    "strategy",
    "system",
    "threads",
    "top_k",
    "top_p",
    "weights_node",
];

/// The flag of a setting of the library.
fn flag(name: &str) -> Option<String> {
    let renamed = RENAMED.iter().find(|(setting, _)| *setting == name).map(|(_, flag)| (*flag).to_owned());
    renamed.or_else(|| SAME.contains(&name).then(|| format!("--{}", name.replace('_', "-"))))
}

/// A message of the library with flags in the place of settings in backticks: `` `gpu_memory` `` is `--gpu-memory`.
pub fn in_place_of_settings(message: &str) -> String {
    let mut parts = message.split('`');
    let mut said = parts.next().unwrap_or_default().to_owned();
    // Whether what comes next stands behind an opening backtick.
    let mut open = true;
    while let Some(part) = parts.next() {
        match flag(part).filter(|_| open) {
            Some(flag) => {
                said += &flag;
                said += parts.next().unwrap_or_default();
            }
            None => {
                said.push('`');
                said += part;
                open = !open;
            }
        }
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_become_flags_and_other_words_stay() {
        for (message, want) in [
            ("`gpu_memory` 3: too little; raise `context`", "--gpu-memory 3: too little; raise --ctx"),
            ("`strategy` helm, or `device`", "--strategy helm, or --device"),
            ("no model that `tandem pull` knows, `far`", "no model that `tandem pull` knows, --far"),
            ("`nonsense` and a lone ` in it", "`nonsense` and a lone ` in it"),
            ("without any", "without any"),
            ("`", "`"),
            ("", ""),
        ] {
            assert_eq!(in_place_of_settings(message), want);
        }
    }

    /// Every flag that messages are given exists.
    #[test]
    fn flags_exist() {
        use clap::CommandFactory;
        let command = crate::cli::Cli::command();
        let all: Vec<String> = command
            .get_subcommands()
            .flat_map(|c| c.get_arguments())
            .filter_map(|a| a.get_long().map(|long| format!("--{long}")))
            .collect();
        for name in SAME.iter().copied().chain(RENAMED.map(|r| r.0)) {
            assert!(all.contains(&flag(name).unwrap()), "{name}");
        }
    }
}
