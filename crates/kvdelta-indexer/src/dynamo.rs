//! The index as a backend of `dynamo-kv-router` 1.6.1, whose thread pool hands events, removals and
//! queries to it as to Dynamo's own trees: `ThreadPoolIndexer<DecodeIndex>` is a `KvIndexerInterface`.
//!
//! Differences from `ConcurrentRadixTreeCompressed` that a caller can see, all but the first for the
//! better of a claim:
//! - It takes only events: no predicted entries, no retention by time or capacity, no anchors.
//! - A block that is removed from the middle of a run takes no other block with it. Its children do not
//!   count while it is away and count again when it is back; the tree forgets those of the same edge.
//! - A store whose parent's name stands for two contents is refused; the tree takes the later one.
//! - `early_exit` is ignored: the answer is always that of all ranks.
//!
//! **Removed ranks.** The interface has no call that lets a rank in, so a rank is admitted by its first
//! store, also after a removal. That a late event of a removed worker does not revive it is therefore up
//! to the caller's order, as with Dynamo's trees: the thread pool keeps all events and removals of a rank
//! in one queue, and `WorkerQueryClient` in dynamo-llm unbinds a publisher before it resets its rank.

mod choice;

use std::collections::BTreeSet;
use std::sync::Arc;

use dynamo_kv_router::indexer::{
    EventKind, EventWarningKind, KvIndexerMetrics, MatchDetails, PreBoundEventCounters,
    SyncIndexer, WorkerLookupStats, WorkerTask,
};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheEventError,
    KvCacheRemoveData, KvCacheStoreData, KvCacheStoredBlockData, LocalBlockHash, OverlapScores,
    ResidencyDomain, RouterEvent, StorageTier, WorkerWithDpRank,
};

use crate::event::{Change, Copies, Event, Stored, StoredBlock};
use crate::hash::Prompt;
use crate::ids::{BlockHash, BlockSize, EngineHash, Tier, WorkerId, WorkerRank};
use crate::index::{Applied, Index, Overlap, Refused};

pub use choice::{BadDecodeIndex, DECODE_INDEX_VARIABLE, is_chosen};

/// The index behind Dynamo's `SyncIndexer`.
///
/// Reads run on the caller's thread and wait for no writer. All state is in the index; the pool's threads
/// keep nothing but the list of their ranks, and take turns at the index's one lock for changes.
#[derive(Debug)]
pub struct DecodeIndex {
    index: Index,
}

impl DecodeIndex {
    /// An empty index of blocks of `block_size` tokens.
    pub fn new(block_size: BlockSize) -> Self {
        Self {
            index: Index::new(block_size),
        }
    }

    /// The index itself, for queries that Dynamo's interface cannot carry. Events go through the pool.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// What every rank holds of the prompt in device memory, and the engine's hash of the last of these
    /// blocks. Ranks that hold nothing are left out.
    ///
    /// What the answer is when events come in meanwhile: see [`Index`].
    pub fn find_match_details(&self, sequence: Vec<LocalBlockHash>) -> MatchDetails {
        let mut details = MatchDetails::new();
        for found in self.overlaps(sequence) {
            let worker = worker_of(found.of);
            let engine = ExternalSequenceBlockHash(found.engine.0);
            details.last_matched_hashes.insert(worker, engine);
            let scores = &mut details.overlap_scores.scores;
            scores.insert(worker, score_of(found.blocks));
        }
        details
    }

    fn overlaps(&self, sequence: Vec<LocalBlockHash>) -> impl Iterator<Item = Overlap> {
        // In place: the two are of one size.
        let hashes = sequence.into_iter().map(|hash| BlockHash(hash.0)).collect();
        let mut prompt = Prompt::hashed(hashes, self.index.block_size());
        let all = self.index.overlaps(&mut prompt).into_iter();
        all.filter(|found| found.tier == Tier::Device)
    }

    /// Applies one event of a lane and counts it.
    fn apply(
        &self,
        event: RouterEvent,
        ranks: &mut BTreeSet<WorkerRank>,
        counters: Option<&PreBoundEventCounters>,
    ) -> Result<(), KvCacheEventError> {
        let kind = EventKind::of(&event.event.data);
        let result = event_of(event).and_then(|event| self.apply_admitting(&event, ranks));
        if let Some(counters) = counters {
            if result.is_ok_and(|applied| applied.stored_blocks == 0 && applied.repeated_blocks > 0)
            {
                counters.inc_warning(EventWarningKind::DuplicateStore);
            }
            counters.inc(kind, result.map(drop));
        }
        if let Err(error) = result {
            tracing::warn!(%error, event_type = kind.label(), "Failed to apply event");
        }
        result.map(drop)
    }

