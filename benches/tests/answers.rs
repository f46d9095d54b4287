// SPDX-License-Identifier: Apache-2.0

//! Every index answers as the oracle does, in every way that it is loaded for a measurement.

use kvdelta_benches::contender::{Contender, Reader, Watch, load, stream};
use kvdelta_benches::data::{Change, Data, Recording};
use kvdelta_benches::oracle::Oracle;
use kvdelta_benches::query::{hashes, wrong};
use kvdelta_benches::trace::Trace;
use kvdelta_indexer::{Copies, EngineHash, Event, Naive, Stored, StoredBlock, Tier, WorkerRank};

struct Unwatched;

impl Watch for Unwatched {
    fn watch<R: Reader + Sync>(&mut self, _: &R, write: impl FnOnce()) {
        write();
    }

    fn watch_alone(&mut self, write: impl FnOnce()) {
        write();
    }
}

/// Caches so small that nearly every request evicts something.
fn trace() -> Data {
    let requests = (0..640_u32).map(|request| {
        let topic = request % 7 * 1000;
        (topic..topic + 1 + request % 5)
            .chain([100_000 + request])
            .collect()
    });
    Data::Trace {
        trace: Trace {
            requests: requests.collect(),
        },
        passes: 2,
        capacity: 6,
    }
}

fn all() -> [Data; 5] {
    [
        Data::Prompts {
            blocks: 64,
            prompts: 8,
        },
        Data::Everywhere { entries: 100_000 },
        Data::Tree { entries: 60_000 },
        trace(),
        Data::Decode {
            entries: 10_000,
            sequences: 2,
        },
    ]
}

#[test]
fn loaded_at_once() {
    for data in all() {
        let (prompts, oracle, hashes) = asked(&data);
        let recording = Recording::of(std::slice::from_ref(&data));
        for contender in Contender::ALL {
            for way in contender.ways() {
                let index = load(contender, *way, &recording, &mut Unwatched);
                let wrong = wrong(index.as_ref(), &prompts, &hashes, &oracle.expected);
                assert_eq!(wrong, 0, "{contender} {way:?} of {}", data.name());
            }
        }
    }
}

#[test]
fn loaded_event_by_event() {
    for data in all() {
        let (prompts, oracle, hashes) = asked(&data);
        for contender in Contender::ALL {
            stream(contender, &data, |index| {
                let wrong = wrong(index, &prompts, &hashes, &oracle.expected);
                assert_eq!(wrong, 0, "{contender} of {}", data.name());
            });
        }
    }
}

/// The oracle keeps no more than the prompts' own prefixes; the crate's naive index keeps every path.
#[test]
fn the_oracle_agrees_with_the_naive_index() {
    let small = [
        trace(),
        Data::Decode {
            entries: 1_024,
            sequences: 2,
        },
    ];
    for data in small {
        let (_, oracle, hashes) = asked(&data);
        let mut naive = Naive::default();
        let rank = |worker: usize| WorkerRank::new(u64::try_from(worker).unwrap(), 0);
        for worker in 0..64 {
            naive.admit(rank(worker));
        }
        data.steps(&mut |step| {
            let change = match step.change {
                Change::Stored { parent, blocks } => kvdelta_indexer::Change::Stored(Stored {
                    tier: Tier::Device,
                    parent: parent.map(|parent| EngineHash(parent.0)),
                    namespace: None,
                    blocks: blocks
                        .iter()
                        .map(|block| StoredBlock {
                            block: block.block,
                            engine: EngineHash(block.sequence.0),
                        })
                        .collect(),
                    copies: Copies::Single,
                    source: None,
                }),
                Change::Removed(blocks) => kvdelta_indexer::Change::Removed {
                    tier: Tier::Device,
                    engine_hashes: blocks
                        .iter()
                        .map(|block| EngineHash(block.sequence.0))
                        .collect(),
                },
            };
            let of = rank(step.worker);
            let applied = naive.apply(&Event { of, change });
            assert_eq!((applied.refused, applied.unknown_blocks), (None, 0));
        });
        for (prompt, expected) in hashes.iter().zip(&oracle.expected) {
            for worker in 0..64 {
                let overlap = naive.overlap_of(rank(worker), Tier::Device, prompt);
                let blocks = overlap.map_or(0, |overlap| overlap.blocks);
                assert_eq!(blocks, expected.get(&worker).copied().unwrap_or(0));
            }
        }
    }
}

type Asked = (Vec<Vec<u32>>, Oracle, Vec<Vec<kvdelta_indexer::BlockHash>>);

fn asked(data: &Data) -> Asked {
    let prompts = data.prompts(24);
    let oracle = Oracle::of(&prompts, |sink| data.steps(sink));
    let found: usize = oracle.expected.iter().map(|overlaps| overlaps.len()).sum();
    assert!(found > 0, "no prompt of {} is held anywhere", data.name());
    let hashes = prompts.iter().map(|prompt| hashes(prompt)).collect();
    (prompts, oracle, hashes)
}
