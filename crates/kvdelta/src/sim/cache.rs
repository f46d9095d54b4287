// SPDX-License-Identifier: Apache-2.0

//! The KV cache of one worker.
//!
//! A request pins the blocks of its prompt. Blocks that nobody pins stay, and go when room is needed: the one that was
//! let go first goes first, and a request lets its last block go first. So a prefix outlives what stands behind it, as
//! in vLLM's block pool.

use std::collections::VecDeque;

use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::trace::Node;

/// Blocks that there is memory for from the start.
const ROOM: usize = 4096;

/// Blocks of a worker: findable ones, pinned or idle, and room that running requests have reserved.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    capacity: usize,
    blocks: FxHashMap<Node, Block>,
    /// Blocks in the order in which they were let go, and which time that was. Those that were pinned since or have
    /// gone are passed over, which is faster than to take them out of the middle.
    released: VecDeque<(Node, u32)>,
    /// Number of the next release.
    release: u32,
    idle: usize,
    reserved: usize,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    pins: u32,
    /// Number of its last release.
    release: u32,
}

impl Block {
    const fn is_idle_since(self, release: u32) -> bool {
        self.pins == 0 && self.release == release
    }
}

impl Cache {
    /// An empty cache of `capacity` blocks.
    pub(crate) fn new(capacity: usize) -> Self {
        let room = capacity.min(ROOM);
        Self {
            capacity,
            blocks: FxHashMap::with_capacity_and_hasher(room, FxBuildHasher),
            released: VecDeque::with_capacity(room),
            release: 0,
            idle: 0,
            reserved: 0,
        }
    }

    /// Leading blocks of `path` that are here.
    pub(crate) fn held(&self, path: &[Node]) -> usize {
        path.iter()
            .take_while(|node| self.blocks.contains_key(node))
            .count()
    }

    /// Pins the blocks of `held`, all of which are here, and reserves room for `more`; what has to go for it is
    /// appended to `gone`. `false`: there is no room, and nothing was done.
    pub(crate) fn admit(&mut self, held: &[Node], more: usize, gone: &mut Vec<Node>) -> bool {
        for node in held {
            self.pin(*node);
        }
        let pinned = self.blocks.len() - self.idle;
        if pinned + self.reserved + more > self.capacity {
            for node in held {
                self.unpin(*node);
            }
            return false;
        }
        self.reserved += more;
        while self.blocks.len() + self.reserved > self.capacity {
            let Some((node, release)) = self.released.pop_front() else {
                break;
            };
            let block = self.blocks.get(&node);
            if block.is_some_and(|block| block.is_idle_since(release)) {
                self.blocks.remove(&node);
                self.idle -= 1;
                gone.push(node);
            }
        }
        true
    }

    /// The blocks of `path`, for which room is reserved, came in: they can be found from now on, and are pinned.
    /// Those that somebody else brought in meanwhile are shared. How many of them these were.
    pub(crate) fn fill(&mut self, path: &[Node]) -> usize {
        let mut shared = 0;
        self.reserved -= path.len();
        for node in path {
            if self.pin(*node) {
                shared += 1;
            } else {
                let block = Block {
                    pins: 1,
                    release: 0,
                };
                self.blocks.insert(*node, block);
            }
        }
        shared
    }

    /// Lets the blocks of `path` go, the last one first, and room of `more` blocks that was reserved.
    pub(crate) fn release(&mut self, path: &[Node], more: usize) {
        self.reserved -= more;
        for node in path.iter().rev() {
            let release = self.release;
            if let Some(block) = self.unpin(*node) {
                block.release = release;
                self.released.push_back((*node, release));
                self.release = release.wrapping_add(1);
            }
        }
        if self.released.len() > 2 * self.capacity {
            let blocks = &self.blocks;
            self.released.retain(|(node, release)| {
                let block = blocks.get(node);
                block.is_some_and(|block| block.is_idle_since(*release))
            });
        }
    }

    /// Pins a block; `false`: it is not here.
    fn pin(&mut self, node: Node) -> bool {
        let Some(block) = self.blocks.get_mut(&node) else {
            return false;
        };
        self.idle -= usize::from(block.pins == 0);
        block.pins += 1;
        true
    }

    /// Takes a pin back; the block, if that was the last one.
    fn unpin(&mut self, node: Node) -> Option<&mut Block> {
        let block = self.blocks.get_mut(&node)?;
        block.pins -= 1;
        if block.pins > 0 {
            return None;
        }
        self.idle += 1;
        Some(block)
    }

    /// Blocks that can be found.
    #[cfg(test)]
    pub(crate) fn nodes(&self) -> impl Iterator<Item = Node> + '_ {
        self.blocks.keys().copied()
    }

    /// Whether no request has anything here.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.idle == self.blocks.len() && self.reserved == 0
    }
}