    /// Applies an event; a store of a rank that is not known admits it.
    fn apply_admitting(
        &self,
        event: &Event,
        ranks: &mut BTreeSet<WorkerRank>,
    ) -> Result<Applied, KvCacheEventError> {
        let mut applied = self.index.apply(event);
        if applied.refused == Some(Refused::NotAdmitted)
            && matches!(event.change, Change::Stored(_))
        {
            self.index.admit(event.of);
            ranks.insert(event.of);
            applied = self.index.apply(event);
        }
        match (applied.refused, &event.change) {
            (None, _) => Ok(applied),
            // Nothing was known of the rank, and nothing is.
            (Some(Refused::NotAdmitted), Change::Cleared) => Ok(Applied::default()),
            (Some(Refused::NotAdmitted), _) => Err(KvCacheEventError::BlockNotFound),
            (Some(Refused::UnknownParent), _) => Err(KvCacheEventError::ParentBlockNotFound),
            (Some(Refused::Full), _) => Err(KvCacheEventError::CapacityExhausted),
            (Some(_), _) => Err(KvCacheEventError::InvalidBlockSequence),
        }
    }

    fn remove_rank(&self, of: WorkerRank, ranks: &mut BTreeSet<WorkerRank>) {
        self.index.remove_rank(of);
        ranks.remove(&of);
    }
}

impl SyncIndexer for DecodeIndex {
    fn worker(
        &self,
        event_receiver: flume::Receiver<WorkerTask>,
        metrics: Option<Arc<KvIndexerMetrics>>,
    ) -> anyhow::Result<()> {
        // Whose events come on this lane: the pool adds up what its lanes report.
        let mut ranks = BTreeSet::new();
        let counters = metrics.map(|metrics| metrics.prebind());
        while let Ok(task) = event_receiver.recv() {
            // Whoever asked may have gone away, which is no reason to stop.
            match task {
                WorkerTask::Event(event) => {
                    let _ = self.apply(event, &mut ranks, counters.as_ref());
                }
                WorkerTask::EventWithAck { event, resp } => {
                    let result = self.apply(event, &mut ranks, counters.as_ref());
                    let _ = resp.send(result.is_ok());
                }
                // The first round reaches all lanes, behind the events that each of them has queued.
                WorkerTask::RemoveWorker {
                    worker_id, resp, ..
                } => {
                    self.index.remove_worker(WorkerId(worker_id));
                    ranks.retain(|of| of.worker != WorkerId(worker_id));
                    let _ = resp.send(());
                }
                WorkerTask::RemoveWorkerDpRank {
                    worker_id, dp_rank, ..
                } => self.remove_rank(WorkerRank::new(worker_id, dp_rank), &mut ranks),
                // A barrier; the pool asks `dump_events` when all lanes have passed it.
                WorkerTask::DumpEvents(resp) => {
                    let _ = resp.send(Ok(Vec::new()));
                }
                WorkerTask::Stats(resp) => {
                    let counts = ranks.iter().filter_map(|of| {
                        let device = self.index.usage(*of)?.blocks[Tier::Device as usize];
                        Some((
                            worker_of(*of),
                            usize::try_from(device).unwrap_or(usize::MAX),
                        ))
                    });
                    let _ = resp.send(WorkerLookupStats::from_worker_block_counts(counts));
                }
                WorkerTask::Flush(resp) => {
                    let _ = resp.send(());
                }
                WorkerTask::Terminate => break,
                // Tasks of other backends (anchors, retention, observation). Who waits for an answer
                // sees its channel dropped, which the pool reports as an error.
                _ => {}
            }
        }
        Ok(())
    }

    fn find_matches(&self, sequence: &[LocalBlockHash], _early_exit: bool) -> OverlapScores {
        let mut scores = OverlapScores::new();
        let overlaps = self.overlaps(sequence.to_vec());
        let overlaps = overlaps.map(|found| (worker_of(found.of), score_of(found.blocks)));
        scores.scores.extend(overlaps);
        scores
    }

