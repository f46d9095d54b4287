//! Public faults of systems like this one that the index must survive, each with the right value, on the
//! index and on the naive one. Their decoding is in `wire/cases.rs`, their streams and trust in
//! `src/ingest`.

use kvdelta_indexer::{
    Applied, BlockSize, Change, Copies, EngineHash, Event, Index, Naive, Prompt, PromptOf, Refused,
    Stored, StoredBlock, Tier, WorkerRank, block_hashes,
};

const BLOCK: u32 = 4;
const W1: WorkerRank = WorkerRank::new(1, 0);
const W1_RANK_1: WorkerRank = WorkerRank::new(1, 1);

fn size() -> BlockSize {
    BlockSize::try_from(BLOCK).unwrap()
}

/// Both indexes, which must always agree.
struct Both {
    index: Index,
    naive: Naive,
}

impl Both {
    fn of(ranks: &[WorkerRank]) -> Self {
        let mut both = Self {
            index: Index::new(size()),
            naive: Naive::default(),
        };
        for rank in ranks {
            both.index.admit(*rank);
            both.naive.admit(*rank);
        }
        both
    }

    fn apply(&mut self, of: WorkerRank, change: Change) -> Applied {
        let event = Event { of, change };
        let applied = self.index.apply(&event);
        assert_eq!(applied, self.naive.apply(&event), "{event:?}");
        self.index.check().unwrap();
        applied
    }

    /// Stores whole blocks of `tokens`, named `names`, after the block named `parent`.
    fn store(
        &mut self,
        of: WorkerRank,
        names: &[u64],
        parent: Option<u64>,
        tokens: &[u32],
    ) -> Applied {
        let blocks = block_hashes(tokens, size(), PromptOf::default());
        assert_eq!(blocks.len(), names.len());
        let blocks = blocks
            .into_iter()
            .zip(names)
            .map(|(block, name)| StoredBlock {
                block,
                engine: EngineHash(*name),
            });
        let stored = Stored {
            tier: Tier::Device,
            parent: parent.map(EngineHash),
            namespace: Some(PromptOf::default().namespace),
            blocks: blocks.collect(),
            copies: Copies::Counted,
            source: None,
        };
        self.apply(of, Change::Stored(stored))
    }

    fn remove(&mut self, of: WorkerRank, tier: Tier, names: &[u64]) -> Applied {
        let engine_hashes = names.iter().copied().map(EngineHash).collect();
        self.apply(
            of,
            Change::Removed {
                tier,
                engine_hashes,
            },
        )
    }

    fn place(&mut self, of: WorkerRank, tier: Tier, names: &[u64]) -> Applied {
        let engine_hashes = names.iter().copied().map(EngineHash).collect();
        self.apply(
            of,
            Change::Placed {
                tier,
                engine_hashes,
            },
        )
    }

    /// Blocks that `of` holds of a prompt in device memory.
    fn query(&self, of: WorkerRank, tokens: &[u32]) -> usize {
        self.query_tier(of, Tier::Device, tokens)
    }

    fn query_tier(&self, of: WorkerRank, tier: Tier, tokens: &[u32]) -> usize {
        let mut prompt = Prompt::new(tokens, size(), PromptOf::default());
        let one = self.index.overlap_of(of, tier, &mut prompt);
        let all = self.index.overlaps(&mut prompt);
        let listed = all.into_iter().find(|one| (one.of, one.tier) == (of, tier));
        assert_eq!(one, listed);
        let hashes = block_hashes(tokens, size(), PromptOf::default());
        assert_eq!(one, self.naive.overlap_of(of, tier, &hashes));
        one.map_or(0, |one| one.blocks)
    }
}

