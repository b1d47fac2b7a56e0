//! What a machine draws and costs: energy and money per token, where a description says (LIA's Figure 12 and its analysis of cost).
//!
//! ```text
//! [power]  cpu_idle_w  cpu_busy_w  gpu_idle_w  gpu_busy_w     watts, memory and fans with the side that they serve
//! [price]  machine  years  per_hour  per_kwh  utilisation      what is missing costs nothing; dollars, or whatever they are
//! ```
//! A side draws its idle watts all the time and the rest while it works. A machine that is bought costs its price over its years, and the
//! more for each token the less of that time it works.

use serde::Serialize;
use toml::Table;

use super::Section;
use crate::{Error, Result};

/// Hours in a year.
const HOURS: f64 = 8766.0;

const WATTS: (f64, f64, &str) = (0.0, 1e5, "watts, from 0 to 1e5");
const MONEY: (f64, f64, &str) = (0.0, 1e9, "an amount of money, from 0 to 1e9");
const YEARS: (f64, f64, &str) = (0.01, 100.0, "years, from 0.01 to 100");
const PART: (f64, f64, &str) = (1e-3, 1.0, "a share, from 0.001 to 1");

/// What the sides draw, in watts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Power {
    /// The CPU and its memory at rest.
    pub cpu_idle_w: f64,
    /// The CPU and its memory at work on all cores.
    pub cpu_busy_w: f64,
    /// The GPU at rest; 0 without one.
    pub gpu_idle_w: f64,
    /// The GPU at work.
    pub gpu_busy_w: f64,
}

/// What a machine costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Price {
    /// To buy it.
    pub machine: f64,
    /// The years that this is for.
    pub years: f64,
    /// Its rent, per hour.
    pub per_hour: f64,
    /// Electricity, per kWh.
    pub per_kwh: f64,
    /// The share of its hours in which it works, over which its price or rent is spread.
    pub utilisation: f64,
}

/// What a piece of work took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Energy {
    /// Energy of a generated token.
    pub joules_per_token: f64,
    /// The mean of what the machine drew.
    pub watts: f64,
    /// Money for a million generated tokens; `None` without a price.
    pub cost_per_million_tokens: Option<f64>,
}

impl Power {
    /// Of work that took `seconds`, in which the CPU was busy for the first share of the time and the GPU for the second, and made so many
    /// tokens. `None` without tokens or time, or where shares are unknown.
    pub fn energy(
        &self,
        seconds: f64,
        (cpu, gpu): (f64, f64),
        tokens: f64,
        price: Option<&Price>,
    ) -> Option<Energy> {
        let side = |idle: f64, busy: f64, share: f64| idle + (busy - idle) * share.clamp(0.0, 1.0);
        let watts = side(self.cpu_idle_w, self.cpu_busy_w, cpu) + side(self.gpu_idle_w, self.gpu_busy_w, gpu);
        let joules = watts * seconds;
        let is_known = tokens > 0.0 && seconds > 0.0 && cpu.is_finite() && gpu.is_finite();
        is_known.then(|| Energy {
            joules_per_token: joules / tokens,
            watts,
            cost_per_million_tokens: price.map(|p| {
                let hourly = (p.machine / (p.years * HOURS) + p.per_hour) / p.utilisation;
                (hourly * seconds / 3600.0 + p.per_kwh * joules / 3.6e6) * 1e6 / tokens
            }),
        })
    }
}

