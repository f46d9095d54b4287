// SPDX-License-Identifier: Apache-2.0

//! KV events on their way from the decode workers to the router's index: late, or lost.

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use fastrand::Rng;
use kvdelta_indexer::{
    BlockHash, Change, Copies, EngineHash, Event, Index, Source, Stored, StoredBlock, Tier,
    WorkerRank,
};

use crate::trace::{Node, Trace};

/// What changed in a worker's cache. Blocks that came in are those of a request's prompt from one on.
#[derive(Clone, Copy, Debug)]
enum Changed {
    Stored { request: u32, from: usize },
    Removed { blocks: usize },
}

#[derive(Clone, Copy, Debug)]
struct Late {
    due: Duration,
    of: WorkerRank,
    changed: Changed,
}

/// The events.
#[derive(Debug)]
pub(crate) struct Feed {
    delay: Duration,
    loss: f64,
    rng: Rng,
    late: VecDeque<Late>,
    /// The blocks of the late removals, in their order.
    removed: VecDeque<Node>,
    /// Memory of one event after the other.
    blocks: Vec<StoredBlock>,
    names: Vec<EngineHash>,
    /// Events that were lost, and those that the index refused, which had lost the block before.
    pub(crate) lost: u64,
    pub(crate) refused: u64,
}

/// The router's hash of a block, which is that of its tokens: here its number, so that nothing is hashed.
pub(crate) fn block_hash(node: Node) -> BlockHash {
    BlockHash(spread(node))
}

/// The engine's hash of a block.
pub(crate) fn engine_hash(node: Node) -> EngineHash {
    EngineHash(!spread(node))
}

/// Numbers as regular as 0, 1, 2 would be kind to hash tables; hashes are not.
fn spread(node: Node) -> u64 {
    let mixed = (u64::from(node.0) + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed ^ (mixed >> 27)
}

impl Feed {
    pub(crate) fn new(delay: Duration, loss: f64, seed: u64) -> Self {
        Self {
            delay,
            loss,
            rng: Rng::with_seed(seed),
            late: VecDeque::new(),
            removed: VecDeque::new(),
            blocks: Vec::new(),
            names: Vec::new(),
            lost: 0,
            refused: 0,
        }
    }

    /// A worker stored the whole blocks of a request's prompt, `from` one on.
    pub(crate) fn stored(
        &mut self,
        index: &Index,
        trace: &Trace,
        of: WorkerRank,
        (request, from): (u32, usize),
        now: Duration,
    ) {
        let changed = Changed::Stored { request, from };
        if self.is_lost() {
        } else if self.delay.is_zero() {
            self.apply_stored(index, trace, of, (request, from));
        } else {
            self.delay(of, changed, now);
        }
    }

    /// A worker threw blocks out; `gone` is emptied.
    pub(crate) fn removed(
        &mut self,
        index: &Index,
        of: WorkerRank,
        gone: &mut Vec<Node>,
        now: Duration,
    ) {
        if self.is_lost() {
            gone.clear();
        } else if self.delay.is_zero() {
            self.apply_removed(index, of, gone.drain(..));
        } else {
            let blocks = gone.len();
            self.removed.extend(gone.drain(..));
            self.delay(of, Changed::Removed { blocks }, now);
        }
    }

    /// Lets the index know what it hears by `now`.
    pub(crate) fn deliver(&mut self, index: &Index, trace: &Trace, now: Duration) {
        while let Some(late) = self.late.front().copied()
            && late.due <= now
        {
            self.late.pop_front();
            match late.changed {
                Changed::Stored { request, from } => {
                    self.apply_stored(index, trace, late.of, (request, from));
                }
                Changed::Removed { blocks } => {
                    let mut removed = mem::take(&mut self.removed);
                    self.apply_removed(index, late.of, removed.drain(..blocks));
                    self.removed = removed;
                }
            }
        }
    }

    fn is_lost(&mut self) -> bool {
        let is_lost = self.loss > 0.0 && self.rng.f64() < self.loss;
        self.lost += u64::from(is_lost);
        is_lost
    }

    fn delay(&mut self, of: WorkerRank, changed: Changed, now: Duration) {
        let due = now.saturating_add(self.delay);
        self.late.push_back(Late { due, of, changed });
    }

    fn apply_stored(
        &mut self,
        index: &Index,
        trace: &Trace,
        of: WorkerRank,
        (request, from): (u32, usize),
    ) {
        let path = trace.path(&trace.requests()[request as usize]);
        let (before, new) = path.split_at(from);
        let mut blocks = mem::take(&mut self.blocks);
        blocks.extend(new.iter().map(|node| StoredBlock {
            block: block_hash(*node),
            engine: engine_hash(*node),
        }));
        let change = Change::Stored(Stored {
            tier: Tier::Device,
            parent: before.last().map(|node| engine_hash(*node)),
            namespace: None,
            blocks,
            copies: Copies::Single,
            source: Some(Source::Transferred),
        });
        let event = Event { of, change };
        self.refused += u64::from(index.apply(&event).refused.is_some());
        if let Change::Stored(stored) = event.change {
            self.blocks = stored.blocks;
            self.blocks.clear();
        }
    }

    fn apply_removed(&mut self, index: &Index, of: WorkerRank, gone: impl Iterator<Item = Node>) {
        let mut engine_hashes = mem::take(&mut self.names);
        engine_hashes.extend(gone.map(engine_hash));
        let tier = Tier::Device;
        let change = Change::Removed {
            tier,
            engine_hashes,
        };
        let event = Event { of, change };
        index.apply(&event);
        if let Change::Removed { engine_hashes, .. } = event.change {
            self.names = engine_hashes;
            self.names.clear();
        }
    }
}
