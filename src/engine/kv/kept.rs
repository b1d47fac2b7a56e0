//! The pages of 32 tokens that may serve other sequences.

use crate::cache::PageContent;

/// A page in each list that has one for these tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct KeptPage {
    pub host: Option<PageContent>,
    pub device: Option<PageContent>,
    pub far: Option<PageContent>,
}

impl KeptPage {
    /// In the order of the lists.
    pub fn lists(&mut self) -> [&mut Option<PageContent>; 3] {
        [&mut self.host, &mut self.device, &mut self.far]
    }

    /// Whether no list has one.
    pub fn is_empty(&self) -> bool {
        self.host.is_none() && self.device.is_none() && self.far.is_none()
    }
}
