//! The index and the naive one beside Dynamo's `RadixTree` over random histories.
//!
//! All three answer alike while each rank loses its blocks from the tail, as engines do; the histories here
//! keep to that. Where they differ on purpose:
//! - A block goes out of the middle: the tree forgets what lies behind it, we keep it, and it counts again
//!   when the block comes back (`b07...` in `cases.rs`; `a_hole_that_is_filled_unlike_the_tree` in
//!   `dynamo_pool.rs`).
//! - Two physical copies: the tree knows one and loses the block with the first removal, we count (`b07`).
//! - One name for two contents: the tree goes on behind the last one, we refuse children of it
//!   (`a_parent_of_two_contents_unlike_the_tree`).
//! - A block that names itself as its parent, or a name twice in one run: the tree is protected from them by
//!   the decoder before it; the index refuses the first and survives the second.
//! - A rank must be admitted here; the tree takes events of anybody.

use std::collections::BTreeSet;

use dynamo_kv_router::indexer::RadixTree;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use kvdelta_indexer::{
    BlockHash, BlockSize, Change, Copies, EngineHash, Event, Index, Naive, Prompt, Stored,
    StoredBlock, Tier, WorkerRank, next_sequence_hash,
};
use proptest::prelude::*;

const RANKS: [WorkerRank; 4] = [
    WorkerRank::new(1, 0),
    WorkerRank::new(1, 1),
    WorkerRank::new(2, 0),
    WorkerRank::new(3, 0),
];

/// A prefix by the content of its blocks.
type Path = Vec<u8>;

#[derive(Clone, Debug)]
enum Step {
    /// Stores `run` behind the first `keep` blocks of a path that the rank holds, or of any path.
    Store {
        rank: usize,
        base: prop::sample::Index,
        keep: usize,
        run: Path,
        anywhere: bool,
    },
    /// The same event once more.
    Repeat,
    /// Removes the last blocks of a path to which nothing is joined.
    Evict {
        rank: usize,
        leaf: prop::sample::Index,
        count: usize,
    },
    Clear(usize),
    /// The worker restarts under the same id: all of its ranks are forgotten.
    Restart(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rank = 0..RANKS.len();
    let run = prop::collection::vec(0_u8..3, 1..40);
    let step = prop_oneof![
        12 => (rank.clone(), any::<prop::sample::Index>(), 0_usize..50, run, prop::bool::weighted(0.1))
            .prop_map(|(rank, base, keep, run, anywhere)| Step::Store { rank, base, keep, run, anywhere }),
        2 => Just(Step::Repeat),
        8 => (rank.clone(), any::<prop::sample::Index>(), 1_usize..12)
            .prop_map(|(rank, leaf, count)| Step::Evict { rank, leaf, count }),
        1 => rank.prop_map(Step::Clear),
        1 => (1_u64..4).prop_map(Step::Restart),
    ];
    prop::collection::vec(step, 1..80)
}

fn block(content: u8) -> BlockHash {
    BlockHash(0x9E37_79B9 * (u64::from(content) + 1))
}

fn name(path: &[u8]) -> EngineHash {
    let chain = path.iter().fold(None, |parent, content| {
        Some(next_sequence_hash(parent, block(*content)))
    });
    EngineHash(chain.unwrap().0)
}

/// The three, and what each rank must hold.
struct Three {
    index: Index,
    naive: Naive,
    tree: RadixTree,
    held: Vec<BTreeSet<Path>>,
    last: Option<(usize, Path, Path)>,
}

impl Three {
    fn new() -> Self {
        let three = Self {
            index: Index::new(BlockSize::try_from(16).unwrap()),
            naive: Naive::default(),
            tree: RadixTree::new(),
            held: vec![BTreeSet::new(); RANKS.len()],
            last: None,
        };
        three.admitted()
    }

    fn admitted(mut self) -> Self {
        for of in RANKS {
            self.index.admit(of);
            self.naive.admit(of);
        }
        self
    }

    fn tree_event(&mut self, of: WorkerRank, data: KvCacheEventData) -> bool {
        let event = KvCacheEvent {
            event_id: 0,
            data,
            dp_rank: of.rank.0,
        };
        let event = RouterEvent::new(of.worker.0, event);
        self.tree.apply_event(event).is_ok()
    }

    fn change(&mut self, of: WorkerRank, change: Change) -> bool {
        let event = Event { of, change };
        let applied = self.index.apply(&event);
        assert_eq!(applied, self.naive.apply(&event));
        applied.refused.is_none()
    }

