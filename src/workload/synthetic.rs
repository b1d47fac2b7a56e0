//! Made-up workloads: `synthetic:IN,OUT,N,RATE`.
//!
//! IN and OUT are tokens: one number, or a range `A..B` from which each request draws evenly, both ends included. N is the number of
//! requests; RATE is their Poisson rate per second, and 0 means that all are there at the start.

use std::fmt;
use std::str::FromStr;

use super::draw::{Draw, arrive};
use super::{Arrival, MOST_RATE, MOST_REQUESTS, MOST_TOKENS, Shape};

/// How long prompts or answers are: evenly drawn between two numbers, which may be the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Length {
    /// The shortest, at least 1.
    pub least: u32,
    /// The longest.
    pub most: u32,
}

impl Length {
    /// Always the same.
    pub fn fixed(tokens: u32) -> Length {
        Length { least: tokens, most: tokens }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.least == self.most {
            true => write!(f, "{}", self.least),
            false => write!(f, "{}..{}", self.least, self.most),
        }
    }
}

impl FromStr for Length {
    type Err = String;

    fn from_str(text: &str) -> Result<Length, String> {
        let number = |n: &str| {
            let tokens = n.trim().parse::<u32>().ok().filter(|n| (1..=MOST_TOKENS).contains(n));
            tokens.ok_or_else(|| format!("{n:?} tokens; wanted a whole number from 1 to {MOST_TOKENS}"))
        };
        let Some((least, most)) = text.split_once("..") else { return number(text).map(Length::fixed) };
        let (least, most) = (number(least)?, number(most)?);
        if least > most {
            return Err(format!("{text} tokens: the first number is larger than the last"));
        }
        Ok(Length { least, most })
    }
}

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Synthetic {
    /// Tokens of a prompt.
    pub input: Length,
    /// Tokens of an answer.
    pub output: Length,
    /// Requests, at least 1.
    pub requests: usize,
    /// Requests per second; 0: all at the start.
    pub rate: f64,
}

impl fmt::Display for Synthetic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{},{}", self.input, self.output, self.requests, self.rate)
    }
}

impl FromStr for Synthetic {
    type Err = String;

    fn from_str(text: &str) -> Result<Synthetic, String> {
        let parts: Vec<&str> = text.split(',').map(str::trim).collect();
        let [input, output, requests, rate] = parts[..] else {
            return Err(format!(
                "{} values, wanted 4: synthetic:IN,OUT,N,RATE like synthetic:512,128,1000,5",
                parts.len()
            ));
        };
        let count = requests.parse::<usize>().ok().filter(|n| (1..=MOST_REQUESTS).contains(n));
        let rated = rate.parse::<f64>().ok().filter(|r| (0.0..=MOST_RATE).contains(r));
        Ok(Synthetic {
            input: input.parse().map_err(|e| format!("IN: {e}"))?,
            output: output.parse().map_err(|e| format!("OUT: {e}"))?,
            requests: count.ok_or_else(|| {
                format!("N: {requests:?} requests; wanted a whole number from 1 to {MOST_REQUESTS}")
            })?,
            rate: rated.ok_or_else(|| {
                format!("RATE: {rate:?} requests per second; wanted 0 (all at once) to {MOST_RATE:e}")
            })?,
        })
    }
}

impl Synthetic {
    /// The requests: lengths and times are drawn apart, so that another rate has the same lengths.
    pub fn requests(&self, shape: &Shape) -> Vec<Arrival> {
        let n = self.requests.min(shape.limit.unwrap_or(usize::MAX));
        let mut draw = Draw::new(shape.seed);
        let mut times = Draw::new(draw.bits());
        let mut of = |l: Length| draw.between(l.least, l.most);
        let mut requests: Vec<Arrival> =
            (0..n).map(|_| Arrival { at: 0.0, input: of(self.input), output: of(self.output) }).collect();
        arrive(&mut requests, shape.rate.unwrap_or(self.rate), &mut times);
        requests
    }
}
