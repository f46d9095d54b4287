//! The index in Dynamo's thread pool beside Dynamo's own tree.
//!
//! The two answer alike as long as blocks leave from the tail of their runs, which is what engines do.
//! Where they differ stands in the tests named `..._unlike_the_tree`, with both answers.

use std::collections::{BTreeMap, BTreeSet};

use dynamo_kv_router::indexer::{KvIndexerInterface, KvRouterError, SyncIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, ResidencyDomain, RouterEvent, StorageTier,
    WorkerWithDpRank, compute_seq_hash_for_block,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, ThreadPoolIndexer};
use kvdelta_indexer::dynamo::{DecodeIndex, event_of, router_event};
use kvdelta_indexer::{BlockSize, Change, Event, Tier, WorkerRank};
use proptest::prelude::*;

const BLOCK_SIZE: u32 = 16;
/// More lanes than one, so that the ranks of a worker are on different ones.
const LANES: usize = 2;

type Ours = ThreadPoolIndexer<DecodeIndex>;
type Tree = ThreadPoolIndexer<ConcurrentRadixTreeCompressed>;
/// A prefix, by the content of its blocks.
type Path = Vec<u8>;
type Answer = BTreeMap<WorkerWithDpRank, (u32, Option<ExternalSequenceBlockHash>)>;

fn ours() -> Ours {
    let size = BlockSize::try_from(BLOCK_SIZE).unwrap();
    ThreadPoolIndexer::new(DecodeIndex::new(size), LANES, BLOCK_SIZE)
}

fn tree() -> Tree {
    ThreadPoolIndexer::new(ConcurrentRadixTreeCompressed::new(), LANES, BLOCK_SIZE)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.build().unwrap().block_on(future)
}

fn local(path: &[u8]) -> Vec<LocalBlockHash> {
    let hash = |content: &u8| LocalBlockHash(u64::from(*content) * 1_000_003);
    path.iter().map(hash).collect()
}

fn engine(path: &[u8]) -> Option<ExternalSequenceBlockHash> {
    let chain = compute_seq_hash_for_block(&local(path));
    chain.last().map(|hash| ExternalSequenceBlockHash(*hash))
}

fn event(of: WorkerWithDpRank, data: KvCacheEventData) -> RouterEvent {
    let event = KvCacheEvent {
        event_id: 0,
        data,
        dp_rank: of.dp_rank,
    };
    RouterEvent::new(of.worker_id, event)
}

fn stored(of: WorkerWithDpRank, parent: &[u8], blocks: &[u8]) -> RouterEvent {
    let path = [parent, blocks].concat();
    let block = |end: usize| KvCacheStoredBlockData {
        block_hash: engine(&path[..end]).unwrap(),
        tokens_hash: local(&path)[end - 1],
        mm_extra_info: None,
    };
    let data = KvCacheStoreData {
        parent_hash: engine(parent),
        start_position: None,
        blocks: (parent.len() + 1..=path.len()).map(block).collect(),
    };
    event(of, KvCacheEventData::Stored(data))
}

fn removed(of: WorkerWithDpRank, paths: &[&[u8]]) -> RouterEvent {
    let block_hashes = paths.iter().map(|path| engine(path).unwrap()).collect();
    event(
        of,
        KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }),
    )
}

fn cleared(of: WorkerWithDpRank) -> RouterEvent {
    event(of, KvCacheEventData::Cleared)
}

async fn answer_of_ours(pool: &Ours, prompt: &[u8]) -> Answer {
    let details = pool.backend().find_match_details(local(prompt));
    let scores = pool.find_matches(local(prompt)).await.unwrap().scores;
    assert_eq!(scores, details.overlap_scores.scores);
    let hashes = details.last_matched_hashes;
    let hash = |worker| hashes.get(&worker).copied();
    scores
        .into_iter()
        .map(|(worker, blocks)| (worker, (blocks, hash(worker))))
        .collect()
}

fn answer_of_tree(pool: &Tree, prompt: &[u8]) -> Answer {
    let details = pool
        .backend()
        .find_match_details_impl(&local(prompt), false);
    let hashes = details.last_matched_hashes;
    let hash = |worker| hashes.get(&worker).copied();
    let scores = details.overlap_scores.scores;
    scores
        .into_iter()
        .map(|(worker, blocks)| (worker, (blocks, hash(worker))))
        .collect()
}