    fn supports_routing_decision_pruning(&self) -> bool {
        false
    }

    /// Not of one moment: ranks are told one after the other while their events go on.
    fn dump_events(&self) -> Option<Vec<RouterEvent>> {
        let mut events = Vec::new();
        for of in self.index.ranks() {
            for stored in self.index.dump(of) {
                let change = Change::Stored(stored);
                let id = u64::try_from(events.len()).unwrap_or(u64::MAX);
                events.extend(router_event(&Event { of, change }, id));
            }
        }
        Some(events)
    }
}

/// An event of Dynamo's event plane as one of ours.
///
/// The plane counts copies before it sends, so that a second store says nothing new, and it does not tell
/// the namespace, with which the block hashes are seeded. The emitting session and where the engine
/// believes a run to begin are left out.
///
/// # Errors
///
/// [`KvCacheEventError::UnsupportedResidencyDomain`] for what lies outside the worker: blocks of a cache
/// that outlives it, and the external tier.
pub fn event_of(event: RouterEvent) -> Result<Event, KvCacheEventError> {
    let unsupported = KvCacheEventError::UnsupportedResidencyDomain;
    match event.resolved_residency_domain() {
        Ok(ResidencyDomain::Worker) => {}
        Ok(ResidencyDomain::CacheOwner) | Err(_) => return Err(unsupported),
    }
    let tier = match event.storage_tier {
        StorageTier::Device => Tier::Device,
        StorageTier::HostPinned => Tier::Host,
        StorageTier::Disk => Tier::Disk,
        StorageTier::External => return Err(unsupported),
    };
    let of = WorkerRank::new(event.worker_id, event.event.dp_rank);
    let engine = |hash: ExternalSequenceBlockHash| EngineHash(hash.0);
    let change = match event.event.data {
        KvCacheEventData::Stored(stored) => Change::Stored(Stored {
            tier,
            parent: stored.parent_hash.map(engine),
            namespace: None,
            blocks: stored
                .blocks
                .into_iter()
                .map(|block| StoredBlock {
                    block: BlockHash(block.tokens_hash.0),
                    engine: engine(block.block_hash),
                })
                .collect(),
            copies: Copies::Single,
            source: None,
        }),
        KvCacheEventData::Removed(removed) => Change::Removed {
            tier,
            engine_hashes: removed.block_hashes.into_iter().map(engine).collect(),
        },
        KvCacheEventData::Cleared => Change::Cleared,
    };
    Ok(Event { of, change })
}

/// One of our events as one of Dynamo's event plane; `None`: it has none for blocks that are named
/// without their content ([`Change::Placed`]).
pub fn router_event(event: &Event, event_id: u64) -> Option<RouterEvent> {
    let external = |hash: EngineHash| ExternalSequenceBlockHash(hash.0);
    let (tier, data) = match &event.change {
        Change::Stored(stored) => {
            let blocks = stored.blocks.iter().map(|block| KvCacheStoredBlockData {
                block_hash: external(block.engine),
                tokens_hash: LocalBlockHash(block.block.0),
                mm_extra_info: None,
            });
            let data = KvCacheStoreData {
                parent_hash: stored.parent.map(external),
                start_position: None,
                blocks: blocks.collect(),
            };
            (stored.tier, KvCacheEventData::Stored(data))
        }
        Change::Removed {
            tier,
            engine_hashes,
        } => {
            let block_hashes = engine_hashes.iter().copied().map(external).collect();
            let data = KvCacheRemoveData { block_hashes };
            (*tier, KvCacheEventData::Removed(data))
        }
        Change::Cleared => (Tier::Device, KvCacheEventData::Cleared),
        Change::Placed { .. } => return None,
    };
    let storage_tier = match tier {
        Tier::Device => StorageTier::Device,
        Tier::Host => StorageTier::HostPinned,
        Tier::Disk => StorageTier::Disk,
    };
    let event_of_rank = KvCacheEvent {
        event_id,
        data,
        dp_rank: event.of.rank.0,
    };
    Some(RouterEvent::with_storage_tier(
        event.of.worker.0,
        event_of_rank,
        storage_tier,
    ))
}

fn worker_of(of: WorkerRank) -> WorkerWithDpRank {
    WorkerWithDpRank::new(of.worker.0, of.rank.0)
}

fn score_of(blocks: usize) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}
