//! Elements shared by drawings: colours, text, axes. Sheets are white and use the fonts of the reader's system: text is
//! not rendered here.

use std::ops::Range;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// A part of the sheet.
pub type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// A part of the sheet with axes.
pub type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

const FONT: &str = "Helvetica, Arial, sans-serif";

pub const INK: RGBColor = RGBColor(40, 40, 40);
pub const GREY: RGBColor = RGBColor(150, 150, 150);
const GRID: RGBColor = RGBColor(225, 225, 225);

/// Distinct in print and for most eyes (after Okabe and Ito).
pub const PALETTE: [RGBColor; 8] = [
    RGBColor(86, 146, 199),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(120, 120, 120),
    RGBColor(213, 94, 0),
    RGBColor(240, 228, 66),
    RGBColor(90, 60, 140),
];

/// An error of the drawing library.
pub fn failed(e: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing: {e}")
}

/// Text of a size in pixels.
pub fn text(size: u32) -> TextStyle<'static> {
    TextStyle::from((FONT, size)).color(&INK)
}

/// `style` with the given anchor instead of the upper left corner.
pub fn at(style: TextStyle<'static>, h: HPos, v: VPos) -> TextStyle<'static> {
    style.pos(Pos::new(h, v))
}

/// Draws a sheet with its title, and a note at the right.
pub fn sheet(
    size: (u32, u32),
    title: &str,
    right: &str,
    draw: impl FnOnce(&Area<'_>) -> Result<()>,
) -> Result<String> {
    let mut out = String::new();
    {
        let root = SVGBackend::with_string(&mut out, size).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        root.draw(&Text::new(title.to_owned(), (30, 18), text(20))).map_err(failed)?;
        let style = at(text(14).color(&GREY), HPos::Right, VPos::Top);
        root.draw(&Text::new(right.to_owned(), (size.0 as i32 - 30, 22), style)).map_err(failed)?;
        let (_, below) = root.split_vertically(50);
        draw(&below)?;
        root.present().map_err(failed)?;
    }
    Ok(out)
}

/// `svg` with a title and a description for those who do not see it.
pub fn described(svg: &str, title: &str, description: &str) -> String {
    let plain = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let named = format!("<title>{}</title>\n<desc>{}</desc>", plain(title), plain(description));
    match svg.split_once('>') {
        Some((open, rest)) => format!("{}>\n{named}{rest}", open.replacen("<svg ", "<svg role=\"img\" ", 1)),
        None => svg.to_owned(),
    }
}

/// Draws the caption of a panel: `(a)  words`.
pub fn caption(area: &Area<'_>, letter: &str, words: &str) -> Result<()> {
    area.draw(&Text::new(format!("({letter})  {words}"), (30, 6), text(15))).map_err(failed)
}

/// Draws a message in place of a chart.
pub fn nothing(area: &Area<'_>, words: &str) -> Result<()> {
    let label = at(text(15).color(&GREY), HPos::Left, VPos::Top);
    area.draw(&Text::new(words.to_owned(), (70, 60), label)).map_err(failed)
}

/// Axes of a panel, and the pixels around them.
pub struct Frame<'f> {
    pub x: Range<f64>,
    pub y: Range<f64>,
    /// Names of the x and y axes; an axis without a name has no numbers either.
    pub names: (&'f str, &'f str),
    /// The label of a tick; the y axis has its ticks at its grid lines.
    pub labels: (&'f dyn Fn(&f64) -> String, &'f dyn Fn(&f64) -> String),
    /// The limit on the number of ticks.
    pub ticks: (usize, usize),
    /// Whether to draw lines at the ticks of y.
    pub grid: bool,
    /// Pixels to the right of the chart, and below its axis.
    pub margin: (u32, u32),
}

/// Pixels around a chart: left of it and above it.
pub const LEFT: u32 = 12 + 66;
pub const TOP: u32 = 34;
/// Pixels below the chart, without [`Frame::margin`].
pub const BOTTOM: u32 = 42;

impl Frame<'_> {
    /// Creates an empty chart.
    pub fn begin<'a, 'b>(&self, area: &'a Area<'b>) -> Result<Chart<'a, 'b>> {
        let chart = ChartBuilder::on(area)
            .margin(12)
            .margin_top(TOP)
            .margin_right(self.margin.0)
            .margin_bottom(self.margin.1)
            .x_label_area_size(BOTTOM)
            .y_label_area_size(66)
            .build_cartesian_2d(self.x.clone(), self.y.clone());
        chart.map_err(failed)
    }

    /// Draws the axes. Call this before drawing on a grid, and after drawing anything that would hide them.
    pub fn axes(&self, chart: &mut Chart<'_, '_>) -> Result<()> {
        let mut mesh = chart.configure_mesh();
        mesh.disable_x_mesh()
            .light_line_style(WHITE)
            .bold_line_style(GRID)
            .axis_style(INK)
            .label_style(text(13))
            .axis_desc_style(text(14))
            .x_desc(self.names.0)
            .y_desc(self.names.1)
            .x_labels(self.ticks.0)
            .y_labels(self.ticks.1)
            .x_label_formatter(self.labels.0)
            .y_label_formatter(self.labels.1);
        if !self.grid {
            mesh.disable_y_mesh();
        }
        if self.names.0.is_empty() {
            mesh.disable_x_axis();
        }
        mesh.draw().map_err(failed)
    }
}

/// Four to eight round numbers up to `full`.
pub fn ticks(full: f64) -> Vec<f64> {
    let rough = full / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].iter().map(|m| m * power).find(|s| *s >= rough).unwrap_or(power * 10.0);
    // Rounded, so that no label is 0.30000000000000004.
    (0..).map(|i| ((i as f64 * step) * 1e6).round() / 1e6).take_while(|t| *t <= full).collect()
}

/// Formats a number for an axis that ends at `full`, with enough digits to distinguish ten ticks.
pub fn number(value: f64, full: f64) -> String {
    let digits = (1.0 - full.max(1e-9).log10().floor()).clamp(0.0, 9.0) as usize;
    let text = format!("{value:.digits$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// The unit for times up to `full` seconds: its length in seconds, and its name.
pub fn unit_of_time(full: f64) -> (f64, &'static str) {
    match full {
        t if t >= 1.0 => (1.0, "s"),
        t if t >= 1e-3 => (1e-3, "ms"),
        _ => (1e-6, "µs"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_ticks() {
        assert_eq!(ticks(8.8), [0.0, 2.0, 4.0, 6.0, 8.0]);
        assert_eq!(ticks(0.35), [0.0, 0.1, 0.2, 0.3]);
    }

    #[test]
    fn numbers_have_the_digits_that_tell_ticks_apart() {
        let all = |full: f64| [0.0, 0.25, 1.0].map(|f| number(f * full, full));
        assert_eq!(all(0.2), ["0", "0.05", "0.2"]);
        assert_eq!(all(8.0), ["0", "2", "8"]);
        assert_eq!(all(200_000.0), ["0", "50000", "200000"]);
        assert_eq!(
            (unit_of_time(0.02), unit_of_time(3.0), unit_of_time(4e-5)),
            ((1e-3, "ms"), (1.0, "s"), (1e-6, "µs"))
        );
    }
}
