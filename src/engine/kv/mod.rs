//! Keys and values on two sides: the pages of sequences, and their moves.
//!
//! | pages | of layers | read and written by |
//! |---|---|---|
//! | device | with keys and values on the device | the device |
//! | far | with keys and values on the device: pages that moved away from it, in pinned memory | the host in place, the device's copies |
//! | host | with keys and values on the host | the host |
//!
//! A [`SequenceKv`] holds a sequence's pages of all three, a [`Pager`] decides which pages change sides (HELM §4: the
//! oldest full ones, above a watermark), and [`FarPolicy`] how pages that have left are attended. A [`PrefixIndex`] finds pages that
//! earlier sequences filled with the same tokens. A step's groups see this
//! as their [`Kv`].

mod far;
mod kept;
mod pager;
mod prefix;
mod sequence;
mod swap;

pub(super) use far::FarPolicy;
pub use far::FarSteps;
pub(super) use pager::{Moved, Pager};
pub(super) use prefix::{PageChain, PrefixIndex};
pub(super) use sequence::SequenceKv;

use crate::cache::{KvGeometry, PAGE_TOKENS, PageList};
use crate::program::{Placement, Side};
use crate::{Error, Result};

/// The pages of all sequences: three lists, each with its own page numbers.
pub(super) struct KvPages {
    /// On the device.
    pub device: PageList,
    /// Away from the device.
    pub far: PageList,
    /// Pages of the host's layers.
    pub host: PageList,
}

/// The kinds of pages that a placement has layers for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sides {
    pub device: bool,
    pub host: bool,
}

/// The pages of all sequences, and the policy that moves them.
pub(super) struct KvStore {
    pub pages: KvPages,
    pub sides: Sides,
    /// Moves pages by watermarks; `None` if the caller decides where each sequence lives.
    pub pager: Option<Pager>,
    /// Pages of staging memory that prompts whose keys and values go to the host may use in one step, per layer.
    pub staged: usize,
    /// How tokens away from the device are attended.
    pub far: FarPolicy,
}

impl KvStore {
    /// All pages on one side, where nothing moves.
    ///
    /// # Errors
    /// As [`PageList::new`].
    pub fn all(side: Side, geometry: KvGeometry, pages: usize) -> Result<KvStore> {
        let (device, host) = if side == Side::Device { (pages, 0) } else { (0, pages) };
        Ok(KvStore {
            pages: KvPages::new(geometry, device, 0, host)?,
            sides: Sides { device: side == Side::Device, host: side == Side::Host },
            pager: Some(Pager::new(device, false)),
            staged: 0,
            far: FarPolicy::new(None, None, false),
        })
    }
}

impl Sides {
    /// The sides of a placement's layers.
    pub fn of(placement: &Placement) -> Sides {
        let any = |side| placement.layers.iter().any(|l| l.kv == side);
        Sides { device: any(Side::Device), host: any(Side::Host) }
    }
}

impl KvPages {
    /// Lists of this many pages each; empty where the placement has no layers of that side.
    ///
    /// # Errors
    /// As [`PageList::new`].
    pub fn new(geometry: KvGeometry, device: usize, far: usize, host: usize) -> Result<KvPages> {
        let list = |n| PageList::new(geometry, n);
        Ok(KvPages { device: list(device)?, far: list(far)?, host: list(host)? })
    }

    /// Checks that both sides together have room for `n` more pages of a sequence.
    ///
    /// # Errors
    /// If they have not, with the numbers.
    pub fn suffice(&self, n: usize) -> Result<()> {
        let (device, far) = (&self.device, &self.far);
        if n <= device.n_free() + far.n_free() {
            return Ok(());
        }
        Err(Error::Capacity(format!(
            "KV cache: {n} more pages of {PAGE_TOKENS} tokens wanted, {} of {} free on the device and {} of {} on the host; raise \
             `context` or run fewer sequences",
            device.n_free(),
            device.n_pages(),
            far.n_free(),
            far.n_pages()
        )))
    }

    /// Pages that sequences can still take.
    pub fn n_free(&self) -> usize {
        let there = [&self.host, &self.device].map(|list| (list.n_pages() > 0).then_some(list.n_free()));
        let [host, device] = there;
        let device = device.map(|n| n + self.far.n_free());
        host.into_iter().chain(device).min().unwrap_or_default()
    }

    /// Free pages and all pages of sequences with keys and values on `side`. A layer kept on the host takes a page of
    /// either kind of sequence.
    pub fn of_side(&self, side: Side) -> (usize, usize) {
        let own = match side {
            Side::Device => &self.device,
            Side::Host if self.far.n_pages() > 0 => &self.far,
            Side::Host if self.device.n_pages() > 0 => return (0, 0),
            Side::Host => &self.host,
        };
        match self.host.n_pages() {
            0 => (own.n_free(), own.n_pages()),
            n => (own.n_free().min(self.host.n_free()), own.n_pages().min(n)),
        }
    }

    /// Whether pages can leave the device.
    pub fn pages_move(&self) -> bool {
        self.far.n_pages() > 0
    }
}