    fn store(&mut self, rank: usize, parent: &[u8], run: &[u8]) {
        let path = [parent, run].concat();
        let ends = parent.len() + 1..=path.len();
        let blocks: Vec<_> = ends
            .clone()
            .map(|end| StoredBlock {
                block: block(path[end - 1]),
                engine: name(&path[..end]),
            })
            .collect();
        let data = KvCacheStoreData {
            parent_hash: (!parent.is_empty()).then(|| ExternalSequenceBlockHash(name(parent).0)),
            start_position: None,
            blocks: blocks
                .iter()
                .map(|block| KvCacheStoredBlockData {
                    block_hash: ExternalSequenceBlockHash(block.engine.0),
                    tokens_hash: LocalBlockHash(block.block.0),
                    mm_extra_info: None,
                })
                .collect(),
        };
        let stored = Stored {
            tier: Tier::Device,
            parent: (!parent.is_empty()).then(|| name(parent)),
            namespace: None,
            blocks,
            copies: Copies::Single,
            source: None,
        };
        let taken = self.change(RANKS[rank], Change::Stored(stored));
        let by_tree = self.tree_event(RANKS[rank], KvCacheEventData::Stored(data));
        assert_eq!(taken, by_tree, "parent {parent:?}");
        assert_eq!(taken, parent.is_empty() || self.held[rank].contains(parent));
        if taken {
            self.held[rank].extend(ends.map(|end| path[..end].to_vec()));
        }
        self.last = Some((rank, parent.to_vec(), run.to_vec()));
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Store {
                rank,
                base,
                keep,
                run,
                anywhere,
            } => {
                let held: Vec<Path> = if anywhere {
                    self.held.iter().flatten().cloned().collect()
                } else {
                    self.held[rank].iter().cloned().collect()
                };
                let base = match held.is_empty() {
                    true => Path::new(),
                    false => base.get(&held).clone(),
                };
                let keep = keep.min(base.len());
                self.store(rank, &base[..keep], &run);
            }
            Step::Repeat => {
                if let Some((rank, parent, run)) = self.last.clone() {
                    self.store(rank, &parent, &run);
                }
            }
            Step::Evict { rank, leaf, count } => {
                let held = &self.held[rank];
                let joined = |path: &Path| {
                    held.iter()
                        .any(|other| other.len() > path.len() && other.starts_with(path))
                };
                let leaves: Vec<&Path> = held.iter().filter(|path| !joined(path)).collect();
                if leaves.is_empty() {
                    return;
                }
                let mut path = (*leaf.get(&leaves)).clone();
                let mut names = Vec::new();
                for _ in 0..count {
                    let joined = self.held[rank]
                        .iter()
                        .any(|other| other.len() > path.len() && other.starts_with(&path));
                    if path.is_empty() || joined {
                        break;
                    }
                    names.push(name(&path));
                    self.held[rank].remove(&path);
                    path.pop();
                }
                let data = KvCacheRemoveData {
                    block_hashes: names
                        .iter()
                        .map(|n| ExternalSequenceBlockHash(n.0))
                        .collect(),
                };
                self.tree_event(RANKS[rank], KvCacheEventData::Removed(data));
                let change = Change::Removed {
                    tier: Tier::Device,
                    engine_hashes: names,
                };
                self.change(RANKS[rank], change);
            }
            Step::Clear(rank) => {
                self.held[rank].clear();
                self.tree_event(RANKS[rank], KvCacheEventData::Cleared);
                self.change(RANKS[rank], Change::Cleared);
            }
            Step::Restart(worker) => {
                self.tree.remove_worker(worker);
                self.index.remove_worker(kvdelta_indexer::WorkerId(worker));
                for (of, held) in RANKS.iter().zip(&mut self.held) {
                    if of.worker.0 == worker {
                        held.clear();
                        self.naive.remove_rank(*of);
                        self.index.admit(*of);
                        self.naive.admit(*of);
                    }
                }
            }
        }
    }

    fn compare(&self, prompt: &[u8]) {
        let hashes: Vec<BlockHash> = prompt.iter().map(|content| block(*content)).collect();
        let local = hashes.iter().map(|hash| LocalBlockHash(hash.0)).collect();
        let scores = self.tree.find_matches(local, false).scores;
        let mut asked = Prompt::hashed(hashes.clone(), self.index.block_size());
        let ours = self.index.overlaps(&mut asked);
        for (of, held) in RANKS.iter().zip(&self.held) {
            let right = (1..=prompt.len())
                .take_while(|end| held.contains(&prompt[..*end]))
                .count();
            let by_tree = scores
                .iter()
                .find(|(rank, _)| (rank.worker_id, rank.dp_rank) == (of.worker.0, of.rank.0));
            assert_eq!(
                by_tree.map_or(0, |(_, blocks)| *blocks as usize),
                right,
                "tree, {of}"
            );
            let by_us = ours.iter().find(|one| one.of == *of);
            assert_eq!(by_us.map_or(0, |one| one.blocks), right, "index, {of}");
            assert_eq!(
                by_us.copied(),
                self.naive.overlap_of(*of, Tier::Device, &hashes)
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn random_histories_give_what_the_radix_tree_gives(
        steps in steps(),
        strangers in prop::collection::vec(prop::collection::vec(0_u8..3, 0..60), 3),
    ) {
        let mut three = Three::new();
        for step in steps {
            three.take(step);
        }
        three.index.check().map_err(TestCaseError::fail)?;
        let held: Vec<Path> = three.held.iter().flatten().cloned().collect();
        for path in held.iter().step_by(7).chain(&strangers) {
            three.compare(path);
            three.compare(&[path.as_slice(), &[0, 1, 2]].concat());
        }
    }
}
