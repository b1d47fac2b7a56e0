//! The tile shapes that are loaded in this thread.
//!
//! A [`Session`] is the proof, taken by every safe kernel entry, that tiles may be used here, and the
//! owner of the thread's tile configuration: kernels call [`Session::load`] with the shapes they need,
//! which executes LDTILECFG (some 200 cycles, and it clears all tiles) only if other shapes are loaded. The last
//! session of a thread to be dropped executes TILERELEASE, so an idle thread carries no tile state through context
//! switches.
//!
//! A thread does not start empty: Linux copies the creating thread's tile configuration (not the tiles' data) into a
//! new one. The shapes loaded in a thread are therefore unknown until its first LDTILECFG or TILERELEASE.
//!
//! Sessions nest: a worker may hold one around a whole job while kernels within open their own at the
//! cost of a counter.

use std::cell::Cell;
use std::marker::PhantomData;

/// Rows and bytes a row of each of the eight tiles (0, 0: unused).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shapes([(u8, u8); 8]);

impl Shapes {
    /// No tile, the state after TILERELEASE.
    pub const NONE: Shapes = Shapes([(0, 0); 8]);
    /// Eight tiles of 16 rows of 64 bytes: matrix products.
    pub const FULL: Shapes = Shapes([(16, 64); 8]);

    /// Seven such tiles, tmm0-6: hyperthreads share a core's tile registers, and fewer live ones are then faster.
    pub const SEVEN: Shapes = {
        let mut tiles = Shapes::FULL.0;
        tiles[7] = (0, 0);
        Shapes(tiles)
    };

    /// Attention over 1 to 32 query rows. Up to 16 rows: tmm0-3 (accumulators) and tmm4 (A) have that many rows, tmm5-7
    /// (B) are full. Beyond: tmm0-1 and tmm4 have 16 rows, tmm2-3 and tmm5 the remaining ones, tmm6-7 (B) are full. The
    /// tile unit takes a cycle per row of A, so few rows are fast.
    ///
    /// # Panics
    /// `rows` is not in 1..=32.
    pub const fn attention(rows: usize) -> Shapes {
        assert!(rows >= 1 && rows <= 32, "attention takes 1 to 32 query rows");
        let full = (16, 64);
        if rows <= 16 {
            let r = (rows as u8, 64);
            Shapes([r, r, r, r, r, full, full, full])
        } else {
            let r = (rows as u8 - 16, 64);
            Shapes([full, full, r, r, full, r, full, full])
        }
    }

    /// Products of `rows` rows over 32 int8 elements: tmm0-3 (sums) have `rows` rows of 16, tmm4 (A) `rows` rows of 32
    /// bytes, tmm5 (B) 8 rows of 64.
    ///
    /// # Panics
    /// `rows` is not in 1..=16.
    pub const fn int8(rows: usize) -> Shapes {
        assert!(rows >= 1 && rows <= 16, "a tile has 1 to 16 rows");
        let (c, none) = ((rows as u8, 64), (0, 0));
        Shapes([c, c, c, c, (rows as u8, 32), (8, 64), none, none])
    }

    /// Any shapes. LDTILECFG faults (a signal) if they are beyond 16 rows of 64 bytes or half empty.
    pub const fn new(tiles: [(u8, u8); 8]) -> Shapes {
        Shapes(tiles)
    }

    /// The 64 bytes that LDTILECFG reads: palette 1, start row 0, bytes a row (u16) from byte 16, rows
    /// (u8) from byte 48.
    pub const fn encode(&self) -> TileConfig {
        let mut bytes = [0u8; 64];
        bytes[0] = 1;
        let mut t = 0;
        while t < 8 {
            bytes[48 + t] = self.0[t].0;
            bytes[16 + 2 * t] = self.0[t].1;
            t += 1;
        }
        TileConfig(bytes)
    }
}

/// The memory image of a tile configuration, in one cache line.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct TileConfig(pub [u8; 64]);

thread_local! {
    /// `None`: unknown, this thread has executed neither LDTILECFG nor TILERELEASE.
    static LOADED: Cell<Option<Shapes>> = const { Cell::new(None) };
    static OPEN: Cell<usize> = const { Cell::new(0) };
}

/// Permission to use tiles in this thread, while it lives. Not `Send`, because the configuration belongs to the thread.
///
/// ```compile_fail,E0277
/// fn moves_between_threads<T: Send>() {}
/// moves_between_threads::<tandem::amx::Session>();
/// ```
#[derive(Debug)]
pub struct Session {
    _thread_bound: PhantomData<*mut ()>,
}

