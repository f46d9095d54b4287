// SPDX-License-Identifier: Apache-2.0

//! The rows of a replay.

use serde::Serialize;

use crate::sim::{Outcome, Policy, Settings};
use crate::trace::Trace;

/// Version of the JSON's keys.
const VERSION: u32 = 1;

/// A replay, as JSON has it. An infinite rate is `null` there.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    version: u32,
    pub(crate) trace: TraceReport,
    /// The fleet; `decode` is that of the first row.
    pub(crate) settings: Settings,
    pub(crate) rows: Vec<Row>,
}

/// What was replayed.
#[derive(Debug, Serialize)]
pub(crate) struct TraceReport {
    pub(crate) requests: usize,
    pub(crate) prompt_tokens: u64,
    pub(crate) block_size_tokens: usize,
    /// From the first request to the last one.
    pub(crate) seconds: f64,
    /// Different whole blocks.
    pub(crate) distinct_blocks: u32,
    pub(crate) lines_skipped: u64,
}

/// One policy on one fleet.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) policy: &'static str,
    pub(crate) weight: Option<f64>,
    #[serde(skip)]
    pub(crate) label: String,
    pub(crate) decode: usize,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

impl Report {
    pub(crate) fn new(trace: &Trace, lines_skipped: u64, settings: Settings) -> Self {
        let seconds = trace.requests().last().map(|last| last.at.as_secs_f64());
        let trace = TraceReport {
            requests: trace.requests().len(),
            prompt_tokens: trace.prompt_tokens(),
            block_size_tokens: trace.block_size().tokens(),
            seconds: seconds.unwrap_or_default(),
            distinct_blocks: trace.distinct_blocks(),
            lines_skipped,
        };
        Self {
            version: VERSION,
            trace,
            settings,
            rows: Vec::new(),
        }
    }

    pub(crate) fn add(&mut self, policy: Policy, decode: usize, outcome: Outcome) {
        self.rows.push(Row {
            policy: policy.name(),
            weight: policy.weight(),
            label: policy.label(),
            decode,
            outcome,
        });
    }

    /// The numbers of decode workers, each once, in the order of the rows.
    pub(crate) fn fleets(&self) -> Vec<usize> {
        let mut fleets = Vec::new();
        for row in &self.rows {
            if !fleets.contains(&row.decode) {
                fleets.push(row.decode);
            }
        }
        fleets
    }
}
