//! Random histories against the naive index, and races named by what must hold.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use proptest::prelude::*;

use super::{Among, Index, Naive, Overlap, Refused, Sharing};
use crate::event::{Change, Copies, Event, Stored, StoredBlock};
use crate::hash::{Prompt, PromptOf, block_hashes};
use crate::ids::{BlockHash, BlockSize, EngineHash, Tier, WorkerRank};

const RANKS: [WorkerRank; 4] = [
    WorkerRank::new(1, 0),
    WorkerRank::new(1, 1),
    WorkerRank::new(2, 0),
    WorkerRank::new(3, 0),
];

fn size() -> BlockSize {
    BlockSize::try_from(16).unwrap()
}

thread_local! {
    /// What happens between two nodes of a query of this thread.
    static BETWEEN: RefCell<Vec<Box<dyn FnOnce()>>> = const { RefCell::new(Vec::new()) };
}

/// Called by a query when it goes from one node to the next.
pub(super) fn between_nodes() {
    let next = BETWEEN.with_borrow_mut(Vec::pop);
    if let Some(happens) = next {
        happens();
    }
}

/// A step of a history. Paths are chosen by seed so that many share prefixes.
#[derive(Clone, Debug)]
enum Step {
    Admit(usize),
    RemoveRank(usize),
    Store {
        rank: usize,
        tier: Tier,
        /// Blocks before the run, and blocks in it.
        before: usize,
        count: usize,
        path: u64,
        copies: Copies,
        /// Names of another engine, or names that mean nothing.
        named: u8,
    },
    Remove {
        rank: usize,
        tier: Tier,
        from: usize,
        count: usize,
        path: u64,
        named: u8,
    },
    Place {
        rank: usize,
        tier: Tier,
        from: usize,
        count: usize,
        path: u64,
    },
    Clear(usize),
}

/// Block `position` of a path: paths part at positions that depend on them.
fn block(path: u64, position: usize) -> BlockHash {
    let parted = match path {
        0 => 0,
        1 => u64::from(position >= 3),
        2 => 2 * u64::from(position >= 32),
        3 => 3 * u64::from(position >= 40),
        _ => 4,
    };
    BlockHash(1000 * (parted + 1) + position as u64)
}

fn name(path: u64, position: usize, named: u8, rank: usize) -> EngineHash {
    let chain = (0..=position).fold(7, |chain: u64, at| {
        chain.wrapping_mul(31).wrapping_add(block(path, at).0)
    });
    match named {
        // A worker that calls everything by a few names.
        0 => EngineHash(position as u64 % 5),
        // An engine with another hash seed.
        1 => EngineHash(chain.wrapping_add(1 + rank as u64)),
        _ => EngineHash(chain),
    }
}

fn names(path: u64, from: usize, count: usize, named: u8, rank: usize) -> Vec<EngineHash> {
    (from..from + count)
        .map(|at| name(path, at, named, rank))
        .collect()
}

