// SPDX-License-Identifier: Apache-2.0

//! The indexes under one interface, each fed and asked in the fastest way that it offers.

use std::fmt;

use clap::ValueEnum;
use dynamo_kv_router::indexer::positional::SearchMode;
use dynamo_kv_router::indexer::{KvIndexerInterface, SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    BlockHashOptions, ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData,
    KvCacheStoreData, KvCacheStoredBlockData, WorkerWithDpRank,
};
use dynamo_kv_router::{
    BranchShardedIndexer, ConcurrentRadixTreeCompressed, LocalBlockHash, OverlapScores,
    PositionalIndexer, RadixTree, RouterEvent, ThreadPoolIndexer, compute_block_hash_for_seq,
};
use kvdelta_indexer::{
    BlockHash, Copies, EngineHash, Event, Index, Overlap, Prompt, PromptOf, Stored, StoredBlock,
    Tier, WorkerRank, namespace,
};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::data::{BLOCK_TOKENS, Block, Change, Data, Recording, Step, WORKERS, size};
use crate::oracle::Overlaps;

/// An index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// kvdelta-indexer's `Index`.
    Kvdelta,
    /// `RadixTree`: one thread, no readers meanwhile.
    RadixTree,
    /// `ConcurrentRadixTreeCompressed`.
    Compressed,
    /// `PositionalIndexer`, strided search, strides of 32 as upstream's documents have it.
    Strided,
    /// `PositionalIndexer`, binary search.
    Binary,
    /// `BranchShardedIndexer` over two compressed trees, routed by two blocks.
    Sharded,
}

/// Who writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    /// The measured thread itself.
    Direct,
    /// The peer's own `ThreadPoolIndexer` of one thread; the measured thread only hands events over.
    Pool,
}

impl Contender {
    /// All of them, ours first.
    pub const ALL: [Self; 6] = [
        Self::Kvdelta,
        Self::RadixTree,
        Self::Compressed,
        Self::Strided,
        Self::Binary,
        Self::Sharded,
    ];

    /// Whether it answers readers while it is written to.
    pub fn serves_readers(self) -> bool {
        self != Self::RadixTree
    }

    /// In which ways events get into it.
    pub fn ways(self) -> &'static [Way] {
        match self {
            Self::Kvdelta | Self::RadixTree => &[Way::Direct],
            Self::Compressed | Self::Strided | Self::Binary => &[Way::Direct, Way::Pool],
            Self::Sharded => &[Way::Pool],
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(match self {
            Self::Kvdelta => "kvdelta",
            Self::RadixTree => "radix tree",
            Self::Compressed => "compressed",
            Self::Strided => "strided",
            Self::Binary => "binary",
            Self::Sharded => "sharded",
        })
    }
}

const STRIDE: usize = 32;
const SHARDS: usize = 2;
const ROUTED_BLOCKS: usize = 2;

fn positional(mode: SearchMode) -> PositionalIndexer {
    PositionalIndexer::new_with_mode(STRIDE, mode)
}

fn pool<T: SyncIndexer>(backend: T) -> ThreadPoolIndexer<T> {
    ThreadPoolIndexer::new(backend, 1, BLOCK_TOKENS)
}

/// A prompt in the form that a contender takes, its hashes already computed.
#[derive(Debug)]
pub enum Input {
    /// Ours.
    Prompt(Prompt<'static>),
    /// The peers'.
    Hashes(Vec<LocalBlockHash>),
}

impl Input {
    fn hashes(&mut self) -> &mut Vec<LocalBlockHash> {
        match self {
            Self::Hashes(hashes) => hashes,
            Self::Prompt(_) => unreachable!("made by ours only"),
        }
    }
}

/// An answer in the form that a contender gives it.
#[derive(Debug)]
pub enum Found {
    /// Ours.
    Overlaps(Vec<Overlap>),
    /// The peers'.
    Scores(OverlapScores),
}

impl Found {
    /// The same for all.
    pub fn overlaps(&self) -> Overlaps {
        match self {
            Self::Overlaps(all) => all
                .iter()
                .filter(|overlap| overlap.tier == Tier::Device)
                .map(|overlap| (worker_of(overlap.of.worker.0), overlap.blocks))
                .collect(),
            Self::Scores(scores) => scores
                .scores
                .iter()
                .filter(|(_, blocks)| **blocks > 0)
                .map(|(worker, blocks)| {
                    let blocks = usize::try_from(*blocks).expect("fits");
                    (worker_of(worker.worker_id), blocks)
                })
                .collect(),
        }
    }
}

/// What can be asked.
pub trait Reader {
    /// A prompt for `find`, which may use it up.
    fn input(&self, blocks: &[BlockHash]) -> Input {
        let hashes = blocks.iter().map(|block| LocalBlockHash(block.0));
        Input::Hashes(hashes.collect())
    }

