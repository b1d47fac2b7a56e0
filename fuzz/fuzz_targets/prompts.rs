//! Text as a file of prompts: of each line that is not blank a request, or why it is none.
#![no_main]

use libfuzzer_sys::fuzz_target;

#[path = "../../src/cli/generate/fields.rs"]
mod fields;
#[path = "../../src/cli/generate/lines.rs"]
mod lines;
#[path = "../../src/cli/generate/neutral.rs"]
mod neutral;

/// What the parser knows of the command line.
mod cli {
    pub mod sampling {
        /// The options that a line may set.
        #[derive(Debug, Clone, Default)]
        pub struct SamplingArgs {
            pub temp: Option<f32>,
            pub top_k: Option<u32>,
            pub top_p: Option<f32>,
            pub min_p: Option<f32>,
            pub repeat_penalty: Option<f32>,
            pub repeat_last_n: Option<usize>,
            pub presence_penalty: Option<f32>,
            pub frequency_penalty: Option<f32>,
            pub seed: Option<u64>,
        }

        /// Any seed does here.
        pub fn random_seed() -> u64 {
            1
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let all = lines::parse(text, &cli::sampling::SamplingArgs::default());
    let wanted =
        text.strip_prefix('\u{feff}').unwrap_or(text).lines().filter(|l| !l.trim().is_empty()).count();
    assert_eq!(all.len(), wanted);
    let mut last = 0;
    for line in all {
        let number = match line {
            Err(bad) => {
                assert!(!bad.why.is_empty());
                bad.number
            }
            Ok(line) => {
                match &line.ask {
                    lines::LineInput::Text(text) => assert!(!text.is_empty()),
                    lines::LineInput::Tokens(ids) => assert!(!ids.is_empty()),
                    lines::LineInput::Messages(messages) => assert!(!messages.is_empty()),
                }
                let own = line.sampling;
                for number in [own.temp, own.top_p, own.min_p, own.repeat_penalty].into_iter().flatten() {
                    assert!((0.0..=100.0).contains(&number), "{number}");
                }
                for number in [own.presence_penalty, own.frequency_penalty].into_iter().flatten() {
                    assert!((-2.0..=2.0).contains(&number), "{number}");
                }
                if let (Some(least), Some(most)) = (line.limits.min_tokens, line.max_tokens) {
                    assert!(least <= most);
                }
                assert!(line.stop.iter().flatten().all(|s| !s.is_empty()));
                line.number
            }
        };
        assert!(number > last, "line {number} comes behind {last}");
        last = number;
    }
});
