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
        self.mean = (self.mean * factor.powf(WEIGHT)).clamp(LEAST, MOST);
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
