//! What the ranks of a list hold of a prompt in device memory, by their places in the list.
//!
//! A query tells holders; whose they are is looked up once and kept until a holder is given to a rank.

use std::sync::atomic::Ordering;

use rustc_hash::FxHashMap;

use super::node::NONE;
use super::query::Walk;
use super::tree::{Index, Tree};
use crate::hash::Prompt;
use crate::ids::{EngineHash, Tier, WorkerRank};

/// A list of ranks, and room for what a query finds of them.
#[derive(Clone, Debug, Default)]
pub struct Among {
    ranks: Vec<WorkerRank>,
    places: FxHashMap<WorkerRank, u32>,
    /// By holder: the place of its rank, or `NONE`.
    place_of_holder: Vec<u32>,
    /// In which index and at which `Tree::holders_given` these places were looked up; `None`: the list has
    /// changed since.
    given: Option<(u64, u64)>,
    /// By place: blocks, and the last of them.
    blocks: Vec<usize>,
    last: Vec<u32>,
}

impl Among {
    /// The ranks, in the order of their places.
    pub fn ranks(&self) -> &[WorkerRank] {
        &self.ranks
    }

    /// The place of a rank; `None`: it is not in the list.
    pub fn place(&self, of: WorkerRank) -> Option<usize> {
        Some(*self.places.get(&of)? as usize)
    }

    /// Puts a rank at the end of the list, or finds it there. Its place.
    pub fn put(&mut self, of: WorkerRank) -> usize {
        if let Some(place) = self.place(of) {
            return place;
        }
        self.given = None;
        let end = self.ranks.len();
        // What lies behind that is never found.
        self.places.insert(of, u32::try_from(end).unwrap_or(NONE));
        self.ranks.push(of);
        end
    }

    /// Takes a rank out and puts the last one in its place, as `Vec::swap_remove`. The place.
    pub fn swap_remove(&mut self, of: WorkerRank) -> Option<usize> {
        let place = self.places.remove(&of)?;
        self.given = None;
        let at = place as usize;
        self.ranks.swap_remove(at);
        if let Some(moved) = self.ranks.get(at) {
            self.places.insert(*moved, place);
        }
        Some(at)
    }

    fn clear(&mut self) {
        self.blocks.clear();
        self.blocks.resize(self.ranks.len(), 0);
        self.last.resize(self.ranks.len(), NONE);
    }

    /// Whose each holder is. To be called after the walk: a holder that the walk saw was given before.
    fn look_up(&mut self, tree: &Tree) {
        let given = (tree.id, tree.holders_given.load(Ordering::Acquire));
        if self.given == Some(given) {
            return;
        }
        let holders = 0..tree.holders_end.load(Ordering::Acquire);
        let places = holders.map(|holder| {
            let (of, tier) = tree.holders.get(holder)?.of();
            let place = self.places.get(&of).filter(|_| tier == Tier::Device);
            place.copied()
        });
        let places = places.map(|place| place.unwrap_or(NONE));
        self.place_of_holder.clear();
        self.place_of_holder.extend(places);
        self.given = Some(given);
    }
}

/// What a query found.
#[derive(Debug)]
pub struct FoundAmong<'a> {
    index: &'a Index,
    among: &'a Among,
}

impl FoundAmong<'_> {
    /// By place: whole blocks from position 0 without a hole.
    pub fn blocks(&self) -> &[usize] {
        &self.among.blocks
    }

    /// The place of a rank; `None`: it is not in the list.
    pub fn place(&self, of: WorkerRank) -> Option<usize> {
        self.among.place(of)
    }

    /// The rank's own engine hash of its last block; `None`: it holds none.
    pub fn engine(&self, place: usize) -> Option<EngineHash> {
        let among = self.among;
        let blocks = *among.blocks.get(place)?;
        let (last, of) = (among.last.get(place)?, among.ranks.get(place)?);
        (blocks > 0).then(|| self.index.tree.name(*last, *of))
    }
}

impl Index {
    /// Tells `ask` what the ranks of `among` hold of the prompt in device memory, as `overlaps` does.
    ///
    /// Faster than that where a list is asked for again and again: it needs no memory of its own, and looks
    /// up engine hashes only when they are asked for.
    pub fn overlaps_among<R>(
        &self,
        prompt: &mut Prompt<'_>,
        among: &mut Among,
        ask: impl FnOnce(FoundAmong<'_>) -> R,
    ) -> R {
        let tree = &self.tree;
        among.clear();
        // While it stands, what the walk found is not used for anything else.
        let mut _pinned = None;
        if tree.begins(prompt) {
            _pinned = Some(crossbeam_epoch::pin());
            let mut walk = Walk::new();
            tree.walk_all(prompt, &mut walk);
            among.look_up(tree);
            walk.for_each(tree, prompt, |holder, end| {
                let place = among.place_of_holder.get(holder as usize);
                if let Some(place) = place
                    && let Some(blocks) = among.blocks.get_mut(*place as usize)
                    && let Some(last) = among.last.get_mut(*place as usize)
                {
                    *blocks = end.walked;
                    *last = end.last;
                }
            });
        }
        ask(FoundAmong { index: self, among })
    }
}
