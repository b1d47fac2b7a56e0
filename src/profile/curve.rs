//! Interpolation: seconds by one size (rows, bytes), or by two (rows, tokens that each row sees).

use serde::{Deserialize, Serialize};

/// Beyond this share a fall is not noise.
const NOISE: f64 = 0.25;

/// A function of one size, piecewise linear between measured points. More work does not take less time, so where measurements
/// say so their mean stands for all of them (pool adjacent violators); but a fall by more than a quarter is the kernels':
/// another kernel takes over (four rows of q8_0 can be faster than one). Below the first point it is constant; beyond the last
/// one it goes on with the last slope.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "Vec<(f64, f64)>", into = "Vec<(f64, f64)>")]
pub struct Curve {
    points: Vec<(f64, f64)>,
}

impl From<Vec<(f64, f64)>> for Curve {
    fn from(points: Vec<(f64, f64)>) -> Curve {
        Curve::new(points)
    }
}

impl From<Curve> for Vec<(f64, f64)> {
    fn from(curve: Curve) -> Vec<(f64, f64)> {
        curve.points
    }
}

impl Curve {
    /// Through these (size, seconds), in any order; equal sizes count as one point, their mean. What is not finite is left out.
    pub fn new(mut points: Vec<(f64, f64)>) -> Curve {
        points.retain(|(x, y)| x.is_finite() && y.is_finite());
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        // (sum of values, how many, sizes they stand for)
        let mut pools: Vec<(f64, usize, Vec<f64>)> = Vec::new();
        for (x, y) in points {
            match pools.last_mut() {
                Some((sum, n, sizes)) if sizes.last() == Some(&x) => {
                    (*sum, *n) = (*sum + y.max(0.0), *n + 1);
                }
                _ => pools.push((y.max(0.0), 1, vec![x])),
            }
            while let [.., (s1, n1, _), (s2, n2, _)] = &pools[..]
                && let (mean1, mean2) = (s1 / *n1 as f64, s2 / *n2 as f64)
                && mean1 > mean2
                && mean1 <= mean2 * (1.0 + NOISE)
            {
                let (sum, n, sizes) = pools.pop().expect("two of them");
                let before = pools.last_mut().expect("two of them");
                (before.0, before.1) = (before.0 + sum, before.1 + n);
                before.2.extend(sizes);
            }
        }
        let level = |(sum, n, sizes): (f64, usize, Vec<f64>)| {
            let mean = sum / n as f64;
            sizes.into_iter().map(move |x| (x, mean))
        };
        Curve { points: pools.into_iter().flat_map(level).collect() }
    }

    /// Whether there is no point: then it is zero everywhere.
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// The measured points, cleaned.
    pub fn points(&self) -> &[(f64, f64)] {
        &self.points
    }

    /// Seconds of size `x`.
    pub fn at(&self, x: f64) -> f64 {
        let points = &self.points;
        let Some(&last) = points.last() else { return 0.0 };
        let i = points.partition_point(|p| p.0 <= x);
        match i {
            0 => points[0].1,
            i if i == points.len() => last.1 + (x - last.0).max(0.0) * self.last_slope(),
            i => between(points[i - 1], points[i], x),
        }
    }

    /// From the last point below the end's level to the end: a flat end is noise, not the way things go on.
    fn last_slope(&self) -> f64 {
        let Some(&(x, y)) = self.points.last() else { return 0.0 };
        let below = self.points.iter().rev().find(|p| p.1 < y);
        below.map_or(0.0, |p| (y - p.1) / (x - p.0))
    }

    /// Whether every figure could have been measured.
    pub(in crate::profile) fn is_sound(&self) -> bool {
        self.points.iter().all(|&(x, y)| (0.0..=1e12).contains(&x) && (0.0..=1e6).contains(&y))
    }
}

fn between((x0, y0): (f64, f64), (x1, y1): (f64, f64), x: f64) -> f64 {
    y0 + (y1 - y0) * ((x - x0) / (x1 - x0))
}

/// A function of two sizes: a curve by the second for each of some values of the first, linear between them, going on with
/// the last slope beyond them. A curve that ends before the second size is not asked, unless all do: those that were
/// measured that far know better.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(from = "Vec<(f64, Curve)>", into = "Vec<(f64, Curve)>")]
pub struct Surface {
    lines: Vec<(f64, Curve)>,
}

impl From<Vec<(f64, Curve)>> for Surface {
    fn from(mut lines: Vec<(f64, Curve)>) -> Surface {
        lines.retain(|(a, curve)| a.is_finite() && !curve.is_empty());
        lines.sort_by(|a, b| a.0.total_cmp(&b.0));
        lines.dedup_by(|a, b| a.0 == b.0);
        Surface { lines }
    }
}

impl From<Surface> for Vec<(f64, Curve)> {
    fn from(surface: Surface) -> Vec<(f64, Curve)> {
        surface.lines
    }
}

impl Surface {
    /// Through these (first size, second size, seconds), in any order.
    pub fn new(points: &[(f64, f64, f64)]) -> Surface {
        let mut firsts: Vec<f64> = points.iter().map(|p| p.0).collect();
        firsts.sort_by(f64::total_cmp);
        firsts.dedup();
        let line = |a: f64| {
            let of_a = points.iter().filter(|p| p.0 == a).map(|p| (p.1, p.2));
            (a, Curve::new(of_a.collect()))
        };
        Surface::from(firsts.into_iter().map(line).collect::<Vec<_>>())
    }

