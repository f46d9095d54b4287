//! Settings that are refused.

use thiserror::Error;

/// A setting that is not a number of its kind.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BadSetting {
    /// Weights are finite and not negative.
    #[error("{0} is no weight: a weight is finite and not negative")]
    Weight(f64),
    /// Rates are finite and positive.
    #[error("{0} is no rate: a rate is finite and above 0")]
    Rate(f64),
    /// Shares are between 0 and 1.
    #[error("{0} is no share: a share is between 0 and 1")]
    Share(f64),
}