/// The sections of a description, if it has them.
pub(super) fn parse(file: &str, root: &Table, has_gpu: bool) -> Result<(Option<Power>, Option<Price>)> {
    let power =
        match Section::of(file, root, "power", &["cpu_idle_w", "cpu_busy_w", "gpu_idle_w", "gpu_busy_w"])? {
            None => None,
            Some(s) => {
                let gpu = |key| if has_gpu { s.number(key, WATTS) } else { Ok(0.0) };
                let power = Power {
                    cpu_idle_w: s.number("cpu_idle_w", WATTS)?,
                    cpu_busy_w: s.number("cpu_busy_w", WATTS)?,
                    gpu_idle_w: gpu("gpu_idle_w")?,
                    gpu_busy_w: gpu("gpu_busy_w")?,
                };
                for (side, idle, busy) in
                    [("cpu", power.cpu_idle_w, power.cpu_busy_w), ("gpu", power.gpu_idle_w, power.gpu_busy_w)]
                {
                    if busy < idle {
                        return Err(Error::format(
                            format!("{file}: power.{side}_busy_w"),
                            format!("{busy}, wanted at least the {idle} of {side}_idle_w"),
                        ));
                    }
                }
                Some(power)
            }
        };
    let keys = ["machine", "years", "per_hour", "per_kwh", "utilisation"];
    let Some(s) = Section::of(file, root, "price", &keys)? else { return Ok((power, None)) };
    let machine = s.optional("machine", MONEY)?;
    let years = match machine {
        Some(_) => s.number("years", YEARS)?,
        None => s.optional("years", YEARS)?.unwrap_or(1.0),
    };
    let price = Price {
        machine: machine.unwrap_or(0.0),
        years,
        per_hour: s.optional("per_hour", MONEY)?.unwrap_or(0.0),
        per_kwh: s.optional("per_kwh", MONEY)?.unwrap_or(0.0),
        utilisation: s.optional("utilisation", PART)?.unwrap_or(1.0),
    };
    Ok((power, Some(price)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const POWER: Power = Power { cpu_idle_w: 100.0, cpu_busy_w: 300.0, gpu_idle_w: 50.0, gpu_busy_w: 250.0 };

    #[test]
    fn energy_is_watts_by_time_and_cost_follows_it() {
        // Half of the time the CPU works, all of it the GPU: 200 + 250 W for 10 s, 90 tokens.
        let price = Price { machine: 8766.0, years: 1.0, per_hour: 2.0, per_kwh: 0.36, utilisation: 0.5 };
        let energy = POWER.energy(10.0, (0.5, 1.0), 90.0, Some(&price)).unwrap();
        assert_eq!((energy.watts, energy.joules_per_token), (450.0, 50.0));
        // (1 + 2) / 0.5 an hour, and 0.36 for each of 3.6e6 J: per token 6 / 3600 · 10 / 90 + 50e-7.
        let want = (6.0 / 3600.0 * 10.0 / 90.0 + 50.0 * 1e-7) * 1e6;
        assert!((energy.cost_per_million_tokens.unwrap() - want).abs() < 1e-9);
        assert_eq!(POWER.energy(10.0, (0.5, 1.0), 90.0, None).unwrap().cost_per_million_tokens, None);
        assert_eq!(POWER.energy(10.0, (f64::NAN, 1.0), 90.0, None), None);
        assert_eq!(POWER.energy(10.0, (0.5, 1.0), 0.0, None), None);
    }

    #[test]
    fn sections_are_checked() {
        let read = |text: &str| parse("box.toml", &text.parse().unwrap(), true);
        let all = "cpu_idle_w = 100\ncpu_busy_w = 300\ngpu_idle_w = 50\ngpu_busy_w = 250\n";
        assert_eq!(read(&format!("[power]\n{all}")).unwrap(), (Some(POWER), None));
        assert_eq!(read("").unwrap(), (None, None));
        for (text, want) in [
            ("[power]\ncpu_idle_w = 1\n".to_owned(), "power.cpu_busy_w: missing, wanted watts"),
            (
                format!("[power]\n{}", all.replace("= 300", "= 30")),
                "power.cpu_busy_w: 30, wanted at least the 100",
            ),
            (format!("[power]\n{all}fans = 3\n"), "power.fans: no such field"),
            ("[price]\nmachine = 1e4\n".into(), "price.years: missing"),
            ("[price]\nper_hour = -1\n".into(), "price.per_hour: -1, wanted an amount of money"),
            ("[price]\nutilisation = 0\n".into(), "price.utilisation: 0, wanted a share"),
        ] {
            let error = read(&text).unwrap_err().to_string();
            assert!(error.contains(want), "{want}: {error}");
        }
        // Without a GPU its watts are not needed.
        let cpu = parse("box.toml", &"[power]\ncpu_idle_w = 1\ncpu_busy_w = 2\n".parse().unwrap(), false);
        assert_eq!(cpu.unwrap().0.unwrap().gpu_busy_w, 0.0);
    }
}