#[derive(Clone, Debug)]
enum Step {
    /// Stores `blocks` behind one of the prefixes that the rank holds, or from the start.
    Store {
        rank: usize,
        behind: usize,
        blocks: Vec<u8>,
    },
    /// Removes that many blocks, none of which has a child left, in one event.
    Evict {
        rank: usize,
        from: usize,
        blocks: usize,
    },
    /// Removes blocks that the rank does not hold.
    EvictUnknown {
        rank: usize,
        path: Path,
    },
    Clear {
        rank: usize,
    },
    RemoveRank {
        rank: usize,
    },
    ResetRank {
        rank: usize,
    },
    RemoveWorker {
        rank: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let rank = 0..ranks().len();
    let blocks = || prop::collection::vec(1..4u8, 1..5);
    prop_oneof![
        8 => (rank.clone(), any::<usize>(), blocks())
            .prop_map(|(rank, behind, blocks)| Step::Store { rank, behind, blocks }),
        6 => (rank.clone(), any::<usize>(), 1..6usize)
            .prop_map(|(rank, from, blocks)| Step::Evict { rank, from, blocks }),
        1 => (rank.clone(), blocks()).prop_map(|(rank, path)| Step::EvictUnknown { rank, path }),
        1 => rank.clone().prop_map(|rank| Step::Clear { rank }),
        1 => rank.clone().prop_map(|rank| Step::RemoveRank { rank }),
        1 => rank.clone().prop_map(|rank| Step::ResetRank { rank }),
        1 => rank.prop_map(|rank| Step::RemoveWorker { rank }),
    ]
}

fn ranks() -> Vec<WorkerWithDpRank> {
    [(1, 0), (1, 1), (2, 0), (u64::MAX, 3)]
        .map(|(worker, rank)| WorkerWithDpRank::new(worker, rank))
        .to_vec()
}

/// Both pools, and what every rank holds.
struct Pools {
    ours: Ours,
    tree: Tree,
    held: BTreeMap<WorkerWithDpRank, BTreeSet<Path>>,
}

impl Pools {
    fn new() -> Self {
        Self {
            ours: ours(),
            tree: tree(),
            held: BTreeMap::new(),
        }
    }

    async fn send(&self, event: RouterEvent) {
        self.ours.apply_event(event.clone()).await;
        self.tree.apply_event(event).await;
    }

    async fn take(&mut self, step: Step) {
        match step {
            Step::Store {
                rank,
                behind,
                blocks,
            } => {
                let of = ranks()[rank];
                let held = self.held.entry(of).or_default();
                let parent = held.iter().nth(behind % (held.len() + 1));
                let parent = parent.cloned().unwrap_or_default();
                for end in 1..=blocks.len() {
                    held.insert([&parent[..], &blocks[..end]].concat());
                }
                self.send(stored(of, &parent, &blocks)).await;
            }
            Step::Evict { rank, from, blocks } => {
                let of = ranks()[rank];
                let mut gone: Vec<Path> = Vec::new();
                if let Some(held) = self.held.get_mut(&of) {
                    for _ in 0..blocks {
                        let has_child = |path: &Path| {
                            let child = held.range(path.clone()..).nth(1);
                            child.is_some_and(|child| child.starts_with(path))
                        };
                        let tails: Vec<_> = held.iter().filter(|path| !has_child(path)).collect();
                        if tails.is_empty() {
                            break;
                        }
                        let path = tails[from % tails.len()].clone();
                        held.remove(&path);
                        gone.push(path);
                    }
                }
                let gone: Vec<&[u8]> = gone.iter().map(Vec::as_slice).collect();
                self.send(removed(of, &gone)).await;
            }
            Step::EvictUnknown { rank, path } => {
                let of = ranks()[rank];
                if !self.held.get(&of).is_some_and(|held| held.contains(&path)) {
                    self.send(removed(of, &[&path])).await;
                }
            }
            Step::Clear { rank } => {
                self.held.remove(&ranks()[rank]);
                self.send(cleared(ranks()[rank])).await;
            }
            Step::RemoveRank { rank } => {
                let of = ranks()[rank];
                self.held.remove(&of);
                let (worker, rank) = (of.worker_id, of.dp_rank);
                self.ours.remove_worker_dp_rank(worker, rank).await;
                self.tree.remove_worker_dp_rank(worker, rank).await;
            }
            Step::ResetRank { rank } => {
                let of = ranks()[rank];
                self.held.remove(&of);
                let (worker, rank) = (of.worker_id, of.dp_rank);
                let ours = self.ours.reset_worker_dp_rank_and_wait(worker, rank);
                ours.await.unwrap();
                let tree = self.tree.reset_worker_dp_rank_and_wait(worker, rank);
                tree.await.unwrap();
            }
            Step::RemoveWorker { rank } => {
                let worker = ranks()[rank].worker_id;
                self.held.retain(|of, _| of.worker_id != worker);
                self.ours.remove_worker(worker).await;
                self.tree.remove_worker(worker).await;
            }
        }
    }

