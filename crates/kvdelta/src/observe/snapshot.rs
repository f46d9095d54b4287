// SPDX-License-Identifier: Apache-2.0

//! What is shown at one time. Its fields are those of `--json`.

use std::collections::BTreeMap;

use kvdelta_indexer::{BlockSize, Millis, Overlap, Tier, WorkerRank};
use serde::Serialize;

use super::reading::{Rank, Reading};

/// Version of the JSON's keys.
const VERSION: u32 = 1;

/// All that is known at one time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Snapshot {
    pub(crate) version: u32,
    /// Since 1970.
    pub(crate) time_ms: u64,
    /// Over which the rates are; `None`: the first snapshot has none.
    pub(crate) interval_seconds: Option<f64>,
    pub(crate) block_size_tokens: u32,
    pub(crate) ranks: Vec<RankLine>,
    pub(crate) device: DeviceLine,
    pub(crate) prompts: Vec<PromptLine>,
    /// Messages that were lost between socket and index since the start.
    pub(crate) messages_lost: u64,
    /// Events that were not of use since the start, by reason.
    pub(crate) events_skipped: BTreeMap<&'static str, u64>,
}

/// One rank of a worker.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct RankLine {
    pub(crate) worker: String,
    pub(crate) dp_rank: u32,
    pub(crate) device_blocks: u64,
    pub(crate) host_blocks: u64,
    pub(crate) disk_blocks: u64,
    pub(crate) events: u64,
    pub(crate) events_per_second: Option<f64>,
    /// Since the engine made it, where that is known, else since it came in; `None`: there was none.
    pub(crate) last_event_age_seconds: Option<f64>,
    /// How old the last batch was when it came in; `None`: it does not say.
    pub(crate) lag_seconds: Option<f64>,
    /// Of the last applied batch.
    pub(crate) sequence: Option<u64>,
    pub(crate) trust: &'static str,
    /// Why it is not complete.
    pub(crate) reason: Option<&'static str>,
}

/// Device memory of all ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct DeviceLine {
    /// Blocks of all ranks together.
    pub(crate) held_blocks: u64,
    /// Different prefixes among them.
    pub(crate) distinct_blocks: u64,
    /// Prefixes that more than one rank holds.
    pub(crate) shared_blocks: u64,
    /// Blocks beyond the first of their prefix.
    pub(crate) repeated_blocks: u64,
    /// Of `held_blocks`; `None`: nothing is held.
    pub(crate) repeated_share: Option<f64>,
    /// How long ago these were counted.
    pub(crate) counted_age_seconds: f64,
}

/// One prompt of `--prompt-tokens`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct PromptLine {
    /// Its place in the file, from 1.
    pub(crate) prompt: usize,
    pub(crate) tokens: usize,
    /// Whole blocks.
    pub(crate) blocks: usize,
    /// Every rank, the largest overlap first.
    pub(crate) overlaps: Vec<OverlapLine>,
}

/// What one rank holds of a prompt, from its start without a hole.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct OverlapLine {
    pub(crate) worker: String,
    pub(crate) dp_rank: u32,
    pub(crate) device_blocks: usize,
    pub(crate) device_tokens: usize,
    /// Of the prompt's tokens; `None`: it has none.
    pub(crate) device_share: Option<f64>,
    pub(crate) host_blocks: usize,
    pub(crate) disk_blocks: usize,
}

impl Snapshot {
    /// What `now` says; rates are those since `before`.
    pub(crate) fn new(
        before: Option<&Reading>,
        now: &Reading,
        prompts: &[Vec<u32>],
        block_size: BlockSize,
    ) -> Self {
        let since = before.map(|before| seconds(before.at, now.at));
        let ranks = now.ranks.iter();
        let prompts = prompts.iter().zip(&now.overlaps).zip(1..);
        Self {
            version: VERSION,
            time_ms: now.at.0,
            interval_seconds: since,
            block_size_tokens: block_size.into(),
            ranks: ranks
                .map(|rank| RankLine::new(before, rank, since, now.at))
                .collect(),
            device: DeviceLine::new(now),
            prompts: prompts
                .map(|((tokens, overlaps), prompt)| PromptLine {
                    prompt,
                    tokens: tokens.len(),
                    blocks: tokens.len() / block_size.tokens(),
                    overlaps: overlap_lines(tokens.len(), overlaps, &now.ranks, block_size),
                })
                .collect(),
            messages_lost: now.lost,
            events_skipped: now.skipped.clone(),
        }
    }
}