fn tokens(range: std::ops::RangeInclusive<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn b07_the_first_of_two_copies_goes_and_the_second_counts() {
    let mut both = Both::of(&[W1]);
    both.store(W1, &[1, 2, 3], None, &tokens(1..=12));
    assert_eq!(
        both.store(W1, &[3], Some(2), &tokens(9..=12))
            .repeated_blocks,
        1
    );
    both.store(W1, &[4], Some(3), &tokens(13..=16));
    assert_eq!(both.remove(W1, Tier::Device, &[3]).removed_blocks, 0);
    assert_eq!(both.query(W1, &tokens(1..=16)), 4);
    both.remove(W1, Tier::Device, &[3]);
    assert_eq!(both.query(W1, &tokens(1..=16)), 2);
    let unknown = both.remove(W1, Tier::Device, &[3, 77]);
    assert_eq!((unknown.removed_blocks, unknown.unknown_blocks), (0, 2));
    // The block comes back, and what lies behind it counts again.
    both.store(W1, &[3], Some(2), &tokens(9..=12));
    assert_eq!(both.query(W1, &tokens(1..=16)), 4);
}

#[test]
fn b08_a_clear_empties_its_rank_with_copies_and_tiers_and_no_other() {
    let mut both = Both::of(&[W1, W1_RANK_1]);
    for rank in [W1, W1_RANK_1] {
        both.store(rank, &[1, 2], None, &tokens(1..=8));
        both.store(rank, &[1], None, &tokens(1..=4));
        both.place(rank, Tier::Host, &[1]);
    }
    assert_eq!(both.apply(W1, Change::Cleared).removed_blocks, 3);
    assert_eq!(both.query(W1, &tokens(1..=8)), 0);
    assert_eq!(both.query_tier(W1, Tier::Host, &tokens(1..=8)), 0);
    assert_eq!(both.query(W1_RANK_1, &tokens(1..=8)), 2);
    both.store(W1, &[1], None, &tokens(1..=4));
    assert_eq!(both.query(W1, &tokens(1..=8)), 1);
    // No copy outlived the clear.
    both.remove(W1, Tier::Device, &[1]);
    assert_eq!(both.query(W1, &tokens(1..=8)), 0);
}

#[test]
fn b10_a_child_of_a_removed_or_unknown_parent_is_no_bridge() {
    let prompt = [tokens(1..=8), tokens(13..=16)].concat();
    let mut both = Both::of(&[W1]);
    both.store(W1, &[1, 2, 3], None, &tokens(1..=12));
    both.remove(W1, Tier::Device, &[1, 2, 3]);
    let child = both.store(W1, &[4], Some(2), &tokens(13..=16));
    assert_eq!(child.refused, Some(Refused::UnknownParent));
    assert_eq!(both.query(W1, &prompt), 0);
    both.store(W1, &[1, 2], None, &tokens(1..=8));
    assert_eq!(both.query(W1, &prompt), 2);

    let mut first = Both::of(&[W1]);
    let child = first.store(W1, &[4], Some(2), &tokens(13..=16));
    assert_eq!(child.refused, Some(Refused::UnknownParent));
    assert_eq!(first.query(W1, &prompt), 0);
    // Another rank that knows the parent does not help.
    let mut two = Both::of(&[W1, W1_RANK_1]);
    two.store(W1_RANK_1, &[1, 2], None, &tokens(1..=8));
    let child = two.store(W1, &[4], Some(2), &tokens(13..=16));
    assert_eq!(child.refused, Some(Refused::UnknownParent));
    assert_eq!(
        (two.query(W1, &prompt), two.query(W1_RANK_1, &prompt)),
        (0, 2)
    );
}

#[test]
fn b10_a_block_that_names_itself_as_its_parent_is_refused() {
    let mut both = Both::of(&[W1]);
    both.store(W1, &[1], None, &tokens(1..=4));
    let own = both.store(W1, &[1], Some(1), &tokens(5..=8));
    assert_eq!(own.refused, Some(Refused::SelfParent));
    assert_eq!(both.query(W1, &tokens(1..=8)), 1);
}

#[test]
fn b13_only_device_memory_counts_whatever_leaves_first() {
    for device_first in [false, true] {
        let mut both = Both::of(&[W1]);
        both.store(W1, &[1], None, &tokens(1..=4));
        assert_eq!(both.place(W1, Tier::Host, &[1]).stored_blocks, 1);
        let order = match device_first {
            true => [(Tier::Device, 0), (Tier::Host, 0)],
            false => [(Tier::Host, 1), (Tier::Device, 0)],
        };
        for (tier, right) in order {
            both.remove(W1, tier, &[1]);
            assert_eq!(both.query(W1, &tokens(1..=4)), right, "after {tier:?}");
        }
        // Nothing of it is known any more, so nothing can be placed.
        assert_eq!(both.place(W1, Tier::Host, &[1]).unknown_blocks, 1);
    }
}

#[test]
fn b14_ranks_of_a_worker_are_apart() {
    let mut both = Both::of(&[W1, W1_RANK_1]);
    both.store(W1_RANK_1, &[1], None, &tokens(1..=4));
    assert_eq!(both.query(W1, &tokens(1..=4)), 0);
    assert_eq!(both.query(W1_RANK_1, &tokens(1..=4)), 1);
    assert!(both.index.remove_rank(W1));
    assert_eq!(both.index.ranks(), [W1_RANK_1]);
}

#[test]
fn engines_with_other_names_for_the_same_content_keep_theirs() {
    let mut both = Both::of(&[W1, W1_RANK_1]);
    both.store(W1, &[1, 2], None, &tokens(1..=8));
    both.store(W1_RANK_1, &[11, 12], None, &tokens(1..=8));
    let mut prompt = Prompt::new(&[1, 2, 3, 4, 5, 6, 7, 8], size(), PromptOf::default());
    let names: Vec<_> = [W1, W1_RANK_1]
        .iter()
        .filter_map(|of| both.index.overlap_of(*of, Tier::Device, &mut prompt))
        .map(|one| one.engine.0)
        .collect();
    assert_eq!(names, [2, 12]);
    both.remove(W1, Tier::Device, &[12, 2]);
    assert_eq!(both.query(W1, &tokens(1..=8)), 1);
    assert_eq!(both.query(W1_RANK_1, &tokens(1..=8)), 2);
}

#[test]
fn extreme_names_and_sizes_touch_nobody_else() {
    assert!(BlockSize::try_from(0).is_err());
    let mut both = Both::of(&[W1, W1_RANK_1]);
    both.store(W1_RANK_1, &[1, 2], None, &tokens(1..=8));
    // All blocks under one name, which is also the largest.
    both.store(W1, &[u64::MAX, u64::MAX], None, &tokens(1..=8));
    assert_eq!(both.query(W1, &tokens(1..=8)), 2);
    let child = both.store(W1, &[5], Some(u64::MAX), &tokens(9..=12));
    assert_eq!(child.refused, Some(Refused::AmbiguousParent));
    both.remove(W1, Tier::Device, &[u64::MAX]);
    assert_eq!(both.query(W1, &tokens(1..=8)), 0);
    assert_eq!(both.query(W1_RANK_1, &tokens(1..=8)), 2);

    let index = Index::new(size());
    for worker in 0..10_000 {
        let of = WorkerRank::new(worker, 0);
        index.admit(of);
        let change = Change::Stored(Stored {
            tier: Tier::Device,
            parent: None,
            namespace: None,
            blocks: block_hashes(&tokens(1..=8), size(), PromptOf::default())
                .into_iter()
                .map(|block| StoredBlock {
                    block,
                    engine: EngineHash(block.0),
                })
                .collect(),
            copies: Copies::Single,
            source: None,
        });
        assert_eq!(index.apply(&Event { of, change }).stored_blocks, 2);
    }
    let all = tokens(1..=8);
    let mut prompt = Prompt::new(&all, size(), PromptOf::default());
    assert_eq!(index.overlaps(&mut prompt).len(), 10_000);
    for worker in (0..10_000).step_by(2) {
        assert!(index.remove_rank(WorkerRank::new(worker, 0)));
    }
    let left = index.overlaps(&mut prompt);
    assert_eq!(left.len(), 5_000);
    assert!(
        left.iter()
            .all(|one| one.of.worker.0 % 2 == 1 && one.blocks == 2)
    );

    let million: Vec<u32> = (0..4_000_000).collect();
    let names: Vec<u64> = (0..1_000_000).collect();
    let mut one = Both::of(&[W1]);
    one.naive = Naive::default();
    let blocks = block_hashes(&million, size(), PromptOf::default());
    let change = Change::Stored(Stored {
        tier: Tier::Device,
        parent: None,
        namespace: None,
        blocks: blocks
            .iter()
            .zip(&names)
            .map(|(block, name)| StoredBlock {
                block: *block,
                engine: EngineHash(*name),
            })
            .collect(),
        copies: Copies::Single,
        source: None,
    });
    assert_eq!(
        one.index.apply(&Event { of: W1, change }).stored_blocks,
        1_000_000
    );
    let mut prompt = Prompt::hashed(blocks, size());
    assert_eq!(one.index.overlaps(&mut prompt)[0].blocks, 1_000_000);
}
