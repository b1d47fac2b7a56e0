//! `Metaspace`, which is a pre-tokenizer and a decoder.

use serde::Deserialize;
use tokenizers::pre_tokenizers::metaspace::PrependScheme;

/// As the file spells it.
#[derive(Deserialize)]
pub(super) struct SpelledMetaspace {
    pub(super) replacement: char,
    /// Of older files.
    add_prefix_space: Option<bool>,
    prepend_scheme: Option<PrependScheme>,
    pub(super) split: Option<bool>,
}

impl SpelledMetaspace {
    /// # Errors
    /// If the file says two things.
    pub(super) fn scheme(&self) -> Result<PrependScheme, String> {
        match (self.add_prefix_space, self.prepend_scheme) {
            (Some(false), Some(PrependScheme::Never)) => Ok(PrependScheme::Never),
            (Some(false), _) => {
                // The crate takes an absent scheme for `always`, and then refuses.
                Err("add_prefix_space does not match prepend_scheme".into())
            }
            (_, scheme) => Ok(scheme.unwrap_or(PrependScheme::Always)),
        }
    }
}