impl RankLine {
    fn new(before: Option<&Reading>, rank: &Rank, since: Option<f64>, now: Millis) -> Self {
        let [device_blocks, host_blocks, disk_blocks] = rank.usage.blocks;
        // A rank that was not there before told all of its events since.
        let told_before = before.map(|before| {
            let same = before.ranks.iter().find(|other| other.of == rank.of);
            same.map_or(0, |same| same.counts.events)
        });
        let told = told_before.map(|before| rank.counts.events.saturating_sub(before));
        let lag = rank.counts.lag;
        let age = rank.standing.last_event.map(|at| {
            let since = now.since(at);
            since.saturating_add(lag.unwrap_or_default())
        });
        Self {
            worker: rank.worker.clone(),
            dp_rank: rank.of.rank.0,
            device_blocks,
            host_blocks,
            disk_blocks,
            events: rank.counts.events,
            events_per_second: told
                .zip(since)
                .and_then(|(told, since)| quotient(told, since)),
            last_event_age_seconds: age.map(|age| age.as_secs_f64()),
            lag_seconds: lag.map(|lag| lag.as_secs_f64()),
            sequence: rank.standing.last_seq,
            trust: rank.standing.trust.as_label(),
            reason: rank.standing.reason.map(|reason| reason.as_label()),
        }
    }
}

impl DeviceLine {
    fn new(now: &Reading) -> Self {
        let sharing = now.device.sharing;
        let repeated_blocks = sharing.held.saturating_sub(sharing.distinct);
        Self {
            held_blocks: sharing.held,
            distinct_blocks: sharing.distinct,
            shared_blocks: sharing.shared,
            repeated_blocks,
            repeated_share: share(repeated_blocks, sharing.held),
            counted_age_seconds: seconds(now.device.at, now.at),
        }
    }
}

fn overlap_lines(
    tokens: usize,
    overlaps: &[Overlap],
    ranks: &[Rank],
    block_size: BlockSize,
) -> Vec<OverlapLine> {
    let blocks = |of: WorkerRank, tier: Tier| {
        let mut overlaps = overlaps.iter();
        let found = overlaps.find(|one| one.of == of && one.tier == tier);
        found.map_or(0, |overlap| overlap.blocks)
    };
    let mut lines: Vec<OverlapLine> = ranks
        .iter()
        .map(|rank| {
            let [device_blocks, host_blocks, disk_blocks] =
                Tier::ALL.map(|tier| blocks(rank.of, tier));
            let device_tokens = device_blocks * block_size.tokens();
            OverlapLine {
                worker: rank.worker.clone(),
                dp_rank: rank.of.rank.0,
                device_blocks,
                device_tokens,
                device_share: share(as_u64(device_tokens), as_u64(tokens)),
                host_blocks,
                disk_blocks,
            }
        })
        .collect();
    lines.sort_by_key(|line| {
        let blocks = (line.device_blocks, line.host_blocks, line.disk_blocks);
        std::cmp::Reverse(blocks)
    });
    lines
}

fn as_u64(count: usize) -> u64 {
    u64::try_from(count).unwrap_or(u64::MAX)
}

/// Exact below 2^53, which no count here comes near.
fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

fn quotient(count: u64, seconds: f64) -> Option<f64> {
    (seconds > 0.0).then(|| count as f64 / seconds)
}

fn seconds(from: Millis, to: Millis) -> f64 {
    to.since(from).as_secs_f64()
}

#[cfg(test)]
pub(crate) mod tests;