    /// The overlaps of all workers.
    fn find(&self, input: &mut Input) -> Found;

    /// The overlaps of all workers, from tokens.
    fn find_tokens(&self, tokens: &[u32]) -> Found {
        self.find(&mut Input::Hashes(peers_hashes(tokens)))
    }
}

/// The peers' hashing.
pub fn peers_hashes(tokens: &[u32]) -> Vec<LocalBlockHash> {
    compute_block_hash_for_seq(tokens, BLOCK_TOKENS, BlockHashOptions::default())
}

impl Reader for Index {
    fn input(&self, blocks: &[BlockHash]) -> Input {
        Input::Prompt(Prompt::hashed(blocks.to_vec(), size()))
    }

    fn find(&self, input: &mut Input) -> Found {
        match input {
            Input::Prompt(prompt) => Found::Overlaps(self.overlaps(prompt)),
            Input::Hashes(_) => unreachable!("made by peers only"),
        }
    }

    fn find_tokens(&self, tokens: &[u32]) -> Found {
        let mut prompt = Prompt::new(tokens, size(), PromptOf::default());
        Found::Overlaps(self.overlaps(&mut prompt))
    }
}

impl Reader for RadixTree {
    fn find(&self, input: &mut Input) -> Found {
        let hashes = std::mem::take(input.hashes());
        Found::Scores(self.find_matches(hashes, false))
    }
}

/// A peer that is written to directly.
struct Direct<T>(T);

impl<T: SyncIndexer> Reader for Direct<T> {
    fn find(&self, input: &mut Input) -> Found {
        Found::Scores(self.0.find_matches(input.hashes(), false))
    }
}

impl<T: SyncIndexer> Reader for ThreadPoolIndexer<T> {
    fn find(&self, input: &mut Input) -> Found {
        Found::Scores(self.backend().find_matches(input.hashes(), false))
    }
}

type Shards = BranchShardedIndexer<ThreadPoolIndexer<ConcurrentRadixTreeCompressed>>;

impl Reader for Shards {
    fn find(&self, input: &mut Input) -> Found {
        let hashes = std::mem::take(input.hashes());
        // It never waits: shards within the process are read on the caller's thread.
        let scores = pollster::block_on(self.find_matches(hashes));
        Found::Scores(scores.expect("all shards run"))
    }
}

/// Watches one load of an index.
pub trait Watch {
    /// Runs `write`, which puts all events in and returns when they are visible.
    fn watch<R: Reader + Sync>(&mut self, reader: &R, write: impl FnOnce());

