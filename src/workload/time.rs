//! Timestamps: seconds, or a date and a time of day, as nanoseconds.

/// Nanoseconds of a second.
pub const SECOND: i64 = 1_000_000_000;

/// Seconds that a numeric timestamp may have: those of Unix time until the year 2096.
const MOST_SECONDS: f64 = 4e9;

/// Reads `12.5` (seconds), `2023-11-16 18:17:03.9799600` or `2024-05-12T00:00:00.003936+02:00`.
///
/// # Errors
/// What is wrong with it.
pub fn parse(text: &str) -> Result<i64, String> {
    if let Ok(seconds) = text.parse::<f64>() {
        return match seconds {
            s if s < 0.0 => Err(format!("{text} is a negative time")),
            s if s <= MOST_SECONDS => Ok((s * SECOND as f64) as i64),
            _ => Err(format!(
                "{text} is no number of seconds, wanted 0 to {MOST_SECONDS:e}; call a column of milliseconds timestamp_ms"
            )),
        };
    }
    let wrong = || {
        let shown: String = text.chars().take(40).collect();
        format!("{shown:?} is no time; wanted seconds, or a date and time like 2023-11-16 18:17:03.98")
    };
    date_and_time(text).ok_or_else(wrong)
}

/// As [`parse`], where numbers are milliseconds.
///
/// # Errors
/// What is wrong with it.
pub fn parse_milliseconds(text: &str) -> Result<i64, String> {
    match text.parse::<f64>() {
        Ok(ms) if ms < 0.0 => Err(format!("{text} is a negative time")),
        Ok(ms) if ms / 1e3 <= MOST_SECONDS => Ok((ms * (SECOND / 1000) as f64) as i64),
        Ok(_) => Err(format!("{text} is no number of milliseconds, wanted 0 to {:e}", MOST_SECONDS * 1e3)),
        Err(_) => parse(text),
    }
}

/// `digits` of the text, as a number in a range.
fn number(text: &str, digits: usize, range: std::ops::RangeInclusive<i64>) -> Option<i64> {
    let plain = text.len() == digits && text.bytes().all(|b| b.is_ascii_digit());
    plain.then(|| text.parse().ok()).flatten().filter(|n| range.contains(n))
}

fn date_and_time(text: &str) -> Option<i64> {
    let (date, rest) = text.split_once([' ', 'T'])?;
    let mut date = date.split('-');
    let year = number(date.next()?, 4, 1970..=2200)?;
    let month = number(date.next()?, 2, 1..=12)?;
    let day = number(date.next()?, 2, 1..=31)?;
    if date.next().is_some() {
        return None;
    }
    // An offset is behind the seconds; the date's dashes are gone.
    let (clock, offset) = match rest.find(['Z', '+', '-']) {
        Some(at) => (&rest[..at], minutes_of(&rest[at..])?),
        None => (rest, 0),
    };
    let mut parts = clock.split(':');
    let hour = number(parts.next()?, 2, 0..=23)?;
    let minute = number(parts.next()?, 2, 0..=59)?;
    let (second, fraction) = match parts.next() {
        None => (0, 0),
        Some(s) => match s.split_once('.') {
            None => (number(s, 2, 0..=60)?, 0),
            Some((s, f)) if (1..=9).contains(&f.len()) => {
                (number(s, 2, 0..=60)?, number(f, f.len(), 0..=i64::MAX)? * 10i64.pow(9 - f.len() as u32))
            }
            Some(_) => return None,
        },
    };
    if parts.next().is_some() {
        return None;
    }
    let days = days_since_1970(year, month, day)?;
    let seconds = days * 86_400 + hour * 3_600 + (minute - offset) * 60 + second;
    Some(seconds * SECOND + fraction)
}

/// `Z`, `+02:00`, `-0530`.
fn minutes_of(offset: &str) -> Option<i64> {
    if offset == "Z" {
        return Some(0);
    }
    let (sign, digits) = (if offset.starts_with('-') { -1 } else { 1 }, offset[1..].replacen(':', "", 1));
    number(&digits, 4, 0..=i64::MAX)?;
    let (hours, minutes) = (number(&digits[..2], 2, 0..=23)?, number(&digits[2..], 2, 0..=59)?);
    Some(sign * (hours * 60 + minutes))
}

/// In the Gregorian calendar; `None` for days that their month does not have.
fn days_since_1970(year: i64, month: i64, day: i64) -> Option<i64> {
    let leap = |y: i64| y % 4 == 0 && (y % 100 != 0 || y % 400 == 0);
    let february = if leap(year) { 29 } else { 28 };
    let lengths = [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    if day > lengths[month as usize - 1] {
        return None;
    }
    let years: i64 = (1970..year).map(|y| if leap(y) { 366 } else { 365 }).sum();
    Some(years + lengths[..month as usize - 1].iter().sum::<i64>() + day - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_and_dates() {
        for (text, want) in [
            ("0", 0),
            ("1.5", 3 * SECOND / 2),
            ("1970-01-01 00:00:01", SECOND),
            ("1970-01-02T00:00", 86_400 * SECOND),
            // date -u -d '2023-11-16 18:17:03' +%s
            ("2023-11-16 18:17:03.9799600", 1_700_158_623 * SECOND + 979_960_000),
            ("2024-03-01 00:00:00Z", 1_709_251_200 * SECOND),
            ("2024-05-12T02:00:00.003936+02:00", 1_715_472_000 * SECOND + 3_936_000),
            ("2024-05-11 19:30:00-0430", 1_715_472_000 * SECOND),
        ] {
            assert_eq!(parse(text), Ok(want), "{text}");
        }
    }

    #[test]
    fn what_is_no_time() {
        for text in [
            "-1",
            "-0.5",
            "inf",
            "nan",
            "1e300",
            "4e12",
            "",
            "soon",
            "2023-11-16",
            "2023-02-29 00:00:00",
            "2023-13-01 00:00:00",
            "2023-11-16 24:00:00",
            "2023-11-16 18:17:03.",
            "2023-11-16 18:17:03.1234567890",
            "2023-11-16 18:17:03+1",
            "2023-11-16 18:17:03+1é:0",
            "9999-01-01 00:00:00",
            "2023-11-16 18:17:03:04",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
        assert!(parse("-1").unwrap_err().contains("negative"));
    }
}
