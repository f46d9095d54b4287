//! Engine hashes to blocks. Only the writer looks here.
//!
//! A block carries one engine hash for all ranks that agree on it, which is all of them in a fleet with one
//! hash seed; the table keeps 4 bytes for it. Ranks that name the same content otherwise are kept aside.

use std::sync::atomic::Ordering;

use hashbrown::HashTable;
use rustc_hash::FxHashMap;

use super::node::Hashes;
use crate::ids::{EngineHash, WorkerRank};

/// Each grows by itself, so that growing never stops the writer for long.
const SHARDS: usize = 64;

#[derive(Debug)]
pub(super) struct Names {
    shards: [HashTable<u32>; SHARDS],
    others: FxHashMap<EngineHash, Vec<(u32, WorkerRank)>>,
}

fn spread(name: u64) -> u64 {
    // Engine hashes may be as regular as 1, 2, 3.
    let name = (name ^ (name >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    name ^ (name >> 29)
}

fn name_of(block: u32, engines: &Hashes) -> u64 {
    engines
        .get(block)
        .map_or(0, |name| name.load(Ordering::Relaxed))
}

impl Names {
    pub(super) fn new() -> Self {
        Self {
            shards: std::array::from_fn(|_| HashTable::new()),
            others: FxHashMap::default(),
        }
    }

    fn shard(&mut self, spread: u64) -> &mut HashTable<u32> {
        // The table itself uses the highest and the lowest bits.
        &mut self.shards[(spread >> 32) as usize % SHARDS]
    }

    /// Enters a block under the name that `engines` has for it.
    pub(super) fn insert(&mut self, block: u32, engines: &Hashes) {
        let hash = spread(name_of(block, engines));
        let rehash = |block: &u32| spread(name_of(*block, engines));
        self.shard(hash).insert_unique(hash, block, rehash);
    }

    /// Takes a block out, before `engines` gets another name for it.
    pub(super) fn remove(&mut self, block: u32, engines: &Hashes) {
        let hash = spread(name_of(block, engines));
        if let Ok(entry) = self.shard(hash).find_entry(hash, |one| *one == block) {
            entry.remove();
        }
    }

    /// Blocks that carry this name.
    #[inline]
    pub(super) fn blocks(&self, name: EngineHash, engines: &Hashes) -> impl Iterator<Item = u32> {
        let hash = spread(name.0);
        let same = move |block: &&u32| name_of(**block, engines) == name.0;
        let found = self.shards[(hash >> 32) as usize % SHARDS].iter_hash(hash);
        found.filter(same).copied()
    }

    /// Whether every rank calls every block as the others do.
    pub(super) fn agree(&self) -> bool {
        self.others.is_empty()
    }

    /// Blocks that `of` alone calls so.
    pub(super) fn others(
        &self,
        name: EngineHash,
        of: WorkerRank,
    ) -> impl Iterator<Item = u32> + '_ {
        let found = self.others.get(&name).into_iter().flatten();
        found
            .filter(move |(_, rank)| *rank == of)
            .map(|(block, _)| *block)
    }

    pub(super) fn insert_other(&mut self, name: EngineHash, block: u32, of: WorkerRank) {
        self.others.entry(name).or_default().push((block, of));
    }

    pub(super) fn remove_other(&mut self, name: EngineHash, block: u32, of: WorkerRank) {
        if let Some(blocks) = self.others.get_mut(&name) {
            blocks.retain(|one| *one != (block, of));
            if blocks.is_empty() {
                self.others.remove(&name);
            }
        }
    }

    /// Blocks entered, for `Index::check`.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(HashTable::len).sum()
    }
}
