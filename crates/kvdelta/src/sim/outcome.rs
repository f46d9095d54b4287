// SPDX-License-Identifier: Apache-2.0

//! What came of a trace.

use serde::Serialize;

/// What one policy made of a trace on one fleet.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Outcome {
    pub(crate) requests: usize,
    /// Bytes if every prompt travelled whole; blocks travel whole, the last one begun among them. It is the sum of
    /// the next three.
    pub(crate) full_bytes: u64,
    pub(crate) moved_bytes: u64,
    /// Of blocks that the decode worker had.
    pub(crate) saved_bytes: u64,
    /// Of blocks that the decode worker computed after a stale claim.
    pub(crate) recomputed_bytes: u64,
    /// Saved by full bytes.
    pub(crate) saved_share: f64,
    /// Prompt tokens that the decode worker had, by all prompt tokens.
    pub(crate) hit_share: f64,
    pub(crate) claims: u64,
    pub(crate) claimed_blocks: u64,
    pub(crate) stale_claims: u64,
    /// Stale claims after which the decode worker computed, and after which prefill was asked again.
    pub(crate) recomputed: u64,
    pub(crate) asked_again: u64,
    /// Mean over all arrivals at decode workers of the largest load by the mean, in blocks of requests that are there.
    /// `None` of one cache for all.
    pub(crate) imbalance: Option<f64>,
    /// The least that it can be with these requests at these times, whoever chooses: at each arrival the largest
    /// request by the mean, or 1.
    pub(crate) least_imbalance: Option<f64>,
    /// These blocks times the time that they were there, of the busiest worker by the mean of all.
    pub(crate) busiest: Option<f64>,
    /// Choices for which every worker was refused, so that the least loaded one got the request.
    pub(crate) overloaded: u64,
    /// Requests that found no room at their decode worker and waited.
    pub(crate) waited: u64,
    pub(crate) events_lost: u64,
    /// Events that the index refused, since it lacks the block before.
    pub(crate) events_refused: u64,
    /// From arrival to the first token: milliseconds.
    pub(crate) ttft_ms: Percentiles,
    /// Mean time between the tokens of a request: milliseconds.
    pub(crate) itl_ms: Percentiles,
    /// Where each request went.
    #[serde(skip)]
    pub(crate) chosen: Vec<Chosen>,
}

/// Where a request went, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Chosen {
    /// The decode worker.
    pub(crate) decode: usize,
    /// Blocks of the prompt that the index said of it when it was chosen.
    pub(crate) cached: usize,
    /// Blocks that it had when the request came.
    pub(crate) held: usize,
    /// Workers that cost the policy as little as any; 0: all were refused.
    pub(crate) cheapest: usize,
    /// Whether `decode` is one of them: where a choice is followed, whether the policy might have made it.
    pub(crate) is_cheapest: bool,
}

/// Where a half, nine tenths and so on of the values lie; `None`: there are none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Percentiles {
    pub(crate) mean: Option<f64>,
    pub(crate) p50: Option<f64>,
    pub(crate) p90: Option<f64>,
    pub(crate) p99: Option<f64>,
}

impl Percentiles {
    /// Of `values`, which are sorted by it.
    pub(crate) fn of(values: &mut [f64]) -> Self {
        values.sort_unstable_by(f64::total_cmp);
        let count = values.len();
        // The nearest rank.
        let at = |percent: usize| {
            let rank = (count * percent).div_ceil(100);
            values.get(rank.saturating_sub(1)).copied()
        };
        let sum: f64 = values.iter().sum();
        Self {
            mean: (count > 0).then_some(sum / count as f64),
            p50: at(50),
            p90: at(90),
            p99: at(99),
        }
    }
}
