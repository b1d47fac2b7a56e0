//! Random numbers that a seed fixes, and Poisson arrivals.

use super::Arrival;

/// SplitMix64 (Steele, Lea & Flood 2014): the same seed draws the same workload on any machine.
#[derive(Debug, Clone)]
pub struct Draw(u64);

impl Draw {
    /// From a seed.
    pub fn new(seed: u64) -> Draw {
        Draw(seed)
    }

    /// Any 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From 0, without 1.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// From `least` to `most`, both included.
    pub fn between(&mut self, least: u32, most: u32) -> u32 {
        least + (self.unit() * (f64::from(most - least) + 1.0)) as u32
    }

    /// Exponentially distributed with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
}

/// Gives requests the times of a Poisson process of `rate` a second; 0: all at the start.
pub fn arrive(requests: &mut [Arrival], rate: f64, draw: &mut Draw) {
    let mut now = 0.0;
    for request in requests {
        if rate > 0.0 {
            now += draw.exponential(1.0 / rate);
        }
        request.at = now;
    }
}
