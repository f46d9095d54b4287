//! Engine hashes to blocks. Only the writer looks here.
//!
//! A block carries one engine hash for all ranks that agree on it, which is all of them in a fleet with one
//! hash seed; the table keeps 4 bytes for it. Ranks that name the same content otherwise are kept aside.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;
use rustc_hash::FxHashMap;

use super::node::Hashes;
use crate::ids::{EngineHash, WorkerRank};

/// Each grows by itself, so that growing never stops the writer for long.
const SHARDS: usize = 64;

#[derive(Debug)]
pub(super) struct Names {
    /// One block of each name.
    shards: [HashTable<u32>; SHARDS],
    /// The further blocks of names that stand for several, which a table would look through one by one.
    further: FxHashMap<EngineHash, BTreeSet<u32>>,
    others: FxHashMap<EngineHash, Vec<(u32, WorkerRank)>>,
}

fn spread(name: u64) -> u64 {
    // Engine hashes may be as regular as 1, 2, 3.
    let name = (name ^ (name >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    name ^ (name >> 29)
}

fn shard_of(spread: u64) -> usize {
    // The table itself uses the highest and the lowest bits.
    (spread >> 32) as usize % SHARDS
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
            further: FxHashMap::default(),
            others: FxHashMap::default(),
        }
    }

    /// Enters a block under the name that `engines` has for it.
    pub(super) fn insert(&mut self, block: u32, engines: &Hashes) {
        let name = name_of(block, engines);
        let hash = spread(name);
        let shard = &mut self.shards[shard_of(hash)];
        let same = |one: &u32| name_of(*one, engines) == name;
        match shard.entry(hash, same, |one| spread(name_of(*one, engines))) {
            Entry::Vacant(entry) => {
                entry.insert(block);
            }
            Entry::Occupied(_) => {
                let further = self.further.entry(EngineHash(name)).or_default();
                further.insert(block);
            }
        }
    }

    /// Takes a block out, before `engines` gets another name for it.
    pub(super) fn remove(&mut self, block: u32, engines: &Hashes) {
        let name = name_of(block, engines);
        let hash = spread(name);
        let shard = &mut self.shards[shard_of(hash)];
        let first = shard.find_entry(hash, |one| name_of(*one, engines) == name);
        let Ok(mut first) = first else {
            return;
        };
        let name = EngineHash(name);
        let Some(further) = self.further.get_mut(&name) else {
            if *first.get() == block {
                first.remove();
            }
            return;
        };
        if *first.get() != block {
            further.remove(&block);
        } else if let Some(next) = further.pop_first() {
            *first.get_mut() = next;
        }
        if further.is_empty() {
            self.further.remove(&name);
        }
    }

    /// Blocks that carry this name.
    #[inline]
    pub(super) fn blocks(&self, name: EngineHash, engines: &Hashes) -> impl Iterator<Item = u32> {
        let hash = spread(name.0);
        let same = |one: &u32| name_of(*one, engines) == name.0;
        let first = self.shards[shard_of(hash)].find(hash, same);
        let further = match self.further.is_empty() {
            true => None,
            false => self.further.get(&name),
        };
        first
            .into_iter()
            .chain(further.into_iter().flatten())
            .copied()
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
        let first: usize = self.shards.iter().map(HashTable::len).sum();
        let further = self.further.values().map(BTreeSet::len);
        first + further.sum::<usize>()
    }
}
