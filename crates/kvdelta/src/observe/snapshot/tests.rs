// SPDX-License-Identifier: Apache-2.0

use std::time::Duration;

use kvdelta_indexer::{EngineHash, RankCounts, Reason, Sharing, Standing, Trust, Usage};
use serde_json::{Value, json};

use super::*;
use crate::observe::reading::Counted;

const AT: Millis = Millis(1_764_452_407_000);

fn at(seconds: u64) -> Millis {
    AT.plus(Duration::from_secs(seconds))
}

fn rank(worker: &str, of: WorkerRank, blocks: [u64; 3], events: u64) -> Rank {
    Rank {
        worker: worker.to_owned(),
        of,
        usage: Usage { blocks },
        counts: RankCounts {
            events,
            lag: Some(Duration::from_millis(12)),
        },
        standing: Standing {
            trust: Trust::Complete,
            reason: None,
            last_seq: Some(41),
            last_event: Some(at(9)),
            last_sign: at(9),
        },
    }
}

/// Two workers, one with a second rank that was never heard from.
pub(crate) fn reading() -> Reading {
    let unheard = Rank {
        counts: RankCounts::default(),
        standing: Standing {
            trust: Trust::Unknown,
            reason: Some(Reason::NeverHeard),
            last_seq: None,
            last_event: None,
            last_sign: at(0),
        },
        ..rank("decode-1", WorkerRank::new(2, 1), [0; 3], 0)
    };
    let overlap = |of, tier, blocks| Overlap {
        of,
        tier,
        blocks,
        engine: EngineHash(0),
    };
    let (first, second) = (WorkerRank::new(1, 0), WorkerRank::new(2, 0));
    Reading {
        at: at(10),
        ranks: vec![
            rank("decode-0", first, [1024, 0, 0], 130),
            rank("decode-1", second, [512, 64, 8], 100),
            unheard,
        ],
        device: Counted {
            sharing: Sharing {
                held: 1536,
                distinct: 1100,
                shared: 436,
            },
            at: at(9),
        },
        overlaps: vec![
            vec![
                overlap(first, Tier::Device, 2),
                overlap(second, Tier::Host, 4),
                overlap(second, Tier::Device, 6),
            ],
            vec![],
        ],
        lost: 0,
        skipped: BTreeMap::new(),
    }
}

pub(crate) fn prompts() -> [Vec<u32>; 2] {
    [(0..100).collect(), Vec::new()]
}

pub(crate) fn snapshot() -> Snapshot {
    let now = reading();
    let mut before = now.clone();
    before.at = at(8);
    before.ranks[0].counts.events = 100;
    before.ranks[1].counts.events = 100;
    before.ranks.pop();
    let size = BlockSize::try_from(16).unwrap();
    Snapshot::new(Some(&before), &now, &prompts(), size)
}

#[test]
fn fields_and_their_values_are_stable() {
    let expected = json!({
        "version": 1,
        "time_ms": 1_764_452_417_000_u64,
        "interval_seconds": 2.0,
        "block_size_tokens": 16,
        "ranks": [
            {
                "worker": "decode-0", "dp_rank": 0,
                "device_blocks": 1024, "host_blocks": 0, "disk_blocks": 0,
                "events": 130, "events_per_second": 15.0, "last_event_age_seconds": 1.012,
                "lag_seconds": 0.012, "sequence": 41, "trust": "complete", "reason": null,
            },
            {
                "worker": "decode-1", "dp_rank": 0,
                "device_blocks": 512, "host_blocks": 64, "disk_blocks": 8,
                "events": 100, "events_per_second": 0.0, "last_event_age_seconds": 1.012,
                "lag_seconds": 0.012, "sequence": 41, "trust": "complete", "reason": null,
            },
            {
                "worker": "decode-1", "dp_rank": 1,
                "device_blocks": 0, "host_blocks": 0, "disk_blocks": 0,
                "events": 0, "events_per_second": 0.0, "last_event_age_seconds": null,
                "lag_seconds": null, "sequence": null, "trust": "unknown", "reason": "never_heard",
            },
        ],
        "device": {
            "held_blocks": 1536, "distinct_blocks": 1100, "shared_blocks": 436,
            "repeated_blocks": 436, "repeated_share": 436.0 / 1536.0, "counted_age_seconds": 1.0,
        },
        "prompts": [
            {
                "prompt": 1, "tokens": 100, "blocks": 6,
                "overlaps": [
                    {
                        "worker": "decode-1", "dp_rank": 0,
                        "device_blocks": 6, "device_tokens": 96, "device_share": 0.96,
                        "host_blocks": 4, "disk_blocks": 0,
                    },
                    {
                        "worker": "decode-0", "dp_rank": 0,
                        "device_blocks": 2, "device_tokens": 32, "device_share": 0.32,
                        "host_blocks": 0, "disk_blocks": 0,
                    },
                    {
                        "worker": "decode-1", "dp_rank": 1,
                        "device_blocks": 0, "device_tokens": 0, "device_share": 0.0,
                        "host_blocks": 0, "disk_blocks": 0,
                    },
                ],
            },
            {"prompt": 2, "tokens": 0, "blocks": 0, "overlaps": [
                {
                    "worker": "decode-0", "dp_rank": 0,
                    "device_blocks": 0, "device_tokens": 0, "device_share": null,
                    "host_blocks": 0, "disk_blocks": 0,
                },
                {
                    "worker": "decode-1", "dp_rank": 0,
                    "device_blocks": 0, "device_tokens": 0, "device_share": null,
                    "host_blocks": 0, "disk_blocks": 0,
                },
                {
                    "worker": "decode-1", "dp_rank": 1,
                    "device_blocks": 0, "device_tokens": 0, "device_share": null,
                    "host_blocks": 0, "disk_blocks": 0,
                },
            ]},
        ],
        "messages_lost": 0,
        "events_skipped": {},
    });
    let text = serde_json::to_string(&snapshot()).unwrap();
    assert!(!text.contains('\n'));
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), expected);
}

#[test]
fn the_first_snapshot_has_no_rates() {
    let now = reading();
    let size = BlockSize::try_from(16).unwrap();
    let first = Snapshot::new(None, &now, &[], size);
    assert_eq!(first.interval_seconds, None);
    assert!(
        first
            .ranks
            .iter()
            .all(|rank| rank.events_per_second.is_none())
    );
    // Nor are there rates between two readings of the same moment.
    let again = Snapshot::new(Some(&now), &now, &[], size);
    assert!(
        again
            .ranks
            .iter()
            .all(|rank| rank.events_per_second.is_none())
    );
}

#[test]
fn an_empty_fleet_repeats_nothing() {
    let now = Reading {
        ranks: Vec::new(),
        device: Counted::default(),
        ..reading()
    };
    let snapshot = Snapshot::new(None, &now, &[], BlockSize::try_from(16).unwrap());
    assert_eq!(snapshot.device.repeated_share, None);
}