    fn prompts(&self) -> Vec<Path> {
        let held = self.held.values().flatten();
        // A little longer than what is held, and something that nobody holds.
        let mut prompts: Vec<Path> = held.map(|path| [&path[..], &[2]].concat()).collect();
        prompts.extend([vec![], vec![3, 3, 3, 3, 3, 3]]);
        prompts
    }

    fn expected(&self, prompt: &[u8]) -> Answer {
        let mut answer = Answer::new();
        for (of, held) in &self.held {
            let is_held = |end: &usize| held.contains(&prompt[..*end]);
            let blocks = (1..=prompt.len()).take_while(is_held).count();
            if blocks > 0 {
                let score = u32::try_from(blocks).unwrap();
                answer.insert(*of, (score, engine(&prompt[..blocks])));
            }
        }
        answer
    }

    async fn check(&self, ours: &Ours, tree: &Tree) {
        ours.flush_and_wait().await.unwrap();
        tree.flush_and_wait().await.unwrap();
        for prompt in self.prompts() {
            let expected = self.expected(&prompt);
            assert_eq!(answer_of_ours(ours, &prompt).await, expected, "{prompt:?}");
            assert_eq!(answer_of_tree(tree, &prompt), expected, "{prompt:?}");
        }
        let counted = |held: &BTreeSet<Path>| held.len();
        let blocks: usize = self.held.values().map(counted).sum();
        assert_eq!(ours.shard_sizes().await[0].block_count, blocks);
        let workers = self.held.iter().filter(|(_, held)| !held.is_empty());
        let workers: BTreeSet<u64> = workers.map(|(of, _)| of.worker_id).collect();
        assert_eq!(ours.get_workers().await, Vec::from_iter(workers));
    }