    /// Whether there is no point: then it is zero everywhere.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Seconds of sizes `a` and `b`.
    pub fn at(&self, a: f64, b: f64) -> f64 {
        let end = |curve: &Curve| curve.points.last().map_or(0.0, |p| p.0);
        let furthest = self.lines.iter().map(|(_, curve)| end(curve)).fold(0.0, f64::max);
        let known = self.lines.iter().filter(|(_, curve)| end(curve) >= b.min(furthest));
        // `Curve::new` sees to noise in the first size, too.
        Curve::new(known.map(|(first, curve)| (*first, curve.at(b))).collect()).at(a)
    }

    /// Whether every figure could have been measured.
    pub(in crate::profile) fn is_sound(&self) -> bool {
        self.lines.iter().all(|(a, curve)| (0.0..=1e12).contains(a) && curve.is_sound())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(f: impl Fn(f64) -> f64, at: &[f64]) -> Curve {
        Curve::new(at.iter().map(|&x| (x, f(x))).collect())
    }

    #[test]
    fn a_piecewise_linear_function_is_met_everywhere() {
        // The shape of a product: memory until 16 rows, arithmetic beyond.
        let f = |rows: f64| (3.0f64).max(0.2 * rows - 0.2);
        let c = curve(f, &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]);
        for x in [1.0, 3.0, 12.0, 16.0, 24.0, 64.0, 100.0, 4096.0] {
            assert!((c.at(x) - f(x)).abs() < 1e-9, "{x}: {} for {}", c.at(x), f(x));
        }
        assert_eq!((c.at(0.0), c.at(0.5)), (3.0, 3.0), "constant below the first");
        assert_eq!((Curve::default().at(7.0), curve(f, &[4.0]).at(900.0)), (0.0, 3.0));
    }

    #[test]
    fn noise_is_pooled_and_what_is_none_stays() {
        let c =
            Curve::new(vec![(8.0, 5.0), (1.0, 2.0), (2.0, 3.75), (4.0, 3.25), (1.0, 3.0), (16.0, f64::NAN)]);
        assert_eq!(c.points(), [(1.0, 2.5), (2.0, 3.5), (4.0, 3.5), (8.0, 5.0)]);
        let falls = [(1.0, 4.0), (4.0, 3.0), (8.0, 6.0)];
        assert_eq!(Curve::new(falls.into()).points(), falls, "another kernel");
        let mut before = 0.0;
        for x in 0..200 {
            let y = c.at(f64::from(x) / 10.0);
            assert!(y >= before);
            before = y;
        }
        // A flat end does not go on flat: the slope is that of the rise before it.
        let flat = Curve::new(vec![(1.0, 1.0), (2.0, 2.0), (4.0, 4.1), (8.0, 3.9)]);
        assert_eq!(flat.at(14.0), 4.0 + 6.0 * (2.0 / 6.0));
    }

    #[test]
    fn a_surface_is_linear_both_ways_and_beyond() {
        let f = |a: f64, b: f64| 1.0 + 2.0 * a + 3.0 * b;
        let points: Vec<_> =
            [1.0, 4.0, 16.0].iter().flat_map(|&a| [32.0, 64.0].map(|b| (a, b, f(a, b)))).collect();
        let s = Surface::new(&points);
        for (a, b) in [(1.0, 32.0), (2.0, 40.0), (10.0, 100.0), (64.0, 4096.0)] {
            assert!((s.at(a, b) - f(a, b)).abs() < 1e-6, "{a}, {b}: {} for {}", s.at(a, b), f(a, b));
        }
        assert!(Surface::default().is_empty() && Surface::default().at(1.0, 1.0) == 0.0);
        // A line that ends early says nothing of what is beyond its end, and is no dent in the surface.
        let cut: Vec<_> =
            points.iter().copied().chain([(2.0, 32.0, f(2.0, 32.0)), (8.0, 32.0, f(8.0, 32.0))]).collect();
        let cut = Surface::new(&cut);
        for (a, b) in [(2.0, 32.0), (2.0, 40.0), (8.0, 64.0), (6.0, 500.0), (32.0, 64.0)] {
            assert!((cut.at(a, b) - f(a, b)).abs() < 1e-6, "{a}, {b}: {} for {}", cut.at(a, b), f(a, b));
        }
    }

    #[test]
    fn what_is_kept_is_what_was_measured() {
        let s = Surface::new(&[(1.0, 10.0, 1.0), (1.0, 20.0, 2.0), (8.0, 10.0, 8.0)]);
        let text = serde_json::to_string(&s).unwrap();
        assert_eq!(text, "[[1.0,[[10.0,1.0],[20.0,2.0]]],[8.0,[[10.0,8.0]]]]");
        assert_eq!(serde_json::from_str::<Surface>(&text).unwrap(), s);
        assert!(s.is_sound() && !Curve::new(vec![(1.0, 1e9)]).is_sound());
    }
}
