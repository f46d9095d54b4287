//! A room with one worker, and an engine to feed it, for tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::event::{Change, Copies, Event, Stored, StoredBlock};
use crate::hash::{Prompt, PromptOf, block_hashes, namespace, next_sequence_hash};
use crate::ids::{BlockHash, BlockSize, EngineHash, SequenceHash, Tier, WorkerRank};
use crate::index::{Held, Index, Naive};
use crate::ingest::{Action, Batch, Decode, Frame, Ingest, Limits, Outcome};
use crate::metrics::Counters;
use crate::stream::Digest;
use crate::time::Millis;
use crate::trust::{Reason, Trust, TrustBook};

pub(super) const SILENT: Duration = Duration::from_secs(30);

/// A decoded frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Payload {
    digest: Digest,
    pub(super) batch: Batch,
}

#[derive(Debug, Default)]
pub(super) struct Plain;

impl Decode for Plain {
    type Payload = Payload;

    fn digest(&self, payload: &Payload) -> Digest {
        payload.digest
    }

    fn bytes(&self, _: &Payload) -> usize {
        1000
    }

    fn decode(&mut self, _: WorkerRank, payload: &Payload, _: &Index) -> Batch {
        payload.batch.clone()
    }

    fn forget(&mut self, _: WorkerRank) {}
}

pub(super) fn size() -> BlockSize {
    BlockSize::try_from(4).unwrap()
}

/// `S([h...], parent, tokens)` of CASES: as many blocks as there are hashes.
pub(super) fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32]) -> Change {
    let blocks = block_hashes(tokens, size(), PromptOf::default());
    assert_eq!(blocks.len(), hashes.len());
    Change::Stored(Stored {
        tier: Tier::Device,
        parent: parent.map(EngineHash),
        namespace: Some(namespace(None, None)),
        blocks: blocks
            .iter()
            .zip(hashes)
            .map(|(block, hash)| StoredBlock {
                block: *block,
                engine: EngineHash(*hash),
            })
            .collect(),
        copies: Copies::Counted,
        source: None,
    })
}

pub(super) fn removed(hashes: &[u64]) -> Change {
    Change::Removed {
        tier: Tier::Device,
        engine_hashes: hashes.iter().copied().map(EngineHash).collect(),
    }
}

/// `stamp` stands for the time in an engine's payload: it differs between lives.
pub(super) fn payload(of: WorkerRank, stamp: u64, changes: &[Change]) -> Payload {
    let events = changes.iter().map(|change| Event {
        of,
        change: change.clone(),
    });
    Payload {
        digest: Digest::of(format!("{stamp} {changes:?}").as_bytes()),
        batch: Batch {
            of,
            events: events.collect(),
            flaw: None,
            made: None,
        },
    }
}

pub(super) struct Room {
    pub(super) ingest: Ingest<Plain>,
    pub(super) index: Arc<Index>,
    pub(super) trust: Arc<TrustBook>,
    pub(super) counters: Arc<Counters>,
    pub(super) now: Millis,
}

impl Room {
    pub(super) fn new(limits: Limits) -> Self {
        let index = Arc::new(Index::new(size()));
        let trust = Arc::new(TrustBook::new(SILENT));
        let counters = Arc::new(Counters::default());
        let ingest = Ingest::new(
            Arc::clone(&index),
            Arc::clone(&trust),
            Arc::clone(&counters),
            limits,
            Plain,
        );
        Self {
            ingest,
            index,
            trust,
            counters,
            now: Millis(1_000_000),
        }
    }

    pub(super) fn frame(&mut self, stream: WorkerRank, seq: u64, payload: Payload) -> Outcome {
        self.ingest.frame(stream, Frame { seq, payload }, self.now)
    }

    pub(super) fn wait(&mut self, time: Duration) -> Outcome {
        self.now = self.now.plus(time);
        self.ingest.tick(self.now)
    }

    pub(super) fn state(&self, of: WorkerRank) -> (Trust, Option<Reason>) {
        let standing = self.trust.standing(of, self.now).unwrap();
        (standing.trust, standing.reason)
    }

    pub(super) fn q(&self, of: WorkerRank, tokens: &[u32]) -> usize {
        let mut prompt = Prompt::new(tokens, size(), PromptOf::default());
        let overlap = self.index.overlap_of(of, Tier::Device, &mut prompt);
        overlap.map_or(0, |overlap| overlap.blocks)
    }

    pub(super) fn metric(&self, line: &str) -> u64 {
        let text = self.counters.render(&self.trust, self.now);
        let value = text.lines().find_map(|found| found.strip_prefix(line));
        value.unwrap().trim().parse().unwrap()
    }
}

pub(super) fn one(out: &Outcome) -> Action {
    assert_eq!(out.actions.len(), 1, "{out:?}");
    out.actions[0]
}

