//! Which experts of a divided layer the device has, as the choices of the router suggest: a cache that follows them.
//!
//! ```text
//! c_e   choices of expert e, each counted half as much after HALF_LIFE rows
//! exchange the device's least chosen a for the host's most chosen b, if c_b > c_a + max(pays, NOISE·√(c_a + c_b))     (pays = 0: if c_b > c_a)
//! ```
//! Every expert of the layer is on the host, so nothing waits for an exchange: until it is carried out, the host computes b and the device a. It
//! costs the copy of b and saves, at each later choice of b, what the host takes longer for it: `pays` choices make up for it. Below the
//! noise of counts of that size experts would be exchanged to and fro.
//!
//! Caches that load an expert when it is missed pay only above a share of hits that the link decides; here a miss costs what it costs without.

/// Rows after which a choice counts half.
const HALF_LIFE: f32 = 512.0;

/// Standard deviations of the difference of two counts by which it must be certain.
const NOISE: f32 = 2.0;

/// Rows that what is known beforehand counts as.
const BEFORE: f32 = 64.0;

/// See the [module](self).
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Residents {
    /// The expert in each of the device's places.
    places: Vec<u32>,
    /// For each expert, whether it is in one of them, or on its way to one.
    here: Vec<bool>,
    /// For each place, whether an expert is on its way to it.
    awaited: Vec<bool>,
    /// For each expert, its recent choices.
    recent: Vec<f32>,
    /// Choices of a row.
    used: usize,
    /// Choices that make up for an exchange.
    pays: f32,
}

/// An expert that goes to a place of the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Exchange {
    /// The place.
    pub place: usize,
    /// The expert that is there.
    pub from: u32,
    /// The one that goes there.
    pub to: u32,
    /// Recent choices that it is ahead by.
    pub gain: f32,
}

impl Residents {
    /// With these experts on the device, in this order, of a layer whose experts rows choose with these probabilities, `used` of them each;
    /// `pays` choices make up for an exchange.
    pub fn new(places: &[u32], probabilities: &[f64], used: usize, pays: f64) -> Residents {
        let mut here = vec![false; probabilities.len()];
        places.iter().for_each(|&e| here[e as usize] = true);
        Residents {
            places: places.to_vec(),
            here,
            awaited: vec![false; places.len()],
            recent: probabilities.iter().map(|&p| BEFORE * p as f32).collect(),
            used,
            pays: pays as f32,
        }
    }

    /// Counts how often rows have chosen each expert.
    pub fn count(&mut self, rows: usize, choices: &[u32]) {
        let stays = 0.5f32.powf(rows as f32 / HALF_LIFE);
        for (recent, &n) in self.recent.iter_mut().zip(choices) {
            *recent = *recent * stays + n as f32;
        }
    }

    /// Choices of a row that are expected to be of the device's experts.
    pub fn uses(&self) -> f64 {
        let here: f32 = self.places.iter().map(|&e| self.recent[e as usize]).sum();
        let all: f32 = self.recent.iter().sum();
        if all > 0.0 { self.used as f64 * f64::from(here / all) } else { 0.0 }
    }

    /// The expert in each of the device's places.
    #[cfg(test)]
    pub fn places(&self) -> &[u32] {
        &self.places
    }

    /// The exchange that gains most, if one pays.
    pub fn best(&self) -> Option<Exchange> {
        let count = |e: u32| self.recent[e as usize];
        let coldest = (0..self.places.len())
            .filter(|&place| !self.awaited[place])
            .min_by(|&a, &b| count(self.places[a]).total_cmp(&count(self.places[b])))?;
        let absent = (0..self.here.len() as u32).filter(|&e| !self.here[e as usize]);
        // Of equals the first.
        let hottest = absent.rev().max_by(|&a, &b| count(a).total_cmp(&count(b)))?;
        let from = self.places[coldest];
        let gain = count(hottest) - count(from);
        let noise = NOISE * (count(hottest) + count(from)).sqrt();
        let least = if self.pays > 0.0 { self.pays.max(noise) } else { 0.0 };
        (gain > least).then_some(Exchange { place: coldest, from, to: hottest, gain })
    }

    /// The exchange is under way: until it is carried out, the device has the expert that was there.
    pub fn begin(&mut self, exchange: &Exchange) {
        self.awaited[exchange.place] = true;
        self.here[exchange.to as usize] = true;
    }