    /// What one pool tells makes another, of either kind, answer alike.
    async fn check_dumps(&self) {
        let dump_of_ours = self.ours.dump_events().await.unwrap();
        let dump_of_tree = self.tree.dump_events().await.unwrap();
        for dump in [dump_of_ours, dump_of_tree] {
            let (ours, tree) = (ours(), tree());
            for event in dump {
                ours.apply_event_and_wait(event.clone()).await.unwrap();
                tree.apply_event_and_wait(event).await.unwrap();
            }
            self.check(&ours, &tree).await;
        }
    }
}

proptest! {
    // A failing history is printed; proptest finds no place for its file of seeds from here.
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn random_histories_give_what_the_tree_gives(
        steps in prop::collection::vec(step(), 1..48),
    ) {
        block_on(async {
            let mut pools = Pools::new();
            for step in steps {
                pools.take(step).await;
                pools.check(&pools.ours, &pools.tree).await;
            }
            pools.check_dumps().await;
        });
    }
}

const W: WorkerWithDpRank = WorkerWithDpRank {
    worker_id: 1,
    dp_rank: 0,
};

/// Blocks that `W` holds of `prompt` by our index and by the tree, after these events.
async fn blocks_of_both(events: Vec<RouterEvent>, prompt: &[u8]) -> (u32, u32) {
    let pools = Pools::new();
    for event in events {
        pools.send(event).await;
    }
    pools.ours.flush_and_wait().await.unwrap();
    pools.tree.flush_and_wait().await.unwrap();
    let ours = answer_of_ours(&pools.ours, prompt).await;
    let tree = answer_of_tree(&pools.tree, prompt);
    let blocks = |answer: &Answer| answer.get(&W).map_or(0, |(blocks, _)| *blocks);
    (blocks(&ours), blocks(&tree))
}

/// The store `event` with the engine's hash of its block `block` in place of that of `of`.
fn with_hash_of(mut event: RouterEvent, block: usize, of: &[u8]) -> RouterEvent {
    if let KvCacheEventData::Stored(stored) = &mut event.event.data {
        stored.blocks[block].block_hash = engine(of).unwrap();
    }
    event
}

/// The tree keeps one length for a rank and an edge, so that a hole ends the edge for good; we keep every
/// block, so that what the engine still holds behind the hole counts again once the hole is filled.
#[test]
fn a_hole_that_is_filled_unlike_the_tree() {
    let run = stored(W, &[], &[1, 2, 3]);
    let hole = removed(W, &[&[1, 2]]);
    let behind = stored(W, &[1, 2, 3], &[4]);
    let filled = stored(W, &[1], &[2]);
    block_on(async {
        for (events, prompt, ours, tree) in [
            (vec![&run, &hole], [1, 2, 3, 4], 1, 1),
            (vec![&run, &hole, &filled], [1, 2, 3, 4], 3, 2),
            (vec![&run, &hole, &behind], [1, 2, 3, 4], 1, 1),
            (vec![&run, &hole, &behind, &filled], [1, 2, 3, 4], 4, 2),
        ] {
            let events = events.into_iter().cloned().collect();
            assert_eq!(blocks_of_both(events, &prompt).await, (ours, tree));
        }
    });
}

/// One hash for two contents: what follows it could be behind either, so it is refused; the tree puts it
/// behind the one that came last.
#[test]
fn a_parent_of_two_contents_unlike_the_tree() {
    let first = stored(W, &[], &[1]);
    let second = with_hash_of(stored(W, &[], &[9]), 0, &[1]);
    let child = stored(W, &[1], &[2, 3]);
    block_on(async {
        let events = vec![first, second, child];
        assert_eq!(blocks_of_both(events.clone(), &[1, 2, 3]).await, (1, 1));
        assert_eq!(blocks_of_both(events, &[9, 2, 3]).await, (1, 3));
    });
}

#[test]
fn a_store_behind_what_the_rank_does_not_hold_changes_nothing() {
    let unknown = stored(W, &[1], &[2, 3]);
    let root = stored(W, &[], &[1]);
    let late = stored(W, &[], &[1, 2]);
    let gone = removed(W, &[&[1, 2]]);
    block_on(async {
        for (events, blocks) in [(vec![&unknown, &root], 1), (vec![&late, &gone, &root], 1)] {
            let events = events.into_iter().cloned().collect();
            assert_eq!(blocks_of_both(events, &[1, 2, 3]).await, (blocks, blocks));
        }
        // A run that is its own parent.
        let mut own = stored(W, &[], &[1, 2, 3]);
        if let KvCacheEventData::Stored(stored) = &mut own.event.data {
            stored.parent_hash = engine(&[1, 2, 3]);
        }
        assert_eq!(blocks_of_both(vec![own], &[1, 2, 3]).await, (0, 0));
    });
}

#[test]
fn who_waits_for_an_event_is_told_whether_it_was_applied() {
    block_on(async {
        let pool = ours();
        let unknown = stored(W, &[1], &[2]);
        for (event, applied) in [
            (removed(W, &[&[1]]), false),
            (cleared(W), true),
            (unknown.clone(), false),
            (stored(W, &[], &[1]), true),
            (removed(W, &[&[7]]), true),
            (unknown, true),
        ] {
            let result = pool.apply_event_and_wait(event.clone()).await;
            assert_eq!(result.is_ok(), applied, "{event:?}: {result:?}");
        }
    });
}

/// Dynamo's pool has one queue for a rank. What was queued before a removal goes with it, what comes
/// after it is a new start: the interface has no call that says which of the two a store is.
#[test]
fn a_removal_takes_all_that_was_queued_before_it_and_nothing_else() {
    block_on(async {
        let pool = ours();
        let other = WorkerWithDpRank::new(2, 0);
        for round in 0..8 {
            for rank in 0..4 {
                let of = WorkerWithDpRank::new(1, rank);
                pool.apply_event(stored(of, &[], &[1, 2])).await;
            }
            pool.apply_event(stored(other, &[], &[1])).await;
            if round % 2 == 0 {
                pool.remove_worker(1).await;
            } else {
                for rank in 0..4 {
                    pool.reset_worker_dp_rank_and_wait(1, rank).await.unwrap();
                }
            }
            pool.flush_and_wait().await.unwrap();
            let scores = pool.find_matches(local(&[1, 2])).await.unwrap().scores;
            assert_eq!(Vec::from_iter(scores), [(other, 1)]);
            assert_eq!(pool.get_workers().await, [2]);
        }
        // A child of what was removed says nothing without its parent.
        pool.apply_event(stored(W, &[1, 2], &[3])).await;
        pool.flush_and_wait().await.unwrap();
        let scores = pool.find_matches(local(&[1, 2, 3])).await.unwrap().scores;
        assert_eq!(scores.get(&W), None);
        pool.apply_event(stored(W, &[], &[1])).await;
        pool.flush_and_wait().await.unwrap();
        let scores = pool.find_matches(local(&[1, 2, 3])).await.unwrap().scores;
        assert_eq!(scores.get(&W), Some(&1));
    });
}

#[test]
fn only_device_memory_counts_and_what_outlives_the_worker_is_refused() {
    block_on(async {
        let pool = ours();
        let on = |tier, event: RouterEvent| RouterEvent {
            storage_tier: tier,
            ..event
        };
        let run = stored(W, &[], &[1, 2]);
        let host = on(StorageTier::HostPinned, run.clone());
        pool.apply_event_and_wait(host.clone()).await.unwrap();
        let scores = pool.find_matches(local(&[1, 2])).await.unwrap().scores;
        assert!(scores.is_empty(), "{scores:?}");
        pool.apply_event_and_wait(run.clone()).await.unwrap();
        let away = on(StorageTier::HostPinned, removed(W, &[&[1], &[1, 2]]));
        pool.apply_event_and_wait(away).await.unwrap();
        let scores = pool.find_matches(local(&[1, 2])).await.unwrap().scores;
        assert_eq!(scores.get(&W), Some(&2));

        let external = on(StorageTier::External, run.clone());
        let of_owner = RouterEvent::with_residency_domain(
            W.worker_id,
            cleared(W).event,
            StorageTier::Device,
            ResidencyDomain::CacheOwner,
        );
        for event in [external, of_owner] {
            assert!(event_of(event.clone()).is_err(), "{event:?}");
            pool.apply_event_and_wait(event).await.unwrap_err();
        }
        let scores = pool.find_matches(local(&[1, 2])).await.unwrap().scores;
        assert_eq!(scores.get(&W), Some(&2));
    });
}

#[test]
fn an_event_comes_back_from_ours_as_it_was() {
    for event in [
        stored(W, &[1], &[2, 3]),
        stored(W, &[], &[]),
        removed(W, &[&[1], &[1, 2]]),
        cleared(W),
    ] {
        let ours = event_of(event.clone()).unwrap();
        assert_eq!(router_event(&ours, 0), Some(event));
    }
    let placed = Event {
        of: WorkerRank::new(1, 0),
        change: Change::Placed {
            tier: Tier::Host,
            engine_hashes: Vec::new(),
        },
    };
    assert_eq!(router_event(&placed, 0), None);
}

#[test]
fn tasks_of_other_backends_get_an_error_and_do_not_stop_the_lane() {
    block_on(async {
        let pool = ours();
        let stats = pool.approximate_lru_stats().await.unwrap();
        assert_eq!(stats.ranks, 0);
        assert!(pool.backend().supports_event_dump());
        pool.apply_event_and_wait(stored(W, &[], &[1]))
            .await
            .unwrap();
        pool.shutdown();
        let offline = pool.apply_event_and_wait(stored(W, &[], &[1])).await;
        assert!(matches!(offline, Err(KvRouterError::IndexerOffline)));
        // Reads need no lane.
        let scores = pool.find_matches(local(&[1])).await.unwrap().scores;
        assert_eq!(scores.get(&W), Some(&1));
    });
}

#[test]
#[should_panic(expected = "backend does not support routing-decision pruning")]
fn predicted_entries_are_not_let_in() {
    let backend = DecodeIndex::new(BlockSize::try_from(BLOCK_SIZE).unwrap());
    let ttl = std::time::Duration::from_secs(1);
    let prune = dynamo_kv_router::approx::PruneConfig { ttl };
    drop(ThreadPoolIndexer::new_with_pruning(
        backend, LANES, BLOCK_SIZE, prune,
    ));
}
