// SPDX-License-Identifier: Apache-2.0

//! How even the load of the decode workers is.

use std::time::Duration;

/// Blocks of the requests that are at each worker: waiting, coming over the link, or running.
///
/// Not what the router has booked: a policy that chooses before prefill books longer, which would hide how uneven it is.
#[derive(Debug, Default)]
pub(crate) struct Balance {
    loads: Vec<usize>,
    load: usize,
    /// Sum over all arrivals of the largest load by the mean.
    uneven: f64,
    arrivals: u64,
    /// Blocks times seconds.
    busy: Vec<f64>,
}

impl Balance {
    pub(crate) fn new(workers: usize) -> Self {
        Self {
            loads: vec![0; workers],
            busy: vec![0.0; workers],
            ..Self::default()
        }
    }

    /// A request of `blocks` blocks came to a worker.
    pub(crate) fn begin(&mut self, worker: usize, blocks: usize) {
        self.loads[worker] += blocks;
        self.load += blocks;
        let most = self.loads.iter().copied().max().unwrap_or_default();
        self.uneven += most as f64 * self.loads.len() as f64 / self.load as f64;
        self.arrivals += 1;
    }

    /// It has ended, `time` later.
    pub(crate) fn end(&mut self, worker: usize, blocks: usize, time: Duration) {
        self.loads[worker] -= blocks;
        self.load -= blocks;
        self.busy[worker] += blocks as f64 * time.as_secs_f64();
    }

    /// Mean over all arrivals of the largest load by the mean.
    pub(crate) fn imbalance(&self) -> f64 {
        self.uneven / self.arrivals as f64
    }

    /// Blocks times their time of the busiest worker by the mean of all.
    pub(crate) fn busiest(&self) -> f64 {
        let all: f64 = self.busy.iter().sum();
        let most = self.busy.iter().copied().fold(0.0, f64::max);
        most * self.busy.len() as f64 / all
    }
}
