// SPDX-License-Identifier: Apache-2.0

//! What the fleet is made of.

use std::time::Duration;

use kvdelta_transfer::BadRecoverySetting;
use serde::Serialize;
use thiserror::Error;

use crate::trace::Trace;

/// A fleet, and how fast its parts are. Rates may be infinite: then a step takes no time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Settings {
    /// Draws among equal costs, and which events are lost.
    pub(crate) seed: u64,
    /// Prefill workers.
    pub(crate) prefill: usize,
    /// Prompt tokens that each computes in a second.
    pub(crate) prefill_tokens_per_s: f64,
    /// Blocks of each one's prefix cache; 0: it computes every prompt whole.
    pub(crate) prefill_capacity: usize,
    /// Decode workers.
    pub(crate) decode: usize,
    /// Blocks of each one's KV cache.
    pub(crate) capacity: usize,
    /// A decode step: so many milliseconds, and
    pub(crate) itl_ms: f64,
    /// so many more for each block of the requests that run on the worker, those that they share counting for each.
    pub(crate) itl_ms_per_block: f64,
    /// Prompt tokens that a decode worker computes in a second, after a stale claim.
    pub(crate) recompute_tokens_per_s: f64,
    /// What a decode worker's link brings. One transfer after the other.
    pub(crate) link_gbit_per_second: f64,
    /// Bytes of a block.
    pub(crate) block_bytes: u64,
    /// How late the router hears of what a decode worker stores and removes: milliseconds.
    pub(crate) event_delay_ms: f64,
    /// Share of the events of which it never hears.
    pub(crate) event_loss: f64,
}

/// A fleet that a trace cannot go through.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
pub(crate) enum BadSetting {
    #[error("there is no {0} worker")]
    NoWorkers(&'static str),
    #[error(
        "a {pool} worker of {capacity} blocks has no room for the {blocks} blocks of request {number} of the trace"
    )]
    TooSmall {
        pool: &'static str,
        capacity: usize,
        blocks: usize,
        /// Counted from 1.
        number: usize,
    },
    #[error("policy pair takes finite rates of prefill and link: its cost is made of them")]
    InfinitePair,
    #[error(
        "policy {0} has no cost of each worker alone, by which another choice could be followed"
    )]
    CannotFollow(&'static str),
    #[error("the trace has more than {0} requests")]
    TooMany(u32),
    #[error(transparent)]
    Recovery(BadRecoverySetting),
}

impl Settings {
    /// Whether `trace` can go through.
    ///
    /// # Errors
    /// [`BadSetting`].
    pub(crate) fn check(&self, trace: &Trace) -> Result<(), BadSetting> {
        for (pool, workers) in [("prefill", self.prefill), ("decode", self.decode)] {
            if workers == 0 {
                return Err(BadSetting::NoWorkers(pool));
            }
        }
        if u32::try_from(trace.requests().len()).is_err() {
            return Err(BadSetting::TooMany(u32::MAX));
        }
        let pools = [
            ("decode", self.capacity),
            ("prefill", self.prefill_capacity),
        ];
        for (pool, capacity) in pools {
            let is_there = pool == "decode" || capacity > 0;
            if let Some((blocks, place)) = trace.longest()
                && is_there
                && blocks > capacity
            {
                return Err(BadSetting::TooSmall {
                    pool,
                    capacity,
                    blocks,
                    number: place + 1,
                });
            }
        }
        Ok(())
    }

    /// The fleet with one decode worker as large as all of them: what a cache that all share could save.
    pub(crate) fn pooled(mut self) -> Self {
        let workers = self.decode as f64;
        self.capacity = self.capacity.saturating_mul(self.decode);
        self.decode = 1;
        // A step and a transfer take as long as they would on a worker with an equal part of the load.
        self.itl_ms_per_block /= workers;
        self.link_gbit_per_second *= workers;
        self.recompute_tokens_per_s *= workers;
        self
    }

    /// A step of a decode worker with `blocks` blocks of running requests: milliseconds.
    pub(crate) fn step_ms(&self, blocks: usize) -> f64 {
        self.itl_ms + self.itl_ms_per_block * blocks as f64
    }

    /// What a decode worker's link brings in a second.
    pub(crate) fn link_bytes_per_s(&self) -> f64 {
        self.link_gbit_per_second * 1e9 / 8.0
    }

    /// How late events are.
    pub(crate) fn event_delay(&self) -> Duration {
        span(self.event_delay_ms)
    }
}

/// `amount` at `per_s` a second; nothing where that is infinite.
pub(crate) fn taken(amount: f64, per_s: f64) -> Duration {
    Duration::try_from_secs_f64(amount / per_s).unwrap_or(Duration::MAX)
}

/// Milliseconds as a span of time.
pub(crate) fn span(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1000.0).unwrap_or(Duration::MAX)
}

/// A span of time in milliseconds.
pub(crate) fn ms(span: Duration) -> f64 {
    span.as_secs_f64() * 1000.0
}