impl Step {
    fn apply(&self, index: &Index, naive: &mut Naive) {
        let (rank, change) = match *self {
            Self::Admit(rank) => {
                index.admit(RANKS[rank]);
                naive.admit(RANKS[rank]);
                return;
            }
            Self::RemoveRank(rank) => {
                assert_eq!(
                    index.remove_rank(RANKS[rank]),
                    naive.remove_rank(RANKS[rank])
                );
                return;
            }
            Self::Store {
                rank,
                tier,
                before,
                count,
                path,
                copies,
                named,
            } => {
                let blocks = (before..before + count).map(|at| StoredBlock {
                    block: block(path, at),
                    engine: name(path, at, named, rank),
                });
                let parent = before.checked_sub(1);
                let stored = Stored {
                    tier,
                    parent: parent.map(|at| name(path, at, named, rank)),
                    namespace: None,
                    blocks: blocks.collect(),
                    copies,
                    source: None,
                };
                (rank, Change::Stored(stored))
            }
            Self::Remove {
                rank,
                tier,
                from,
                count,
                path,
                named,
            } => {
                let engine_hashes = names(path, from, count, named, rank);
                (
                    rank,
                    Change::Removed {
                        tier,
                        engine_hashes,
                    },
                )
            }
            Self::Place {
                rank,
                tier,
                from,
                count,
                path,
            } => {
                let engine_hashes = names(path, from, count, 2, rank);
                (
                    rank,
                    Change::Placed {
                        tier,
                        engine_hashes,
                    },
                )
            }
            Self::Clear(rank) => (rank, Change::Cleared),
        };
        let event = Event {
            of: RANKS[rank],
            change,
        };
        assert_eq!(index.apply(&event), naive.apply(&event), "{event:?}");
    }
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rank = 0..RANKS.len();
    let tier = prop_oneof![4 => Just(Tier::Device), 1 => Just(Tier::Host), 1 => Just(Tier::Disk)];
    let named = prop_oneof![6 => Just(2_u8), 2 => Just(1), 1 => Just(0)];
    let copies = prop_oneof![Just(Copies::Counted), Just(Copies::Single)];
    let step = prop_oneof![
        1 => rank.clone().prop_map(Step::Admit),
        1 => rank.clone().prop_map(Step::RemoveRank),
        1 => rank.clone().prop_map(Step::Clear),
        20 => (rank.clone(), tier.clone(), 0..70_usize, 0..50_usize, 0..5_u64, copies, named.clone())
            .prop_map(|(rank, tier, before, count, path, copies, named)| Step::Store {
                rank,
                tier,
                // Most runs begin a prompt, go on where a node ends, or go on somewhere.
                before: if before < 30 { 0 } else if before < 40 { 32 } else { before - 40 },
                count,
                path,
                copies,
                named,
            }),
        12 => (rank.clone(), tier.clone(), 0..70_usize, 0..20_usize, 0..5_u64, named)
            .prop_map(|(rank, tier, from, count, path, named)| Step::Remove {
                rank, tier, from, count, path, named,
            }),
        2 => (rank, tier, 0..40_usize, 0..40_usize, 0..5_u64)
            .prop_map(|(rank, tier, from, count, path)| Step::Place { rank, tier, from, count, path }),
    ];
    prop::collection::vec(step, 1..60)
}

/// What `among` has of the device, as the others say it.
fn found_among(index: &Index, among: &mut Among, prompt: &mut Prompt<'_>) -> Vec<Overlap> {
    let ranks = among.ranks().to_vec();
    index.overlaps_among(prompt, among, |found| {
        let each = ranks.into_iter().enumerate().map(|(place, of)| {
            assert_eq!(found.place(of), Some(place));
            let blocks = found.blocks()[place];
            assert_eq!(found.engine(place).is_some(), blocks > 0);
            Some(Overlap {
                of,
                tier: Tier::Device,
                blocks,
                engine: found.engine(place)?,
            })
        });
        each.flatten().collect()
    })
}

/// The list, kept over the steps and indexes, after each of them.
fn compare_among(index: &Index, naive: &Naive, among: &mut Among) -> Result<(), TestCaseError> {
    for (path, blocks) in [(0, 120), (1, 33), (2, 5)] {
        let prompt: Vec<_> = (0..blocks).map(|at| block(path, at)).collect();
        let found = found_among(index, among, &mut Prompt::hashed(prompt.clone(), size()));
        let ranks = among.ranks().iter();
        let right = ranks.filter_map(|of| naive.overlap_of(*of, Tier::Device, &prompt));
        prop_assert_eq!(found, right.collect::<Vec<_>>());
    }
    Ok(())
}

