// SPDX-License-Identifier: Apache-2.0

//! The KV cache of one worker.
//!
//! A request pins the blocks of its prompt. Blocks that nobody pins stay, and go when room is needed: the one that was
//! let go first goes first, and a request lets its last block go first. So a prefix outlives what stands behind it, as
//! in vLLM's block pool.

use rustc_hash::FxHashMap;

use crate::trace::Node;

/// No slot.
const NONE: u32 = u32::MAX;

/// Blocks of a worker: findable ones, pinned or idle, and room that running requests have reserved.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    capacity: usize,
    places: FxHashMap<Node, u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// The idle ones, by the time when they were let go.
    oldest: u32,
    newest: u32,
    idle: usize,
    reserved: usize,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    node: Node,
    pins: u32,
    older: u32,
    newer: u32,
}

impl Cache {
    /// An empty cache of `capacity` blocks.
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            places: FxHashMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            oldest: NONE,
            newest: NONE,
            idle: 0,
            reserved: 0,
        }
    }

    /// Leading blocks of `path` that are here.
    pub(crate) fn held(&self, path: &[Node]) -> usize {
        path.iter()
            .take_while(|node| self.places.contains_key(node))
            .count()
    }

    /// Pins the blocks of `held`, all of which are here, and reserves room for `more`; what has to go for it is
    /// appended to `gone`. `false`: there is no room, and nothing was done.
    pub(crate) fn admit(&mut self, held: &[Node], more: usize, gone: &mut Vec<Node>) -> bool {
        let pins = |node| {
            self.places
                .get(node)
                .map(|slot| &self.slots[*slot as usize])
        };
        let idle = held.iter().filter_map(pins).filter(|slot| slot.pins == 0);
        let pinned = self.places.len() - self.idle + idle.count();
        if pinned + self.reserved + more > self.capacity {
            return false;
        }
        for node in held {
            if let Some(slot) = self.places.get(node).copied() {
                self.pin(slot);
            }
        }
        self.reserved += more;
        while self.places.len() + self.reserved > self.capacity {
            gone.push(self.evict());
        }
        true
    }

    /// The blocks of `path`, for which room is reserved, came in: they can be found from now on, and are pinned.
    /// Those that somebody else brought in meanwhile are shared. How many of them these were.
    pub(crate) fn fill(&mut self, path: &[Node]) -> usize {
        let mut shared = 0;
        for node in path {
            self.reserved -= 1;
            if let Some(slot) = self.places.get(node).copied() {
                self.pin(slot);
                shared += 1;
                continue;
            }
            let slot = Slot {
                node: *node,
                pins: 1,
                older: NONE,
                newer: NONE,
            };
            let place = match self.free.pop() {
                Some(place) => {
                    self.slots[place as usize] = slot;
                    place
                }
                None => {
                    self.slots.push(slot);
                    u32::try_from(self.slots.len() - 1).unwrap_or(NONE)
                }
            };
            self.places.insert(*node, place);
        }
        shared
    }

    /// Lets the blocks of `path` go, the last one first, and room of `more` blocks that was reserved.
    pub(crate) fn release(&mut self, path: &[Node], more: usize) {
        self.reserved -= more;
        for node in path.iter().rev() {
            let Some(place) = self.places.get(node).copied() else {
                continue;
            };
            let slot = &mut self.slots[place as usize];
            slot.pins -= 1;
            if slot.pins > 0 {
                continue;
            }
            (slot.older, slot.newer) = (self.newest, NONE);
            match self.slots.get_mut(self.newest as usize) {
                Some(newest) => newest.newer = place,
                None => self.oldest = place,
            }
            self.newest = place;
            self.idle += 1;
        }
    }

    fn pin(&mut self, place: u32) {
        let slot = &mut self.slots[place as usize];
        slot.pins += 1;
        if slot.pins == 1 {
            self.unlink(place);
        }
    }

    /// Takes a block out of the idle ones.
    fn unlink(&mut self, place: u32) {
        let Slot { older, newer, .. } = self.slots[place as usize];
        match self.slots.get_mut(older as usize) {
            Some(older) => older.newer = newer,
            None => self.oldest = newer,
        }
        match self.slots.get_mut(newer as usize) {
            Some(newer) => newer.older = older,
            None => self.newest = older,
        }
        self.idle -= 1;
    }

    /// Throws the oldest idle block out, of which there must be one.
    fn evict(&mut self) -> Node {
        let place = self.oldest;
        self.unlink(place);
        let node = self.slots[place as usize].node;
        self.places.remove(&node);
        self.free.push(place);
        node
    }

    /// Blocks that can be found.
    #[cfg(test)]
    pub(crate) fn nodes(&self) -> impl Iterator<Item = Node> + '_ {
        self.places.keys().copied()
    }

    /// Whether no request has anything here.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.idle == self.places.len() && self.reserved == 0
    }
}
