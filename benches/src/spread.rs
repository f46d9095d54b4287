// SPDX-License-Identifier: Apache-2.0

//! Several measurements of the same thing.

use serde::Serialize;

/// The middle of several rounds, and how far they lie apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Half of the rounds are below.
    pub median: f64,
    /// A quarter of the rounds are below.
    pub low: f64,
    /// A quarter of the rounds are above.
    pub high: f64,
}

impl Spread {
    /// Of those `rounds` that are numbers; not numbers if there are none.
    pub fn of(rounds: &[f64]) -> Self {
        let numbers = rounds.iter().copied().filter(|round| !round.is_nan());
        let mut sorted: Vec<f64> = numbers.collect();
        sorted.sort_unstable_by(f64::total_cmp);
        let at = |quarter: usize| {
            let place = sorted.len().saturating_sub(1) * quarter;
            sorted.get((place + 2) / 4).copied().unwrap_or(f64::NAN)
        };
        Self {
            median: at(2),
            low: at(1),
            high: at(3),
        }
    }

    /// Of the ratio of both in each round.
    pub fn of_ratios(ours: &[f64], theirs: &[f64]) -> Self {
        let ratios = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs);
        Self::of(&ratios.collect::<Vec<_>>())
    }
}

/// The value that `percent` of `values`, which get sorted, do not exceed; not a number if there are none.
pub fn percentile(values: &mut [u32], percent: usize) -> f64 {
    values.sort_unstable();
    let place = values.len().saturating_sub(1) * percent / 100;
    values
        .get(place)
        .map_or(f64::NAN, |value| f64::from(*value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_are_rounds() {
        let spread = Spread::of(&[5.0, 1.0, 4.0, 2.0, 3.0]);
        assert_eq!(
            spread,
            Spread {
                median: 3.0,
                low: 2.0,
                high: 4.0
            }
        );
        assert_eq!(Spread::of(&[7.0]).high, 7.0);
        assert!(Spread::of(&[]).median.is_nan());
        assert_eq!(Spread::of(&[f64::NAN, 7.0]).low, 7.0);
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let spread = Spread::of_ratios(&[1.0, 20.0, 3.0], &[2.0, 40.0, 6.0]);
        assert_eq!((spread.low, spread.high), (0.5, 0.5));
    }

    #[test]
    fn a_percentile_is_a_value() {
        let mut values: Vec<u32> = (1..=100).rev().collect();
        assert_eq!(percentile(&mut values, 50), 50.0);
        assert_eq!(percentile(&mut values, 99), 99.0);
        assert!(percentile(&mut [], 99).is_nan());
    }
}