fn compare(index: &Index, naive: &Naive, unique_names: bool) -> Result<(), TestCaseError> {
    index.check().map_err(TestCaseError::fail)?;
    for path in 0..5 {
        for blocks in [0, 1, 2, 5, 31, 32, 33, 64, 120] {
            let prompt: Vec<_> = (0..blocks).map(|at| block(path, at)).collect();
            let mut hashed = Prompt::hashed(prompt.clone(), size());
            let mut all = index.overlaps(&mut hashed);
            all.sort_unstable();
            let mut expected = Vec::new();
            for of in RANKS {
                for tier in Tier::ALL {
                    let one = naive.overlap_of(of, tier, &prompt);
                    prop_assert_eq!(index.overlap_of(of, tier, &mut hashed), one);
                    expected.extend(one);
                }
            }
            prop_assert_eq!(all, expected);
        }
    }
    for tier in Tier::ALL {
        let all = RANKS.iter().flat_map(|of| naive.held(*of));
        let mut holders = BTreeMap::new();
        for held in all.filter(|held| held.tier == tier) {
            *holders.entry(held.sequence.0).or_insert(0_u64) += 1;
        }
        let sharing = Sharing {
            held: holders.values().sum(),
            distinct: u64::try_from(holders.len()).unwrap(),
            shared: holders.values().map(|times| u64::from(*times > 1)).sum(),
        };
        prop_assert_eq!(index.sharing(tier), sharing);
    }
    let again = Index::new(size());
    for of in RANKS {
        prop_assert_eq!(index.held(of), naive.held(of));
        again.admit(of);
        for stored in index.dump(of) {
            let change = Change::Stored(stored);
            let refused = again.apply(&Event { of, change }).refused;
            prop_assert_eq!(refused, None);
        }
        for path in 0..5 {
            let prompt: Vec<_> = (0..120).map(|at| block(path, at)).collect();
            let mut prompt = Prompt::hashed(prompt, size());
            let here = index.overlap_of(of, Tier::Device, &mut prompt);
            let there = again.overlap_of(of, Tier::Device, &mut prompt);
            let blocks = |one: Option<Overlap>| one.map_or(0, |one| one.blocks);
            prop_assert!(blocks(there) <= blocks(here));
            prop_assert!(there == here || !unique_names);
        }
        for path in 0..5 {
            let engine = name(path, 4, 2, 0);
            prop_assert_eq!(
                index.namespace_of(of, engine),
                naive.namespace_of(of, engine)
            );
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]
    #[test]
    fn histories_equal_the_naive_index(steps in steps()) {
        let (index, mut naive) = (Index::new(size()), Naive::default());
        for of in [RANKS[0], RANKS[2], RANKS[3]] {
            index.admit(of);
            naive.admit(of);
        }
        let mut among = Among::default();
        for (at, step) in steps.iter().enumerate() {
            step.apply(&index, &mut naive);
            index.check().map_err(TestCaseError::fail)?;
            compare_among(&index, &naive, &mut among)?;
            let of = RANKS[at % RANKS.len()];
            if at % 7 == 6 {
                let place = among.place(of);
                prop_assert_eq!(among.swap_remove(of), place);
            } else {
                let place = among.put(of);
                prop_assert_eq!(among.ranks().get(place), Some(&of));
            }
        }
        compare_among(&index, &naive, &mut among)?;
        compare_among(&Index::new(size()), &Naive::default(), &mut among)?;
        compare_among(&index, &naive, &mut among)?;
        let unique_names = !steps.iter().any(|step| matches!(step, Step::Store { named: 0, .. }));
        compare(&index, &naive, unique_names)?;
    }
}

fn run(of: WorkerRank, parent: Option<u64>, blocks: impl Iterator<Item = u64>) -> Event {
    let blocks = blocks.map(|block| StoredBlock {
        block: BlockHash(block),
        engine: EngineHash(block),
    });
    Event {
        of,
        change: Change::Stored(Stored {
            tier: Tier::Device,
            parent: parent.map(EngineHash),
            namespace: None,
            blocks: blocks.collect(),
            copies: Copies::Single,
            source: None,
        }),
    }
}

fn gone(of: WorkerRank, names: impl Iterator<Item = u64>) -> Event {
    Event {
        of,
        change: Change::Removed {
            tier: Tier::Device,
            engine_hashes: names.map(EngineHash).collect(),
        },
    }
}

fn prompt(blocks: impl Iterator<Item = u64>) -> Prompt<'static> {
    Prompt::hashed(blocks.map(BlockHash).collect(), size())
}