    /// Runs `write` of an index that nobody can read meanwhile.
    fn watch_alone(&mut self, write: impl FnOnce());
}

/// Loads `contender` with all of `recording`, events made beforehand, and returns it.
pub fn load(
    contender: Contender,
    way: Way,
    recording: &Recording,
    watch: &mut impl Watch,
) -> Box<dyn Reader> {
    match (contender, way) {
        (Contender::Kvdelta, _) => Box::new(load_kvdelta(recording, watch)),
        (Contender::RadixTree, _) => {
            let mut tree = RadixTree::new();
            let events = collected(recording, router_event);
            watch.watch_alone(|| {
                for event in events {
                    tree.apply_event(event).expect("the data is in order");
                }
            });
            Box::new(tree)
        }
        (Contender::Compressed, Way::Direct) => Box::new(Direct(load_compressed(recording, watch))),
        (Contender::Strided, Way::Direct) => load_positional(SearchMode::Strided, recording, watch),
        (Contender::Binary, Way::Direct) => load_positional(SearchMode::Binary, recording, watch),
        (Contender::Compressed, Way::Pool) => {
            load_pool(ConcurrentRadixTreeCompressed::new(), recording, watch)
        }
        (Contender::Strided, Way::Pool) => {
            load_pool(positional(SearchMode::Strided), recording, watch)
        }
        (Contender::Binary, Way::Pool) => {
            load_pool(positional(SearchMode::Binary), recording, watch)
        }
        (Contender::Sharded, _) => {
            let shards = sharded();
            let events = collected(recording, router_event);
            let runtime = runtime();
            watch.watch(&shards, || {
                runtime.block_on(async {
                    for event in events {
                        shards.apply_event(event).await;
                    }
                    KvIndexerInterface::flush(&shards).await;
                });
            });
            Box::new(shards)
        }
    }
}

/// Ours, loaded.
pub fn load_kvdelta(recording: &Recording, watch: &mut impl Watch) -> Index {
    let index = empty();
    let events = collected(recording, event);
    watch.watch(&index, || {
        for event in events {
            let applied = index.apply(&event);
            assert_eq!(applied.refused, None, "{event:?}");
        }
    });
    index
}

/// Dynamo's default, loaded on the measured thread.
pub fn load_compressed(
    recording: &Recording,
    watch: &mut impl Watch,
) -> ConcurrentRadixTreeCompressed {
    // The tree takes events from its queue only, so they wait there.
    let tree = Direct(ConcurrentRadixTreeCompressed::new());
    let (queue, events) = flume::unbounded();
    recording.steps(|step| {
        let task = WorkerTask::Event(router_event(step));
        queue.send(task).expect("the other end is here");
    });
    drop(queue);
    watch.watch(&tree, || tree.0.worker(events, None).expect("ends well"));
    tree.0
}

fn empty() -> Index {
    let index = Index::new(size());
    for worker in 0..WORKERS {
        index.admit(WorkerRank::new(worker_id(worker), 0));
    }
    index
}

fn sharded() -> Shards {
    let shards = (0..SHARDS).map(|_| pool(ConcurrentRadixTreeCompressed::new()));
    BranchShardedIndexer::new(shards.collect(), ROUTED_BLOCKS, BLOCK_TOKENS)
}

/// Shards are flushed by tasks.
fn runtime() -> Runtime {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    runtime.build().expect("needs no resources")
}

fn load_positional(
    mode: SearchMode,
    recording: &Recording,
    watch: &mut impl Watch,
) -> Box<dyn Reader> {
    let index = Direct(positional(mode));
    let events = collected(recording, router_event);
    let mut of_workers = FxHashMap::default();
    watch.watch(&index, || {
        for event in events {
            let applied = index.0.apply_event(&mut of_workers, event, None);
            applied.expect("the data is in order");
        }
    });
    Box::new(index)
}

fn load_pool<T: SyncIndexer>(
    backend: T,
    recording: &Recording,
    watch: &mut impl Watch,
) -> Box<dyn Reader> {
    let pool = pool(backend);
    let events = collected(recording, router_event);
    watch.watch(&pool, || {
        for event in events {
            pool.enqueue_event(event).expect("its thread runs");
        }
        pollster::block_on(pool.flush_and_wait()).expect("its thread runs");
    });
    Box::new(pool)
}

/// Loads `contender` event by event, none kept, and calls `loaded` while all that writing needs is alive.
pub fn stream(contender: Contender, data: &Data, loaded: impl FnOnce(&dyn Reader)) {
    match contender {
        Contender::Kvdelta => {
            let index = empty();
            data.steps(&mut |step| {
                let event = event(step);
                let applied = index.apply(&event);
                assert_eq!(applied.refused, None, "{event:?}");
            });
            loaded(&index);
        }
        Contender::RadixTree => {
            let mut tree = RadixTree::new();
            data.steps(&mut |step| {
                let applied = tree.apply_event(router_event(step));
                applied.expect("the data is in order");
            });
            loaded(&tree);
        }
        Contender::Compressed => stream_pool(ConcurrentRadixTreeCompressed::new(), data, loaded),
        Contender::Strided => stream_pool(positional(SearchMode::Strided), data, loaded),
        Contender::Binary => stream_pool(positional(SearchMode::Binary), data, loaded),
        Contender::Sharded => {
            let shards = sharded();
            let runtime = runtime();
            let flush = || runtime.block_on(KvIndexerInterface::flush(&shards));
            let mut waiting = 0;
            data.steps(&mut |step| {
                pollster::block_on(shards.apply_event(router_event(step)));
                if is_full(&mut waiting) {
                    flush();
                }
            });
            flush();
            loaded(&shards);
        }
    }
}

fn stream_pool<T: SyncIndexer>(backend: T, data: &Data, loaded: impl FnOnce(&dyn Reader)) {
    let pool = pool(backend);
    let flush = || pollster::block_on(pool.flush_and_wait()).expect("its thread runs");
    let mut waiting = 0;
    data.steps(&mut |step| {
        let sent = pool.enqueue_event(router_event(step));
        sent.expect("its thread runs");
        if is_full(&mut waiting) {
            flush();
        }
    });
    flush();
    // It tidies up once in a while; what it would free soon is not held against it.
    pool.backend().run_cleanup_task();
    loaded(&pool);
}

/// Whether enough events wait to let the pool catch up; its queue would count as its memory.
fn is_full(waiting: &mut u32) -> bool {
    *waiting = (*waiting + 1) % 1024;
    *waiting == 0
}

fn collected<T>(recording: &Recording, mut make: impl FnMut(Step<'_>) -> T) -> Vec<T> {
    let mut all = Vec::new();
    recording.steps(|step| all.push(make(step)));
    all
}

/// Ids as discovery gives them: large and without order.
pub(crate) fn worker_id(worker: usize) -> u64 {
    let number = u64::try_from(worker).expect("fits");
    (number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

pub(crate) fn worker_of(id: u64) -> usize {
    let found = (0..WORKERS).find(|worker| worker_id(*worker) == id);
    found.unwrap_or(WORKERS)
}

fn event(step: Step<'_>) -> Event {
    let engine = |block: &Block| EngineHash(block.sequence.0);
    let change = match step.change {
        Change::Stored { parent, blocks } => {
            let stored = blocks.iter().map(|block| StoredBlock {
                block: block.block,
                engine: engine(block),
            });
            kvdelta_indexer::Change::Stored(Stored {
                tier: Tier::Device,
                parent: parent.map(|parent| EngineHash(parent.0)),
                namespace: Some(namespace(None, None)),
                blocks: stored.collect(),
                copies: Copies::Single,
                source: None,
            })
        }
        Change::Removed(blocks) => kvdelta_indexer::Change::Removed {
            tier: Tier::Device,
            engine_hashes: blocks.iter().map(engine).collect(),
        },
    };
    Event {
        of: WorkerRank::new(worker_id(step.worker), 0),
        change,
    }
}

fn router_event(step: Step<'_>) -> RouterEvent {
    let engine = |block: &Block| ExternalSequenceBlockHash(block.sequence.0);
    let data = match step.change {
        Change::Stored { parent, blocks } => {
            let stored = blocks.iter().map(|block| KvCacheStoredBlockData {
                block_hash: engine(block),
                tokens_hash: LocalBlockHash(block.block.0),
                mm_extra_info: None,
            });
            KvCacheEventData::Stored(KvCacheStoreData {
                parent_hash: parent.map(|parent| ExternalSequenceBlockHash(parent.0)),
                start_position: None,
                blocks: stored.collect(),
            })
        }
        Change::Removed(blocks) => KvCacheEventData::Removed(KvCacheRemoveData {
            block_hashes: blocks.iter().map(engine).collect(),
        }),
    };
    let worker = WorkerWithDpRank::from_worker_id(worker_id(step.worker));
    let event = KvCacheEvent {
        event_id: 0,
        data,
        dp_rank: worker.dp_rank,
    };
    RouterEvent::new(worker.worker_id, event)
}
