// SPDX-License-Identifier: Apache-2.0

//! Bytes, times, counts and shares as people read them.

use std::fmt::Display;

/// In units of 1,000, three digits.
pub(crate) fn bytes(bytes: u64) -> String {
    scaled(bytes as f64, 1000.0, &["B", "kB", "MB", "GB", "TB", "PB"])
}

/// In units of 1,024, three digits.
pub(crate) fn binary_bytes(bytes: u64) -> String {
    scaled(
        bytes as f64,
        1024.0,
        &["B", "KiB", "MiB", "GiB", "TiB", "PiB"],
    )
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let mut value = value;
    let mut left = units.iter();
    let mut unit = left.next();
    // What would be shown as 1,000 of a unit is 1 of the next.
    while value >= step.min(999.5) {
        let Some(next) = left.next() else { break };
        value /= step;
        unit = Some(next);
    }
    format!("{} {}", digits(value), unit.unwrap_or(&""))
}

/// Three significant digits; whole numbers as such.
pub(crate) fn digits(value: f64) -> String {
    if value > 0.0 && value < 0.095 {
        format!("{value:.2e}")
    } else if value.fract() == 0.0 && value < 1000.0 || value >= 99.95 {
        format!("{value:.0}")
    } else if value >= 9.995 {
        format!("{value:.1}")
    } else {
        format!("{value:.2}")
    }
}

/// With commas between thousands.
pub(crate) fn count(value: impl Display) -> String {
    grouped(&value.to_string())
}

/// So many of a thing: `1 block`, `1,024 blocks`.
pub(crate) fn counted<N: Display + PartialEq + From<u8>>(value: N, thing: &str) -> String {
    let ending = if value == N::from(1) { "" } else { "s" };
    format!("{} {thing}{ending}", count(value))
}

/// With so many decimals, and commas between thousands.
pub(crate) fn decimal(value: f64, decimals: usize) -> String {
    grouped(&format!("{value:.decimals$}"))
}

/// With the decimals that it has, and commas between thousands.
pub(crate) fn exact(value: f64) -> String {
    grouped(&value.to_string())
}

/// Commas between the thousands before the point.
fn grouped(number: &str) -> String {
    let whole = number.split('.').next().unwrap_or(number);
    let digits = whole.bytes().filter(u8::is_ascii_digit).count();
    let mut text = String::new();
    let mut left = digits;
    for (index, letter) in number.char_indices() {
        if index < whole.len() && letter.is_ascii_digit() {
            if left < digits && left.is_multiple_of(3) {
                text.push(',');
            }
            left -= 1;
        }
        text.push(letter);
    }
    text
}

/// Three digits.
pub(crate) fn seconds(seconds: f64) -> String {
    if seconds < 0.000_999_5 {
        format!("{} us", digits(seconds * 1e6))
    } else if seconds < 0.999_5 {
        format!("{} ms", digits(seconds * 1e3))
    } else if seconds < 600.0 {
        format!("{} s", digits(seconds))
    } else if seconds < 36_000.0 {
        format!("{} min", digits(seconds / 60.0))
    } else {
        format!("{:.0} h", seconds / 3600.0)
    }
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_the_right_unit() {
        for (value, decimal, binary) in [
            (0, "0 B", "0 B"),
            (512, "512 B", "512 B"),
            (999, "999 B", "999 B"),
            (1000, "1 kB", "0.98 KiB"),
            (327_680, "328 kB", "320 KiB"),
            (999_999, "1.00 MB", "977 KiB"),
            (10_485_760_000, "10.5 GB", "9.77 GiB"),
            (21_474_836_480, "21.5 GB", "20 GiB"),
        ] {
            assert_eq!((&*bytes(value), &*binary_bytes(value)), (decimal, binary));
        }
    }

    #[test]
    fn times() {
        for (value, text) in [
            (0.0, "0 us"),
            (0.000_043_2, "43.2 us"),
            (0.000_999_9, "1.00 ms"),
            (0.21475, "215 ms"),
            (0.9999, "1.00 s"),
            (3.4359, "3.44 s"),
            (600.0, "10 min"),
            (7.2e6, "2000 h"),
        ] {
            assert_eq!(seconds(value), text);
        }
    }

    #[test]
    fn thousands_have_commas() {
        for (value, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1_234_567, "1,234,567"),
        ] {
            assert_eq!(count(value), text);
        }
    }

    #[test]
    fn one_thing_is_singular() {
        for (value, text) in [(0, "0 blocks"), (1, "1 block"), (1280, "1,280 blocks")] {
            assert_eq!(counted(value, "block"), text);
        }
    }

    #[test]
    fn numbers_with_decimals() {
        for (value, text) in [
            (0.0, "0"),
            (0.0256, "0.0256"),
            (100.0, "100"),
            (10_000.0, "10,000"),
            (1_234_567.25, "1,234,567.25"),
            (-1000.0, "-1,000"),
            (f64::INFINITY, "inf"),
        ] {
            assert_eq!(exact(value), text);
        }
        assert_eq!(decimal(9669.6, 0), "9,670");
        assert_eq!(decimal(12.25, 1), "12.2");
    }
}