#[test]
fn a_late_event_of_a_removed_rank_is_refused() {
    let index = Index::new(size());
    index.admit(RANKS[0]);
    assert_eq!(index.apply(&run(RANKS[0], None, 1..9)).stored_blocks, 8);
    assert!(index.remove_rank(RANKS[0]));
    let late = index.apply(&run(RANKS[0], None, 1..9));
    assert_eq!(late.refused, Some(Refused::NotAdmitted));
    assert!(index.overlaps(&mut prompt(1..9)).is_empty());
    index.admit(RANKS[0]);
    assert!(index.overlaps(&mut prompt(1..9)).is_empty());
    assert!(!index.remove_rank(RANKS[1]));
}

#[test]
fn hashing_stops_soon_after_the_match() {
    let tokens: Vec<u32> = (0..16 * 8192).collect();
    let index = Index::new(size());
    let mut asked = Prompt::new(&tokens, size(), PromptOf::default());
    assert!(index.overlaps(&mut asked).is_empty());
    assert_eq!(asked.hashed_blocks(), 1);
    let all = block_hashes(&tokens, size(), PromptOf::default());
    index.admit(RANKS[0]);
    index.apply(&run(RANKS[0], None, all[..100].iter().map(|block| block.0)));
    assert_eq!(index.overlaps(&mut asked)[0].blocks, 100);
    assert!(asked.hashed_blocks() <= 132, "{}", asked.hashed_blocks());
}

#[test]
fn freed_room_is_used_again() {
    let index = Index::new(size());
    index.admit(RANKS[0]);
    for round in 0..2000_u64 {
        let blocks = || (0..100).map(move |at| round * 1000 + at);
        index.apply(&run(RANKS[0], None, blocks()));
        index.apply(&gone(RANKS[0], blocks()));
    }
    index.check().unwrap();
    let nodes = index.nodes_made();
    // Four at a time, and what waits for readers.
    assert!(nodes < 4000, "{nodes} nodes for 100 blocks at a time");
}

/// A list of these ranks.
fn among(ranks: &[WorkerRank]) -> Among {
    let mut among = Among::default();
    for of in ranks {
        among.put(*of);
    }
    among
}

/// Between the first node of a walk and the second, the rank loses a block of the first and gains the second.
#[test]
fn race_what_moves_behind_a_walk_is_not_added_up() {
    for way in ["all", "one", "list"] {
        let index = Arc::new(Index::new(size()));
        let of = RANKS[0];
        index.admit(of);
        index.apply(&run(of, None, 1..129));
        index.apply(&gone(of, 33..65));
        let moving = Arc::clone(&index);
        let moves = move || {
            moving.apply(&gone(of, 10..11));
            moving.apply(&run(of, Some(32), 33..65));
        };
        BETWEEN.with_borrow_mut(|between| between.push(Box::new(moves)));
        let mut prompt = prompt(1..129);
        let held = match way {
            "all" => index.overlaps(&mut prompt).first().copied(),
            "one" => index.overlap_of(of, Tier::Device, &mut prompt),
            _ => found_among(&index, &mut among(&[of]), &mut prompt).pop(),
        };
        let held = held.map(|one| one.blocks);
        assert!(BETWEEN.with_borrow(Vec::is_empty));
        assert_eq!(held, Some(9), "{way}");
    }
}