impl Session {
    /// Opens a session in this thread.
    ///
    /// # Errors
    /// If tiles cannot be used: the reason from [`available`](super::available).
    pub fn open() -> Result<Session, &'static str> {
        super::available()?;
        OPEN.set(OPEN.get() + 1);
        Ok(Session { _thread_bound: PhantomData })
    }

    /// Makes `shapes` the configuration of this thread. Clears all tiles if another one was loaded.
    #[inline]
    pub fn load(&mut self, shapes: &Shapes) {
        if LOADED.get() != Some(*shapes) {
            self.renew(shapes);
        }
    }

    /// [`Session::load`] even if `shapes` are loaded: all tiles become unused until they are written. Tiles that hold
    /// old data count as used where hyperthreads share the core's tile registers.
    pub fn renew(&mut self, shapes: &Shapes) {
        let config = shapes.encode();
        // SAFETY: the session proves that tile instructions execute here; 64 readable bytes. The block
        // is a compiler barrier for memory (no `nomem`), so the configuration is written before it is
        // read. No tile data is live: a kernel ends with the function that began it.
        unsafe {
            std::arch::asm!("ldtilecfg [{c}]", c = in(reg) &raw const config, options(nostack));
        }
        LOADED.set(Some(*shapes));
    }

    /// The shapes that are loaded in this thread; `None` if it may have inherited any.
    pub fn loaded(&self) -> Option<Shapes> {
        LOADED.get()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let open = OPEN.get() - 1;
        OPEN.set(open);
        if open == 0 && LOADED.get() != Some(Shapes::NONE) {
            // SAFETY: this session proved that tile instructions execute here; nothing relies on the tiles.
            unsafe { std::arch::asm!("tilerelease", options(nostack)) };
            LOADED.set(Some(Shapes::NONE));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The configuration in the thread's tile unit.
    fn stored() -> [u8; 64] {
        let mut mem = [0xffu8; 64];
        // SAFETY: called with a session open; 64 writable bytes.
        unsafe { std::arch::asm!("sttilecfg [{m}]", m = in(reg) mem.as_mut_ptr(), options(nostack)) };
        mem
    }

    fn tiles_work() {
        if super::super::available().is_err() {
            super::super::emulate::install().unwrap();
        }
    }

    #[test]
    fn nested_sessions_share_one_configuration_and_the_last_releases_it() {
        tiles_work();
        let mut outer = Session::open().unwrap();
        outer.load(&Shapes::FULL);
        {
            let mut inner = Session::open().unwrap();
            assert_eq!(inner.loaded(), Some(Shapes::FULL));
            inner.load(&Shapes::attention(3));
        }
        assert_eq!(outer.loaded(), Some(Shapes::attention(3)));
        assert_eq!(stored(), Shapes::attention(3).encode().0);
        // Another thread has its own configuration, whatever it starts with.
        std::thread::spawn(|| {
            let mut s = Session::open().unwrap();
            s.load(&Shapes::FULL);
            assert_eq!(stored(), Shapes::FULL.encode().0);
        })
        .join()
        .unwrap();
        assert_eq!(stored(), Shapes::attention(3).encode().0);
        drop(outer);
        assert_eq!(stored(), [0; 64], "the last session releases the tiles");
    }

    /// A thread whose parent has a configuration loaded, which Linux passes on: the first load must not be skipped
    /// although it is equal, and a session that loads nothing still leaves the thread empty.
    #[test]
    fn what_a_new_thread_has_loaded_is_unknown() {
        tiles_work();
        let mut parent = Session::open().unwrap();
        parent.load(&Shapes::FULL);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut s = Session::open().unwrap();
                assert_eq!(s.loaded(), None);
                s.load(&Shapes::FULL);
                assert_eq!((s.loaded(), stored()), (Some(Shapes::FULL), Shapes::FULL.encode().0));
            });
            scope.spawn(|| {
                let s = Session::open().unwrap();
                if super::super::emulate::installed() {
                    assert_ne!(stored(), [0; 64], "the emulation hands a configuration down, too");
                }
                drop(s);
                assert_eq!(stored(), [0; 64], "released without a load");
            });
        });
        assert_eq!(stored(), Shapes::FULL.encode().0);
    }
}
