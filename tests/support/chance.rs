//! Cases by chance, the same on every machine.

/// Numbers by chance (SplitMix64).
pub struct Chance(pub u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One of them.
    pub fn of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.next() as usize % all.len()]
    }

    /// Between two numbers, each power of two as likely as another.
    pub fn between(&mut self, from: f64, to: f64) -> f64 {
        let share = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        from * (to / from).powf(share)
    }
}
