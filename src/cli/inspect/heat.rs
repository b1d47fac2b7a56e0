//! The use of experts as a picture: a cell for each expert of each layer, coloured by how often it was chosen beside equal use.

use anyhow::Result;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, VPos};
use tandem::model::RouterProfile;

use crate::cli::chart::{Frame, at, described, failed, sheet, text};

/// Octaves below and above equal use that colours distinguish.
const OCTAVES: f64 = 3.0;
/// Colours of an octave: fewer than eyes see, so that neighbours of one colour are one shape.
const STEPS: f64 = 4.0;
/// Dark is rare and bright is often, for all eyes and in print (viridis of matplotlib).
const RAMP: [(u8, u8, u8); 5] = [(68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37)];

/// The step of an expert that is chosen `ratio` times as often as if all were used alike.
fn step(ratio: f64) -> i32 {
    (ratio.log2().clamp(-OCTAVES, OCTAVES) * STEPS).round() as i32
}

fn colour(step: i32) -> RGBColor {
    let at = (f64::from(step) / STEPS + OCTAVES) / (2.0 * OCTAVES) * (RAMP.len() - 1) as f64;
    let i = (at as usize).min(RAMP.len() - 2);
    let (a, b, part) = (RAMP[i], RAMP[i + 1], at - i as f64);
    let mix = |a: u8, b: u8| (f64::from(a) + part * (f64::from(b) - f64::from(a))).round() as u8;
    RGBColor(mix(a.0, b.0), mix(a.1, b.1), mix(a.2, b.2))
}

/// The sheet; `source` says what was counted.
pub fn svg(name: &str, source: &str, router: &RouterProfile) -> Result<String> {
    let layers = router.layers.len();
    let experts = (0..layers).map(|l| router.experts(l)).max().unwrap_or(0);
    // Cells of a few pixels, within what a screen shows.
    let height = (layers as u32 * 14).clamp(160, 900) + 210;
    let title = format!("Experts of {name} by use");
    let whole = |v: &f64| if v.fract().abs() < 1e-6 { format!("{v:.0}") } else { String::new() };
    let frame = Frame {
        x: -0.5..experts as f64 - 0.5,
        y: layers as f64 - 0.5..-0.5,
        names: ("expert", "layer"),
        labels: (&whole, &whole),
        ticks: (16, layers.min(16)),
        grid: false,
        margin: (30, 62),
    };
    let drawn = sheet((1240, height), &title, source, |area| {
        let mut chart = frame.begin(area)?;
        chart.draw_series(cells(router)).map_err(failed)?;
        frame.axes(&mut chart)?;
        let (_, bottom) = area.dim_in_pixel();
        let (y, words) = (bottom as i32 - 40, "chosen beside equal use:");
        area.draw(&Text::new(words, (78, y), at(text(13), HPos::Left, VPos::Center))).map_err(failed)?;
        let (steps, width) = ((OCTAVES * STEPS) as i32, 16);
        for step in -steps..=steps {
            let x = 250 + (step + steps) * width;
            area.draw(&Rectangle::new([(x, y - 8), (x + width, y + 8)], colour(step).filled()))
                .map_err(failed)?;
            if step % STEPS as i32 == 0 {
                let octave = step / STEPS as i32;
                let label = match octave {
                    o if o < 0 => format!("1/{}", 1 << -o),
                    o => format!("{}", 1 << o),
                };
                let style = at(text(13), HPos::Center, VPos::Top);
                area.draw(&Text::new(label, (x + width / 2, y + 12), style)).map_err(failed)?;
            }
        }
        Ok(())
    })?;
    let about = format!(
        "Heat map of {layers} layers (down) and {experts} experts (across), {source}: how often each expert was chosen, from 1/8 (dark) \
         to 8 times (bright) as often as if all were used alike."
    );
    Ok(described(&drawn, &title, &about))
}

/// The experts of each layer; neighbours of one colour are one shape.
fn cells(router: &RouterProfile) -> Vec<Rectangle<(f64, f64)>> {
    let mut all = Vec::new();
    for layer in 0..router.layers.len() {
        let count = router.experts(layer);
        let of = |e: usize| step(router.probability(layer, e as u32) * count as f64 / f64::from(router.used));
        let mut from = 0;
        while from < count {
            let here = of(from);
            let to = (from..count).find(|&e| of(e) != here).unwrap_or(count);
            let (top, bottom) = (layer as f64 - 0.5, layer as f64 + 0.5);
            let corners = [(from as f64 - 0.5, top), (to as f64 - 0.5, bottom)];
            all.push(Rectangle::new(corners, colour(here).filled()));
            from = to;
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem::model::RouterCounts;

    #[test]
    fn colours_grow_with_use() {
        assert_eq!([1.0, 2.0, 8.0, 99.0, 0.125, 0.0].map(step), [0, 4, 12, 12, -12, -12]);
        let ends = (colour(-12), colour(0), colour(12));
        assert_eq!(ends, (RGBColor(68, 1, 84), RGBColor(33, 145, 140), RGBColor(253, 231, 37)));
    }

    #[test]
    fn a_picture_has_a_shape_for_each_run_of_equal_use_and_says_what_it_is() {
        let of = |counts: &[u64]| RouterCounts { counts: counts.into(), ..RouterCounts::default() };
        let layers = vec![of(&[100, 100, 100, 100]), of(&[]), of(&[400, 0, 0, 0])];
        let router = RouterProfile { tokens: 400, used: 1, layers };
        assert_eq!(cells(&router).len(), 1 + 2);
        let svg = svg("a<b", "400 tokens", &router).unwrap();
        assert!(svg.starts_with("<svg role=\"img\" "), "{svg}");
        for part in [
            "<title>Experts of a&lt;b by use</title>",
            "<desc>Heat map of 3 layers",
            "\nexpert\n</text>",
            "\nlayer\n</text>",
            "1/8",
        ] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
    }
}
