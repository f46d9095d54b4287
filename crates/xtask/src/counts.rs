// SPDX-License-Identifier: Apache-2.0

//! What frontend and workers count about claims, read from their /metrics.

use std::collections::BTreeMap;

use anyhow::Result;
use serde::Serialize;

use crate::client::{Client, grown, metric_sum};
use crate::fleet::Fleet;

/// A number of the main job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Count {
    /// Requests with a claim.
    Claims,
    /// Blocks claimed.
    ClaimedBlocks,
    /// Claims whose decode worker did not get the request.
    VoidClaims,
    /// Claims by which prefill skipped blocks.
    SkippedClaims,
    /// Claims by which prefill skipped nothing.
    RefusedClaims,
    /// Blocks that prefill did not offer.
    SkippedBlocks,
    /// Blocks that prefill kept for decode, times the seconds.
    PinnedBlockSeconds,
    /// Claims that decode's own lookup agreed with.
    ConfirmedClaims,
    /// Claims that decode's own lookup disagreed with.
    StaleClaims,
    /// Blocks that decode lacked of stale claims.
    StaleBlocks,
    /// Stale claims that decode recovered from by computing.
    Recomputed,
    /// Those for which prefill was asked again.
    AskedAgain,
    /// Offers of which nothing could be used, and the request failed.
    Failed,
    /// Offers of which nothing had to be read.
    FullHits,
    /// Bytes that decode asked prefill for.
    ReadBytes,
    /// Bytes of prompts that decode held itself.
    SavedBytes,
    /// Lease words that were as they must be after a read.
    LeasesHeld,
    /// Lease words that were not, or could not be read.
    LeasesLost,
    /// Transfers of NIXL.
    Transfers,
    /// Descriptors of these.
    Descriptors,
}

/// Whose /metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Frontend,
    Prefill,
    Decode,
}

