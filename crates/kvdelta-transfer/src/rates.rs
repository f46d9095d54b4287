//! Measured rates: calm enough to choose by.
//!
//! A choice that follows every measurement goes to and fro, and a router whose costs do so moves its
//! requests from worker to worker. So a measurement counts for a part, an outlier for no more than a limit, and
//! the rate that is published follows only when the mean has moved by more than a band.

use thiserror::Error;

/// What one measurement counts against all before it.
const WEIGHT: f64 = 0.25;
/// A measurement counts as no more than this factor away from the mean, up or down.
const OUTLIER: f64 = 8.0;
/// The published rate follows when the mean differs from it by more than this factor.
const BAND: f64 = 1.2;
/// Units a second between which a rate is believed.
const LEAST: f64 = 1e-3;
const MOST: f64 = 1e15;

/// A rate that is refused as a start.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("{0} is no rate: a rate is a number a second from {LEAST} to {MOST}")]
pub struct BadRate(pub f64);

/// Units a second by measurement: tokens or bytes.
///
/// The mean is one of logarithms, in which a factor up weighs as much as the same factor down, and which stays
/// above 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredRate {
    mean: f64,
    published: f64,
    least_amount: u64,
}

impl MeasuredRate {
    /// Starts from `per_second`, and takes no measurement of fewer than `least_amount` units: a short one tells
    /// the latency and not the rate.
    pub fn new(per_second: f64, least_amount: u64) -> Result<Self, BadRate> {
        if !(LEAST..=MOST).contains(&per_second) {
            return Err(BadRate(per_second));
        }
        Ok(Self {
            mean: per_second,
            published: per_second,
            least_amount,
        })
    }

    /// `amount` units took `ms` milliseconds. What gives no believable rate is ignored.
    pub fn observe(&mut self, amount: u64, ms: f64) {
        let measured = amount as f64 / ms * 1000.0;
        // Not a number is in no range; a time below 0 gives a rate below 0.
        if amount < self.least_amount || !(LEAST..=MOST).contains(&measured) {
            return;
        }
        let factor = (measured / self.mean).clamp(OUTLIER.recip(), OUTLIER);
        // Between what it was and what was measured, so within what is believed.
        self.mean *= factor.powf(WEIGHT);
        let moved = self.mean / self.published;
        if !(BAND.recip()..=BAND).contains(&moved) {
            self.published = self.mean;
        }
    }

    /// Units a second; finite and above 0.
    pub const fn per_second(&self) -> f64 {
        self.published
    }

    /// Units a millisecond, as the pair cost of `kvdelta-overlap` takes them; finite and above 0.
    pub fn per_ms(&self) -> f64 {
        self.published / 1000.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_gives_no_rate_is_ignored() {
        let start = MeasuredRate::new(100.0, 10).unwrap();
        for (amount, ms) in [
            (9, 1.0),
            (1000, 0.0),
            (1000, -0.0),
            (1000, -1.0),
            (1000, f64::NAN),
            (1000, f64::INFINITY),
            (1000, f64::MIN_POSITIVE),
            (u64::MAX, 1.0),
            (10, 1e300),
        ] {
            let mut rate = start;
            rate.observe(amount, ms);
            assert_eq!(rate, start, "{amount} in {ms}");
        }
    }

    #[test]
    fn the_published_rate_follows_in_steps() {
        let mut rate = MeasuredRate::new(100.0, 0).unwrap();
        // The fourth root of 1.44 a step: the second one stands on the band and does not pass it.
        for expected in [100.0, 100.0, 100.0 * 1.44_f64.powf(0.578125)] {
            rate.observe(144, 1000.0);
            assert!(
                (rate.per_second() / expected - 1.0).abs() < 1e-9,
                "{rate:?}"
            );
        }
        assert_eq!(rate.per_ms(), rate.per_second() / 1000.0);
    }

    #[test]
    fn one_outlier_counts_for_little() {
        let mut rate = MeasuredRate::new(1e9, 0).unwrap();
        rate.observe(1_000_000, 60_000.0);
        let slower = 1e9 / rate.per_second();
        assert!(
            (slower / OUTLIER.powf(WEIGHT) - 1.0).abs() < 1e-9,
            "{slower}"
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn it_stays_within_what_was_measured(
            start in LEAST..1e9,
            measured in vec((1..1_000_000_000_u64, 1e-3..1e6), 0..60),
        ) {
            let mut rate = MeasuredRate::new(start, 0).unwrap();
            let (mut least, mut most) = (start, start);
            for (amount, ms) in measured {
                let measured = amount as f64 / ms * 1000.0;
                (least, most) = (least.min(measured), most.max(measured));
                let before = rate;
                rate.observe(amount, ms);
                let rounding = 1.0 + 1e-9;
                prop_assert!(rate.per_second() >= least / rounding);
                prop_assert!(rate.per_second() <= most * rounding);
                let step = rate.mean / before.mean;
                let limit = OUTLIER.powf(WEIGHT) * rounding;
                prop_assert!(step <= limit && step >= limit.recip());
                let behind = rate.published / rate.mean;
                prop_assert!(behind <= BAND * rounding && behind >= (BAND * rounding).recip());
            }
        }

        #[test]
        fn what_stays_within_the_band_moves_nothing(
            start in 1.0..1e9,
            measured in vec(0.84..1.19, 0..60),
        ) {
            let mut rate = MeasuredRate::new(start, 0).unwrap();
            for part in measured {
                rate.observe(1_000_000, 1_000_000.0 / (start * part) * 1000.0);
                prop_assert_eq!(rate.per_second(), start);
            }
        }

        #[test]
        fn it_arrives_from_any_start(start in LEAST..MOST, end in 1.0..1e9) {
            let mut rate = MeasuredRate::new(start, 0).unwrap();
            // At the limit of an outlier a step is a factor of 1.68; then the rest falls by a quarter.
            for _ in 0..120 {
                rate.observe(1_000_000, 1_000_000.0 / end * 1000.0);
            }
            let off = rate.per_second() / end;
            prop_assert!(off <= BAND * 1.001 && off >= (BAND * 1.001).recip(), "{off}");
        }
    }
}