    /// The exchange has been carried out.
    pub fn end(&mut self, exchange: &Exchange) {
        self.awaited[exchange.place] = false;
        self.here[exchange.from as usize] = false;
        self.places[exchange.place] = exchange.to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rows that choose `used` different experts, more often those of low rank; `first` is the most chosen one.
    struct Rows {
        state: u64,
        first: usize,
        weights: Vec<f64>,
    }

    impl Rows {
        fn of(experts: usize, exponent: f64, first: usize) -> Rows {
            Rows { state: 5, first, weights: (1..=experts).map(|r| (r as f64).powf(-exponent)).collect() }
        }

        fn row(&mut self, used: usize) -> Vec<u32> {
            let mut chosen = Vec::new();
            while chosen.len() < used {
                self.state = self.state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let mut left =
                    (self.state >> 11) as f64 / (1u64 << 53) as f64 * self.weights.iter().sum::<f64>();
                let at = self.weights.iter().position(|w| {
                    left -= w;
                    left < 0.0
                });
                let e = ((at.unwrap_or(0) + self.first) % self.weights.len()) as u32;
                if !chosen.contains(&e) {
                    chosen.push(e);
                }
            }
            chosen
        }
    }

    /// Runs rows one by one; returns the share of their choices that the device had, and how many experts were exchanged.
    fn run(residents: &mut Residents, rows: &mut Rows, n: usize) -> (f64, usize) {
        let (mut hits, mut exchanged) = (0, 0);
        for _ in 0..n {
            let mut choices = vec![0; residents.recent.len()];
            for e in rows.row(residents.used) {
                hits += usize::from(residents.places.contains(&e));
                choices[e as usize] += 1;
            }
            residents.count(1, &choices);
            if let Some(exchange) = residents.best() {
                residents.begin(&exchange);
                residents.end(&exchange);
                exchanged += 1;
            }
        }
        (hits as f64 / (n * residents.used) as f64, exchanged)
    }

    fn alike(experts: usize, used: usize) -> Vec<f64> {
        vec![used as f64 / experts as f64; experts]
    }

    #[test]
    fn the_device_gets_the_experts_that_are_chosen() {
        let places: Vec<u32> = (0..32).collect();
        let mut residents = Residents::new(&places, &alike(128, 8), 8, 8.0);
        let mut rows = Rows::of(128, 1.0, 90);
        let (before, _) = run(&mut residents, &mut rows, 20);
        run(&mut residents, &mut rows, 1500);
        let (after, _) = run(&mut residents, &mut rows, 1000);
        // The most chosen 32 have 70% of the choices.
        assert!(before < 0.3 && after > 0.62, "{before} {after}");
        // They change with the text.
        let mut rows = Rows::of(128, 1.0, 20);
        run(&mut residents, &mut rows, 2500);
        let (again, _) = run(&mut residents, &mut rows, 1000);
        assert!(again > 0.62, "{again}");
        let expected = residents.uses() / 8.0;
        assert!((expected - again).abs() < 0.05, "{expected} expected, {again}");
    }

    #[test]
    fn experts_that_are_chosen_alike_stay() {
        let places: Vec<u32> = (0..32).collect();
        let mut residents = Residents::new(&places, &alike(128, 8), 8, 8.0);
        let (_, exchanged) = run(&mut residents, &mut Rows::of(128, 0.0, 0), 4000);
        assert!(exchanged < 400, "{exchanged} of 4000 rows: less than a tenth");
    }

    proptest! {
        #[test]
        fn each_expert_has_one_place(seed in any::<u64>(), used in 1usize..5, n in 1usize..12, pays in 0.0f64..20.0) {
            let places: Vec<u32> = (0..n as u32).collect();
            let mut residents = Residents::new(&places, &alike(16, used), used, pays);
            let mut rows = Rows { state: seed, ..Rows::of(16, 1.2, 7) };
            let mut under_way: Vec<Exchange> = Vec::new();
            for step in 0..300 {
                let mut choices = vec![0; 16];
                rows.row(used).into_iter().for_each(|e| choices[e as usize] += 1);
                residents.count(1, &choices);
                if let Some(exchange) = residents.best() {
                    prop_assert!(exchange.gain > pays as f32);
                    prop_assert_eq!(residents.places()[exchange.place], exchange.from);
                    prop_assert!(!residents.places().contains(&exchange.to));
                    prop_assert!(under_way.iter().all(|x| x.place != exchange.place && x.to != exchange.to));
                    residents.begin(&exchange);
                    under_way.push(exchange);
                }
                if step % 3 == 0 && !under_way.is_empty() {
                    residents.end(&under_way.remove(0));
                }
                let mut there = residents.places().to_vec();
                there.sort_unstable();
                there.dedup();
                prop_assert_eq!(there.len(), n);
            }
        }
    }
}