/// Where a number comes from: the sum of a metric, or of its series with one of these labels.
struct Source(Count, Side, &'static str, &'static [&'static str]);

const SOURCES: [Source; 20] = [
    Source(
        Count::Claims,
        Side::Frontend,
        "dynamo_component_router_decode_claims_total",
        &[],
    ),
    Source(
        Count::ClaimedBlocks,
        Side::Frontend,
        "dynamo_component_router_decode_claimed_blocks_total",
        &[],
    ),
    Source(
        Count::VoidClaims,
        Side::Frontend,
        "dynamo_component_router_decode_claims_voided_total",
        &[],
    ),
    Source(
        Count::SkippedClaims,
        Side::Prefill,
        "vllm:kvdelta_claims_total",
        &["outcome=\"skipped\""],
    ),
    Source(
        Count::RefusedClaims,
        Side::Prefill,
        "vllm:kvdelta_claims_total",
        &["outcome=\"refused_"],
    ),
    Source(
        Count::SkippedBlocks,
        Side::Prefill,
        "vllm:kvdelta_skipped_blocks_total",
        &[],
    ),
    Source(
        Count::PinnedBlockSeconds,
        Side::Prefill,
        "vllm:kvdelta_pinned_block_seconds_total",
        &[],
    ),
    Source(
        Count::ConfirmedClaims,
        Side::Decode,
        "vllm:kvdelta_offers_total",
        &["outcome=\"confirmed\""],
    ),
    Source(
        Count::StaleClaims,
        Side::Decode,
        "vllm:kvdelta_offers_total",
        &["outcome=\"stale\"", "outcome=\"content\""],
    ),
    Source(
        Count::StaleBlocks,
        Side::Decode,
        "vllm:kvdelta_stale_blocks_total",
        &[],
    ),
    Source(
        Count::Recomputed,
        Side::Decode,
        "vllm:kvdelta_recoveries_total",
        &["kind=\"recompute\""],
    ),
    Source(
        Count::AskedAgain,
        Side::Decode,
        "vllm:kvdelta_recoveries_total",
        &["kind=\"ask_again\""],
    ),
    Source(
        Count::Failed,
        Side::Decode,
        "vllm:kvdelta_recoveries_total",
        &["kind=\"failed\""],
    ),
    Source(
        Count::FullHits,
        Side::Decode,
        "vllm:kvdelta_full_hits_total",
        &[],
    ),
    Source(
        Count::ReadBytes,
        Side::Decode,
        "vllm:kvdelta_bytes_read_total",
        &[],
    ),
    Source(
        Count::SavedBytes,
        Side::Decode,
        "vllm:kvdelta_bytes_saved_total",
        &[],
    ),
    Source(
        Count::LeasesHeld,
        Side::Decode,
        "vllm:kvdelta_lease_checks_total",
        &["outcome=\"held\""],
    ),
    Source(
        Count::LeasesLost,
        Side::Decode,
        "vllm:kvdelta_lease_checks_total",
        &["outcome=\"gone\"", "outcome=\"failed\""],
    ),
    Source(
        Count::Transfers,
        Side::Decode,
        "vllm:nixl_num_descriptors_count",
        &[],
    ),
    Source(
        Count::Descriptors,
        Side::Decode,
        "vllm:nixl_num_descriptors_sum",
        &[],
    ),
];

/// Numbers of one workload; what nobody counts is not among them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Counts(pub(crate) BTreeMap<Count, u64>);

impl Counts {
    /// One of them; `None`: nobody counts it.
    pub(crate) fn get(&self, count: Count) -> Option<u64> {
        self.0.get(&count).copied()
    }
}

/// All numbers as they stand.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Standing(BTreeMap<Count, f64>);

impl Standing {
    /// Asks the frontend and every worker.
    pub(crate) async fn read(client: &Client, fleet: &Fleet) -> Result<Self> {
        let metrics = async |bases: Vec<&str>| {
            let mut texts = Vec::new();
            for base in bases {
                texts.push(client.get(&format!("{base}/metrics")).await?);
            }
            Ok::<_, anyhow::Error>(texts)
        };
        let frontend = metrics(vec![fleet.base()?]).await?;
        let prefill = metrics(fleet.prefill_bases().collect()).await?;
        let decode = metrics(fleet.decode_bases().collect()).await?;
        Ok(Self::of(&frontend, &prefill, &decode))
    }

    fn of(frontend: &[String], prefill: &[String], decode: &[String]) -> Self {
        let numbers = SOURCES
            .iter()
            .filter_map(|Source(count, side, name, labels)| {
                let texts = match side {
                    Side::Frontend => frontend,
                    Side::Prefill => prefill,
                    Side::Decode => decode,
                };
                let sum = texts
                    .iter()
                    .filter_map(|text| metric_sum(text, name, labels))
                    .reduce(|sum, value| sum + value)?;
                Some((*count, sum))
            });
        let mut numbers: BTreeMap<Count, f64> = numbers.collect();
        // It is counted by reason, so there is no series before the first one.
        if numbers.contains_key(&Count::Claims) {
            numbers.entry(Count::VoidClaims).or_insert(0.0);
        }
        Self(numbers)
    }

    /// What was counted since `before`. A counter that was not there yet counted nothing until then.
    pub(crate) fn since(&self, before: &Self) -> Counts {
        let counts = self.0.iter().map(|(count, after)| {
            let before = before.0.get(count).copied().unwrap_or(0.0);
            (*count, grown(&[before], &[*after])[0])
        });
        Counts(counts.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_summed_by_side_and_label_and_since_before() {
        let prefill = |refused: u32| {
            format!(
                "vllm:kvdelta_claims_total{{engine=\"0\",outcome=\"skipped\"}} 7.0\n\
                 vllm:kvdelta_claims_total{{engine=\"0\",outcome=\"refused_content\"}} {refused}.0\n\
                 vllm:kvdelta_claims_total{{engine=\"0\",outcome=\"refused_invalid\"}} 1.0\n\
                 vllm:kvdelta_full_hits_total{{engine=\"0\"}} 100.0\n"
            )
        };
        let decode = "vllm:kvdelta_full_hits_total{engine=\"0\"} 2.0\n".to_owned();
        let before = Standing::of(&[], &[prefill(0)], &[]);
        let after = Standing::of(&[], &[prefill(2)], &[decode.clone(), decode]);
        let counts = after.since(&before);
        let expected = [
            (Count::SkippedClaims, Some(0)),
            (Count::RefusedClaims, Some(2)),
            (Count::FullHits, Some(4)),
            (Count::Claims, None),
            (Count::VoidClaims, None),
            (Count::StaleClaims, None),
        ];
        for (count, number) in expected {
            assert_eq!(counts.get(count), number, "{count:?}");
        }
        assert_eq!(
            serde_json::to_string(&counts).unwrap(),
            r#"{"skipped_claims":0,"refused_claims":2,"full_hits":4}"#
        );
    }

    #[test]
    fn a_router_that_makes_claims_has_no_void_one_until_it_says_so() {
        let frontend = "dynamo_component_router_decode_claims_total{worker_type=\"decode\"} 3\n";
        let standing = Standing::of(&[frontend.to_owned()], &[], &[]);
        assert_eq!(standing.since(&standing).get(Count::VoidClaims), Some(0));
    }

    #[test]
    fn every_number_has_one_source() {
        let numbers: BTreeMap<Count, &str> = SOURCES
            .iter()
            .map(|Source(count, _, name, _)| (*count, *name))
            .collect();
        assert_eq!(numbers.len(), SOURCES.len());
    }
}
