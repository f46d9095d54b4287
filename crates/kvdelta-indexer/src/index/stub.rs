use parking_lot::Mutex;

use crate::event::Event;
use crate::hash::Prompt;
use crate::ids::{BlockSize, EngineHash, Namespace, Tier, WorkerId, WorkerRank};
use crate::index::naive::Naive;
use crate::index::{Applied, Held, Overlap, Usage};

/// Which prefixes every rank holds.
#[derive(Debug)]
pub struct Index {
    block_size: BlockSize,
    naive: Mutex<(Naive, Vec<WorkerRank>)>,
}

impl Index {
    /// An index of blocks of `block_size` tokens, without workers.
    pub fn new(block_size: BlockSize) -> Self {
        Self {
            block_size,
            naive: Mutex::default(),
        }
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> BlockSize {
        self.block_size
    }

    /// Lets events of `of` in. Without it, and after a removal, they are refused.
    pub fn admit(&self, of: WorkerRank) {
        let mut inner = self.naive.lock();
        inner.0.admit(of);
        if !inner.1.contains(&of) {
            inner.1.push(of);
        }
    }

    /// The admitted ranks.
    pub fn ranks(&self) -> Vec<WorkerRank> {
        self.naive.lock().1.clone()
    }

    /// Applies one event. A refused event changes nothing.
    pub fn apply(&self, event: &Event) -> Applied {
        self.naive.lock().0.apply(event)
    }

    /// Forgets a rank. When it returns no query finds it, and no event of it is let in before `admit`.
    pub fn remove_rank(&self, of: WorkerRank) -> bool {
        let mut inner = self.naive.lock();
        inner.1.retain(|rank| *rank != of);
        inner.0.remove_rank(of)
    }

    /// Forgets all ranks of a worker, as `remove_rank`.
    pub fn remove_worker(&self, worker: WorkerId) -> usize {
        let ranks = self.ranks();
        let of_it = ranks.into_iter().filter(|rank| rank.worker == worker);
        of_it.map(|rank| usize::from(self.remove_rank(rank))).sum()
    }

    /// The namespace of a block that `of` holds: what a child of it belongs to.
    pub fn namespace_of(&self, of: WorkerRank, engine: EngineHash) -> Option<Namespace> {
        self.naive.lock().0.namespace_of(of, engine)
    }

    /// What every rank holds of the prompt. Ranks that hold nothing are left out.
    pub fn overlaps(&self, prompt: &mut Prompt<'_>) -> Vec<Overlap> {
        let mut all = Vec::new();
        for of in self.ranks() {
            for tier in Tier::ALL {
                let (blocks, _) = self.overlap_of(of, tier, prompt);
                if blocks > 0 {
                    all.push(Overlap { of, tier, blocks });
                }
            }
        }
        all
    }

    /// What one rank holds of the prompt: blocks, and the engine's hash of the last of them.
    pub fn overlap_of(
        &self,
        of: WorkerRank,
        tier: Tier,
        prompt: &mut Prompt<'_>,
    ) -> (usize, Option<EngineHash>) {
        let all = prompt.blocks();
        self.naive
            .lock()
            .0
            .overlap_of(of, tier, prompt.hashed_to(all))
    }

    /// All blocks of a rank, sorted: for comparisons and small fleets.
    pub fn held(&self, of: WorkerRank) -> Vec<Held> {
        self.naive.lock().0.held(of)
    }

    /// How much a rank holds; `None`: not admitted.
    pub fn usage(&self, of: WorkerRank) -> Option<Usage> {
        self.ranks().contains(&of).then(|| {
            let mut usage = Usage::default();
            for held in self.held(of) {
                usage.blocks[held.tier as usize] += 1;
            }
            usage
        })
    }
}
