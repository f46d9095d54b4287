// SPDX-License-Identifier: Apache-2.0

//! One decode worker: who waits, who comes over the link, who runs.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;

use kvdelta_transfer::Recovery;

use super::cache::Cache;
use super::settings::{Settings, ms, span};

/// A decode worker.
#[derive(Debug)]
pub(crate) struct DecodeWorker {
    pub(crate) cache: Cache,
    /// Requests that are here and have no room yet, in the order in which they came.
    pub(crate) waiting: VecDeque<u32>,
    /// When the last transfer on its link ends.
    pub(crate) link_free_at: Duration,
    /// What it does about stale claims.
    pub(crate) recovery: Recovery,
    pub(crate) running: Running,
}

/// The requests that a worker decodes, all at the same speed: each step makes one token for each of them.
#[derive(Debug, Default)]
pub(crate) struct Running {
    /// Steps that it has made by `at`, and parts of one.
    steps: f64,
    at: Duration,
    /// Blocks of the running requests.
    blocks: usize,
    /// The step after which each ends, as bits of a number that is not negative, which have its order.
    ends: BinaryHeap<Reverse<(u64, u32)>>,
    /// Tells a time that was said from one that holds no longer.
    pub(crate) said: u32,
}

impl Running {
    /// A request with `blocks` blocks begins, and ends after `tokens` steps. How long the first one takes: ms.
    pub(crate) fn begin(
        &mut self,
        settings: &Settings,
        now: Duration,
        request: u32,
        (blocks, tokens): (usize, u32),
    ) -> f64 {
        self.advance(settings, now);
        self.blocks += blocks;
        let end = self.steps + f64::from(tokens);
        self.ends.push(Reverse((end.to_bits(), request)));
        settings.step_ms(self.blocks)
    }

    /// When the next request ends. Each call makes the time that was said before void.
    pub(crate) fn next_end(&mut self, settings: &Settings) -> Option<Duration> {
        let Reverse((end, _)) = *self.ends.peek()?;
        let left = (f64::from_bits(end) - self.steps).max(0.0);
        self.said = self.said.wrapping_add(1);
        Some(
            self.at
                .saturating_add(span(left * settings.step_ms(self.blocks))),
        )
    }

    /// The request that ends first.
    pub(crate) fn first(&self) -> Option<u32> {
        self.ends.peek().map(|Reverse((_, request))| *request)
    }

    /// That request, of `blocks` blocks, ends now.
    pub(crate) fn end(&mut self, settings: &Settings, now: Duration, blocks: usize) {
        self.advance(settings, now);
        self.ends.pop();
        self.blocks -= blocks;
    }

    fn advance(&mut self, settings: &Settings, now: Duration) {
        self.steps += ms(now.saturating_sub(self.at)) / settings.step_ms(self.blocks);
        self.at = now;
    }
}
