//! Time as a value, so that no rule of trust needs a clock of its own.

use std::time::Duration;

/// A point in time: milliseconds since the Unix epoch by the caller's clock, which must not go back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Millis(pub u64);

impl Millis {
    /// How long ago `earlier` was; zero if it is in the future.
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }

    /// `time` later.
    pub fn plus(self, time: Duration) -> Self {
        let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(time))
    }
}