/// A rank moves a hole through its prefix: at every moment it lacks the first block or the last ones, so no
/// query may add them up.
#[test]
fn race_a_query_never_adds_up_blocks_that_were_never_there_at_once() {
    let index = Index::new(size());
    let stop = AtomicBool::new(false);
    let of = RANKS[0];
    index.admit(of);
    index.apply(&run(of, None, 1..65));
    index.apply(&gone(of, 65..129));
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for _ in 0..if cfg!(miri) { 20 } else { 30_000 } {
                // Without blocks 40 on, then without block 10.
                index.apply(&gone(of, 10..11));
                index.apply(&run(of, Some(64), 65..129));
                index.apply(&gone(of, 65..129));
                index.apply(&run(of, Some(9), 10..11));
            }
            stop.store(true, Ordering::Relaxed);
        });
        let (mut most, mut among) = (0, among(&[of]));
        while !stop.load(Ordering::Relaxed) {
            let all = index.overlaps(&mut prompt(1..129));
            let listed = found_among(&index, &mut among, &mut prompt(1..129));
            for overlap in all.into_iter().chain(listed) {
                most = most.max(overlap.blocks);
            }
            let one = index.overlap_of(of, Tier::Device, &mut prompt(1..129));
            most = most.max(one.map_or(0, |one| one.blocks));
            assert!(most <= 64, "{most} blocks");
        }
    });
    index.check().unwrap();
}

/// Nodes are freed and used for other prompts while queries walk: nobody ever gets blocks of another prompt.
#[test]
fn race_a_reused_node_is_never_taken_for_the_old_one() {
    let index = Index::new(size());
    let stop = AtomicBool::new(false);
    let (of, other) = (RANKS[0], RANKS[2]);
    index.admit(of);
    index.admit(other);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            for round in 0..if cfg!(miri) { 20 } else { 20_000_u64 } {
                // `other` holds the odd prompts only, `of` the even ones, each 3 blocks longer than the last.
                let start = 1000 * (round % 16);
                let length = 33 + 3 * (round % 16);
                let whose = if round % 2 == 0 { of } else { other };
                index.apply(&run(whose, None, start..start + length));
                if round >= 8 {
                    let start = 1000 * ((round - 8) % 16);
                    let whose = if round % 2 == 0 { of } else { other };
                    index.apply(&gone(whose, start..start + 33 + 3 * ((round - 8) % 16)));
                }
                if round % 1000 == 999 {
                    index.remove_rank(other);
                    index.admit(other);
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let (mut round, mut among) = (0, among(&[other, of]));
        while !stop.load(Ordering::Relaxed) {
            round += 1;
            let which = round % 16;
            let start = 1000 * which;
            let all = index.overlaps(&mut prompt(start..start + 200));
            let listed = found_among(&index, &mut among, &mut prompt(start..start + 200));
            for overlap in all.into_iter().chain(listed) {
                let expected = if which % 2 == 0 { of } else { other };
                assert_eq!(overlap.of, expected);
                let most = usize::try_from(33 + 3 * which).unwrap();
                assert!(overlap.blocks <= most, "{overlap:?} of {most}");
            }
        }
    });
    index.check().unwrap();
}

/// An engine that gives every block the same name holds nobody up: what it costs grows with its blocks.
#[test]
fn a_name_that_stands_for_many_blocks_costs_no_more_than_many_names() {
    let index = Index::new(size());
    let (of, other) = (RANKS[0], RANKS[2]);
    index.admit(of);
    index.admit(other);
    let blocks = 200_000;
    let same = (0..blocks).map(|block| StoredBlock {
        block: BlockHash(block),
        engine: EngineHash(7),
    });
    let change = Change::Stored(Stored {
        tier: Tier::Device,
        parent: None,
        namespace: None,
        blocks: same.collect(),
        copies: Copies::Single,
        source: None,
    });
    let told = index.apply(&Event { of, change });
    assert_eq!(told.stored_blocks, blocks);
    index.apply(&run(other, None, 0..3));
    let told = index.apply(&gone(of, 7..8));
    assert_eq!(told.removed_blocks, blocks);
    assert!(index.held(of).is_empty());
    assert_eq!(index.held(other).len(), 3);
    index.check().unwrap();
}
