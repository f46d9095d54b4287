//! What a decode worker does about a stale claim.
//!
//! Stale claims do not come alone. One prefix that is evicted makes the claim of every request on its way stale,
//! and a decode worker that restarts those of its whole pool. If each of them asked prefill again, prefill would
//! get its load a second time within a moment, when it is busiest: its queue grows, the leases of the offers that
//! it has made end while their requests wait, more claims become stale before they are confirmed, and the
//! repeats of those come on top. So a repeat is paid from a budget (that of tower's `retry::budget` in kind):
//! claims that hold and time fill it, up to a limit. Where it is empty the decode worker computes for itself,
//! which costs time there and nothing at prefill.
//!
//! While there is budget the faster way by estimate is taken.

use kvdelta_indexer::Millis;
use thiserror::Error;

use crate::rates::{BadRate, MeasuredRate};

#[cfg(test)]
mod tests;

/// Prompt tokens below which a measurement tells how long a step takes and not how many tokens it computes.
const LEAST_TOKENS: u64 = 64;
/// Bytes below which a measurement tells the latency of the link.
const LEAST_BYTES: u64 = 1 << 16;
/// The way back through the router and a step of the prefill worker's scheduler, milliseconds.
const DETOUR_MS: f64 = 20.0;
/// The share of a prompt that prefill is taken to compute again: it has just had all of it, but its cache may have
/// lost some, and others wait.
const PREFILL_SHARE: f64 = 0.1;
/// What a repeat may lack, so that ten tenths are one.
const ROUNDING: f64 = 1e-9;

/// Start values of what is measured, and the retry budget.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecoverySettings {
    /// Prompt tokens that a prefill worker computes in a second; not measured here.
    pub prefill_tokens_per_second: f64,
    /// Prompt tokens that this worker computes in a second, until it is measured.
    pub decode_tokens_per_second: f64,
    /// Bytes that come over the link in a second, until it is measured.
    pub link_bytes_per_second: f64,
    /// Repeats at once; 0: none ever.
    pub budget: u32,
    /// Repeats that each second brings.
    pub budget_per_second: f64,
    /// Repeats that each claim that held brings.
    pub share: f64,
}

impl Default for RecoverySettings {
    fn default() -> Self {
        Self {
            prefill_tokens_per_second: 10_000.0,
            decode_tokens_per_second: 5_000.0,
            link_bytes_per_second: 1.25e9,
            budget: 10,
            budget_per_second: 1.0,
            share: 0.1,
        }
    }
}

/// A setting that is refused.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum BadRecoverySetting {
    /// A start value is no rate.
    #[error("{name}: {source}")]
    Rate {
        /// The setting.
        name: &'static str,
        /// Its value, and what it must be.
        source: BadRate,
    },
    /// What fills the budget is finite and not negative.
    #[error("{name}: {value} fills no budget: it must be finite and not negative")]
    Budget {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

/// A stale claim, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stale {
    /// Tokens of the prompt from this worker's own hit to the end.
    pub missing_tokens: u64,
    /// Tokens of the prompt.
    pub context_tokens: u64,
    /// Bytes that prefill offered.
    pub offered_bytes: u64,
    /// Bytes that it skipped by the claim.
    pub skipped_bytes: u64,
}

/// What is done about a stale claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Compute on the decode worker, from its own hit to the end of the prompt.
    Recompute,
    /// Ask the same prefill worker once more, without a claim.
    AskAgain,
}

impl Choice {
    /// The label of metrics and reports.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Recompute => "recompute",
            Self::AskAgain => "ask_again",
        }
    }
}

/// The choice between the two, on one decode worker.
#[derive(Clone, Debug)]
pub struct Recovery {
    prefill_tokens_per_ms: f64,
    decode: MeasuredRate,
    link: MeasuredRate,
    budget: Budget,
}

