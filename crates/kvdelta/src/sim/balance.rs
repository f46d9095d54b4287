// SPDX-License-Identifier: Apache-2.0

//! How even the load of the decode workers is.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::time::Duration;

/// Blocks of the requests that are at each worker: waiting, coming over the link, or running.
///
/// Not what the router has booked: a policy that chooses before prefill books longer, which would hide how uneven it is.
#[derive(Debug, Default)]
pub(crate) struct Balance {
    loads: Vec<usize>,
    load: usize,
    /// Of the requests that are there: how many have so many blocks.
    sizes: BTreeMap<usize, usize>,
    /// Sum over all arrivals of the largest load by the mean.
    uneven: f64,
    /// Sum over all arrivals of the largest request by the mean load, or 1.
    least: f64,
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
        *self.sizes.entry(blocks).or_default() += 1;
        let most = self.loads.iter().copied().max().unwrap_or_default();
        let largest = self.sizes.keys().next_back().copied().unwrap_or_default();
        let by_mean = |blocks: usize| blocks as f64 * self.loads.len() as f64 / self.load as f64;
        self.uneven += by_mean(most);
        self.least += by_mean(largest).max(1.0);
        self.arrivals += 1;
    }

    /// It has ended, `time` later.
    pub(crate) fn end(&mut self, worker: usize, blocks: usize, time: Duration) {
        self.loads[worker] -= blocks;
        self.load -= blocks;
        if let Entry::Occupied(mut count) = self.sizes.entry(blocks) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        self.busy[worker] += blocks as f64 * time.as_secs_f64();
    }

    /// Mean over all arrivals of the largest load by the mean.
    pub(crate) fn imbalance(&self) -> f64 {
        self.uneven / self.arrivals as f64
    }

    /// The least that it can be with these requests at these times, whoever chooses: the busiest worker has at least
    /// the largest request, and the mean.
    pub(crate) fn least_imbalance(&self) -> f64 {
        self.least / self.arrivals as f64
    }

    /// Blocks times their time of the busiest worker by the mean of all.
    ///
    /// `None`: all requests ended at once.
    pub(crate) fn busiest(&self) -> Option<f64> {
        let all: f64 = self.busy.iter().sum();
        let most = self.busy.iter().copied().fold(0.0, f64::max);
        (all > 0.0).then(|| most * self.busy.len() as f64 / all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_is_that_of_the_largest_request_or_of_the_mean() {
        let mut balance = Balance::new(2);
        // By the mean: 6 of 3, 6 of 5, 8 of 7 (where the largest has 6), and after the largest ended 8 of 5.
        balance.begin(0, 6);
        balance.begin(1, 4);
        balance.begin(1, 4);
        balance.end(0, 6, Duration::ZERO);
        balance.begin(0, 2);
        let imbalance = (2.0 + 1.2 + 8.0 / 7.0 + 1.6) / 4.0;
        assert!((balance.imbalance() - imbalance).abs() < 1e-12);
        let least = (2.0 + 1.2 + 1.0 + 1.0) / 4.0;
        assert!((balance.least_imbalance() - least).abs() < 1e-12);
    }
}