/// An engine with a cache, a publisher and a bounded replay buffer; it can start again.
pub(super) struct Engine {
    of: WorkerRank,
    copies: Copies,
    first_seq: u64,
    keeps: usize,
    pub(super) life: u64,
    next_seq: u64,
    cache: Naive,
    /// Parent and content of every block of this life.
    known: BTreeMap<EngineHash, (Option<EngineHash>, BlockHash)>,
    kept: VecDeque<Frame<Payload>>,
    /// What the cache held after each frame.
    pub(super) history: BTreeMap<(u64, u64), Vec<Held>>,
}

impl Engine {
    pub(super) fn new(of: WorkerRank, copies: Copies, first_seq: u64, keeps: usize) -> Self {
        let mut engine = Self {
            of,
            copies,
            first_seq,
            keeps,
            life: 0,
            next_seq: 0,
            cache: Naive::default(),
            known: BTreeMap::new(),
            kept: VecDeque::new(),
            history: BTreeMap::new(),
        };
        engine.restart();
        engine
    }

    pub(super) fn restart(&mut self) {
        self.life += 1;
        self.next_seq = self.first_seq;
        self.cache = Naive::default();
        self.cache.admit(self.of);
        self.known.clear();
        self.kept.clear();
    }

    pub(super) fn held(&self) -> Vec<Held> {
        self.cache.held(self.of)
    }

    pub(super) fn last_seq(&self) -> Option<u64> {
        self.next_seq
            .checked_sub(1)
            .filter(|seq| *seq >= self.first_seq)
    }

    fn names(&self) -> Vec<EngineHash> {
        let mut names: Vec<_> = self.held().iter().map(|held| held.engine).collect();
        names.dedup();
        names
    }

    /// Stores `blocks` blocks behind the `pick`th held one, or as the start of a prompt.
    pub(super) fn store(&mut self, pick: usize, content: u64, blocks: usize) -> Frame<Payload> {
        let names = self.names();
        let parent = names.get(pick % (names.len() + 1)).copied();
        let mut before = parent;
        let mut run = Vec::new();
        for at in 0..blocks as u64 {
            let block = BlockHash(content + at);
            let chained = next_sequence_hash(before.map(|hash| SequenceHash(hash.0)), block);
            let engine = EngineHash(chained.0);
            self.known.insert(engine, (before, block));
            run.push(StoredBlock { block, engine });
            before = Some(engine);
        }
        let change = self.stored(parent, run);
        self.publish(&[change])
    }

    pub(super) fn remove(&mut self, pick: usize) -> Frame<Payload> {
        let names = self.names();
        let gone = names.get(pick % names.len().max(1)).copied();
        self.publish(&[Change::Removed {
            tier: Tier::Device,
            engine_hashes: gone.into_iter().collect(),
        }])
    }

    pub(super) fn clear(&mut self) -> Frame<Payload> {
        self.publish(&[Change::Cleared])
    }

    pub(super) fn replay(&self, from_seq: u64) -> Vec<Frame<Payload>> {
        let kept = self.kept.iter().filter(|frame| frame.seq >= from_seq);
        kept.cloned().collect()
    }

    pub(super) fn oldest(&self) -> Option<u64> {
        self.kept.front().map(|frame| frame.seq)
    }

    /// All that it holds, and the number of its last frame (0 before the first one, as Dynamo answers).
    pub(super) fn dump(&self) -> (Vec<Payload>, u64) {
        let names = self.names();
        let mut told: Vec<EngineHash> = Vec::new();
        let mut changes = Vec::new();
        for name in &names {
            let mut path = vec![*name];
            while let Some(before) = self.known[&path[path.len() - 1]].0 {
                path.push(before);
            }
            for engine in path.into_iter().rev() {
                if told.contains(&engine) {
                    continue;
                }
                let (parent, block) = self.known[&engine];
                told.push(engine);
                changes.push(self.stored(parent, vec![StoredBlock { block, engine }]));
            }
        }
        told.retain(|name| !names.contains(name));
        if !told.is_empty() {
            changes.push(Change::Removed {
                tier: Tier::Device,
                engine_hashes: told,
            });
        }
        let payload = payload(self.of, self.life, &changes);
        (vec![payload], self.last_seq().unwrap_or(0))
    }

    fn stored(&self, parent: Option<EngineHash>, blocks: Vec<StoredBlock>) -> Change {
        Change::Stored(Stored {
            tier: Tier::Device,
            parent,
            namespace: Some(namespace(None, None)),
            blocks,
            copies: self.copies,
            source: None,
        })
    }

    fn publish(&mut self, changes: &[Change]) -> Frame<Payload> {
        for change in changes {
            let applied = self.cache.apply(&Event {
                of: self.of,
                change: change.clone(),
            });
            assert_eq!(applied.refused, None);
        }
        let frame = Frame {
            seq: self.next_seq,
            payload: payload(self.of, self.life, changes),
        };
        self.next_seq += 1;
        self.kept.push_back(frame.clone());
        if self.kept.len() > self.keeps {
            self.kept.pop_front();
        }
        self.history.insert((self.life, frame.seq), self.held());
        frame
    }
}