impl Recovery {
    /// Starts with a full budget.
    pub fn new(settings: RecoverySettings) -> Result<Self, BadRecoverySetting> {
        let rate = |name, per_second, least| {
            MeasuredRate::new(per_second, least)
                .map_err(|source| BadRecoverySetting::Rate { name, source })
        };
        let RecoverySettings {
            prefill_tokens_per_second,
            decode_tokens_per_second,
            link_bytes_per_second,
            budget,
            budget_per_second,
            share,
        } = settings;
        Ok(Self {
            prefill_tokens_per_ms: rate("prefill_tokens_per_second", prefill_tokens_per_second, 0)?
                .per_ms(),
            decode: rate(
                "decode_tokens_per_second",
                decode_tokens_per_second,
                LEAST_TOKENS,
            )?,
            link: rate("link_bytes_per_second", link_bytes_per_second, LEAST_BYTES)?,
            budget: Budget::new(budget, budget_per_second, share)?,
        })
    }

    /// The faster way by estimate; [`Choice::AskAgain`] takes from the budget, and where that is empty the answer
    /// is [`Choice::Recompute`].
    pub fn choose(&mut self, stale: &Stale, now: Millis) -> Choice {
        if self.recompute_ms(stale) > self.ask_again_ms(stale) && self.budget.take(now) {
            Choice::AskAgain
        } else {
            Choice::Recompute
        }
    }

    /// A claim held.
    pub fn confirmed(&mut self, now: Millis) {
        self.budget.deposit(now);
    }

    /// This worker computed `tokens` of a prompt in `ms` milliseconds.
    pub fn observe_decode_prefill(&mut self, tokens: u64, ms: f64) {
        self.decode.observe(tokens, ms);
    }

    /// `bytes` came over the link in `ms` milliseconds.
    pub fn observe_transfer(&mut self, bytes: u64, ms: f64) {
        self.link.observe(bytes, ms);
    }

    /// How fast this worker computes prompts: tokens.
    pub const fn decode_rate(&self) -> &MeasuredRate {
        &self.decode
    }

    /// How fast the link is: bytes.
    pub const fn link_rate(&self) -> &MeasuredRate {
        &self.link
    }

    fn recompute_ms(&self, stale: &Stale) -> f64 {
        stale.missing_tokens as f64 / self.decode.per_ms()
    }

    fn ask_again_ms(&self, stale: &Stale) -> f64 {
        let prefill = PREFILL_SHARE * stale.context_tokens as f64 / self.prefill_tokens_per_ms;
        let offered = stale.offered_bytes as f64;
        let all = offered + stale.skipped_bytes as f64;
        // What this worker still holds stays here also the second time.
        let missing = stale.missing_tokens as f64 / stale.context_tokens.max(1) as f64;
        let bytes = (all * missing.min(1.0)).max(offered);
        DETOUR_MS + prefill + bytes / self.link.per_ms()
    }
}

/// Repeats that may be asked for.
#[derive(Clone, Debug)]
struct Budget {
    most: f64,
    per_ms: f64,
    share: f64,
    left: f64,
    /// Up to when time has filled it.
    filled: Option<Millis>,
}

impl Budget {
    fn new(most: u32, per_second: f64, share: f64) -> Result<Self, BadRecoverySetting> {
        for (name, value) in [("budget_per_second", per_second), ("share", share)] {
            if !(0.0..=f64::MAX).contains(&value) {
                return Err(BadRecoverySetting::Budget { name, value });
            }
        }
        Ok(Self {
            most: most.into(),
            per_ms: per_second / 1000.0,
            share,
            left: most.into(),
            filled: None,
        })
    }

    fn fill(&mut self, now: Millis) {
        // A clock that goes back gives nothing twice.
        let filled = self.filled.unwrap_or(now).max(now);
        let ms = filled.since(self.filled.unwrap_or(now)).as_secs_f64() * 1000.0;
        self.filled = Some(filled);
        self.add(ms * self.per_ms);
    }

    fn add(&mut self, repeats: f64) {
        self.left = (self.left + repeats).min(self.most);
    }

    fn deposit(&mut self, now: Millis) {
        self.fill(now);
        self.add(self.share);
    }

    fn take(&mut self, now: Millis) -> bool {
        self.fill(now);
        let has = self.left >= 1.0 - ROUNDING;
        if has {
            self.left -= 1.0;
        }
        has
    }
}
