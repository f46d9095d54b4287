//! The index as a list, and the recount that tests ask for.

use std::sync::atomic::Ordering;

use rustc_hash::{FxHashMap, FxHashSet};

use super::node::{NONE, Node, ROOT, Word, low_bits};
use super::tree::{Index, Tree, Writer, span};
use super::{Held, Sharing};
use crate::event::{Copies, Stored, StoredBlock};
use crate::hash::next_sequence_hash;
use crate::ids::{BlockHash, EngineHash, SequenceHash, Tier, WorkerRank};

impl Index {
    /// All blocks of a rank, sorted: to compare, to save, to show. Holds the lock of the changes meanwhile.
    pub fn held(&self, of: WorkerRank) -> Vec<Held> {
        let writer = self.writer.lock();
        let holders = self.tree.ranks.pin().get(&of).copied().unwrap_or([NONE; 3]);
        let mut ends = FxHashMap::default();
        let mut all = Vec::new();
        for holder in holders.into_iter().filter(|holder| *holder != NONE) {
            let Some(cells) = self.tree.holders.get(holder) else {
                continue;
            };
            for at in writer.nodes_of_holder(holder) {
                let Some(node) = self.tree.nodes.get(at) else {
                    continue;
                };
                let held = node.held_by(holder, &self.tree.more);
                for block in self.tree.each(node, held) {
                    let end = self
                        .tree
                        .end(&writer, at, self.tree.bit(node, block), &mut ends);
                    all.push(Held {
                        tier: cells.of().1,
                        position: end.0,
                        sequence: end.1,
                        engine: self.tree.name(block, of),
                    });
                }
            }
        }
        all.sort_unstable();
        all
    }

    /// Runs that make an empty rank hold what `of` holds, parents first. What lies behind a hole, or behind
    /// a name that stands for two blocks, is left out: events cannot say where it belongs. Second copies are not told.
    pub fn dump(&self, of: WorkerRank) -> Vec<Stored> {
        let writer = self.writer.lock();
        let tree = &self.tree;
        let holders = tree.ranks.pin().get(&of).copied().unwrap_or([NONE; 3]);
        let mut ends = FxHashMap::default();
        let mut runs = Vec::new();
        for (holder, tier) in holders.into_iter().zip(Tier::ALL) {
            for at in writer.nodes_of_holder(holder) {
                let Some(node) = tree.nodes.get(at) else {
                    continue;
                };
                let mut left = node.held_by(holder, &tree.more);
                while left != 0 {
                    let from = left.trailing_zeros();
                    let count = (left >> from).trailing_ones();
                    left &= !span(from, count);
                    let position = tree.end(&writer, at, 1 << from, &mut ends).0;
                    runs.push((position, tier, at, from, count));
                }
            }
        }
        runs.sort_unstable();
        let mut told = FxHashSet::default();
        let mut dump = Vec::new();
        for (_, tier, at, from, count) in runs {
            let Some(before) = tree.before(&writer, at, from) else {
                continue;
            };
            let parent = before.map(|before| tree.name(before, of));
            let unclear =
                parent.is_some_and(|parent| tree.find(&writer, of, holders, parent).len() > 1);
            if unclear || before.is_some_and(|before| !told.contains(&before)) {
                continue;
            }
            let base = tree
                .nodes
                .get(at)
                .map_or(0, |n| n.base.load(Ordering::Relaxed))
                + from;
            let hashes = tree.hashes.run(base, count as usize);
            let blocks = (base..base + count).zip(hashes).map(|(block, hash)| {
                told.insert(block);
                StoredBlock {
                    block: BlockHash(hash.load(Ordering::Relaxed)),
                    engine: tree.name(block, of),
                }
            });
            dump.push(Stored {
                tier,
                blocks: blocks.collect(),
                parent,
                namespace: writer.meta.get(at as usize).and_then(|meta| meta.namespace),
                copies: Copies::Single,
                source: None,
            });
        }
        dump
    }

    /// How much of `tier` more than one rank holds.
    ///
    /// Reads every node once, without the lock of the changes: it takes time that grows with the index and
    /// holds nobody up. While events come in, the three counts may be of different moments.
    pub fn sharing(&self, tier: Tier) -> Sharing {
        let _pinned = crossbeam_epoch::pin();
        let tree = &self.tree;
        let holders = tree.holders_end.load(Ordering::Acquire);
        let mut counted = vec![0_u32; holders.div_ceil(32) as usize];
        for holder in 0..holders {
            let cells = tree.holders.get(holder);
            if cells.is_some_and(|cells| cells.of().1 == tier) {
                counted[holder as usize / 32] |= 1 << (holder % 32);
            }
        }
        let counted = |group: u32, holders: u32| {
            let of_tier = counted.get(group as usize).copied().unwrap_or(0);
            (of_tier & holders).count_ones()
        };
        let made = u32::try_from(self.nodes_made()).unwrap_or(NONE);
        let mut sum = Sharing::default();
        for node in (0..made).filter_map(|at| tree.nodes.get(at)) {
            let whole = low_bits(node.room.load(Ordering::Relaxed));
            let (mut once, mut twice) = (0, 0);
            for cell in node.cells(&tree.more) {
                let (times, blocks) = match Word::unpack(cell.load(Ordering::Acquire)) {
                    Word::Free => continue,
                    Word::Whole { group, holders } => (counted(group, holders), whole),
                    Word::Part { holder, blocks } => {
                        (counted(holder / 32, 1 << (holder % 32)), blocks)
                    }
                };
                if times > 0 {
                    twice |= if times > 1 { blocks } else { once & blocks };
                    once |= blocks;
                    sum.held += u64::from(times) * u64::from(blocks.count_ones());
                }
            }
            sum.distinct += u64::from(once.count_ones());
            sum.shared += u64::from(twice.count_ones());
        }
        sum
    }

    /// Nodes that were ever made, in use or free.
    pub fn nodes_made(&self) -> usize {
        self.writer.lock().meta.len()
    }

    /// Recounts everything that is kept twice. For tests: it takes the lock and walks the whole index.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&self) -> Result<(), String> {
        let writer = self.writer.lock();
        let tree = &self.tree;
        let (mut blocks_of, mut nodes_of) = (FxHashMap::default(), FxHashMap::default());
        let mut named = 0;
        let mut children = FxHashMap::default();
        for (at, node) in tree.reachable() {
            let Some(meta) = writer.meta.get(at as usize) else {
                return Err(format!("node {at} has no meta"));
            };
            *children.entry(meta.parent).or_insert(0_u32) += 1;
            let held = node.held(&tree.more);
            named += held.count_ones() as usize;
            if held == 0 && meta.children == 0 {
                return Err(format!("node {at} is of no use"));
            }
            for block in tree.each(node, held) {
                if writer.node_of(block) != at {
                    return Err(format!("block {block} of node {at} lies with another"));
                }
                let name = tree
                    .engines
                    .get(block)
                    .map(|name| name.load(Ordering::Relaxed));
                let name = EngineHash(name.unwrap_or_default());
                if !writer
                    .names
                    .blocks(name, &tree.engines)
                    .any(|one| one == block)
                {
                    return Err(format!("block {block} is not found by its name {name:?}"));
                }
            }
            for holder in 0..tree.holders_end.load(Ordering::Relaxed) {
                let mine = node.held_by(holder, &tree.more);
                if mine != 0 {
                    *blocks_of.entry(holder).or_insert(0_u64) += u64::from(mine.count_ones());
                    *nodes_of.entry(holder).or_insert(0_usize) += 1;
                    let list = writer.nodes_of.get(holder as usize);
                    if !list.is_some_and(|nodes| nodes.list.contains(&at)) {
                        return Err(format!("holder {holder} does not know its node {at}"));
                    }
                }
            }
        }
        for (at, _) in tree.reachable() {
            let counted = children.get(&at).copied().unwrap_or(0);
            if writer.meta.get(at as usize).map(|meta| meta.children) != Some(counted) {
                return Err(format!("node {at} has {counted} children"));
            }
        }
        if writer.names.len() != named {
            return Err(format!("{} names of {named} blocks", writer.names.len()));
        }
        for holder in 0..tree.holders_end.load(Ordering::Relaxed) {
            let counted = blocks_of.get(&holder).copied().unwrap_or(0);
            let told = tree
                .holders
                .get(holder)
                .map(|cells| cells.blocks.load(Ordering::Relaxed));
            if told != Some(counted) {
                return Err(format!("holder {holder}: {told:?} blocks, not {counted}"));
            }
            let counted = nodes_of.get(&holder).copied().unwrap_or(0);
            let told = writer.nodes_of.get(holder as usize).map(|nodes| nodes.live);
            if told != Some(counted) {
                return Err(format!("holder {holder}: {told:?} nodes, not {counted}"));
            }
        }
        Ok(())
    }
}

impl Tree {
    /// All nodes in the tree.
    fn reachable(&self) -> Vec<(u32, &Node)> {
        let linked = self.children.pin();
        let mut waiting: Vec<u32> = linked.values().copied().collect();
        let mut all = Vec::new();
        while let Some(at) = waiting.pop() {
            if let Some(node) = self.nodes.get(at) {
                all.push((at, node));
                waiting.push(node.next.load(Ordering::Relaxed));
            }
        }
        all
    }

    /// The block before block `offset` of a node; `Some(None)`: it begins a prompt.
    fn before(&self, writer: &Writer, at: u32, offset: u32) -> Option<Option<u32>> {
        let (at, offset) = if offset > 0 {
            (at, offset)
        } else {
            let meta = writer.meta.get(at as usize)?;
            (meta.parent, meta.offset)
        };
        if at == ROOT {
            return Some(None);
        }
        let base = self.nodes.get(at)?.base.load(Ordering::Relaxed);
        Some(Some(base + offset - 1))
    }

    pub(super) fn first_hash(&self, node: &Node) -> BlockHash {
        let first = self.hash(node.base.load(Ordering::Relaxed));
        first.unwrap_or(BlockHash(0))
    }

    /// Position and sequence hash of the block `bit` of a node. `ends` remembers those of whole nodes.
    fn end(
        &self,
        writer: &Writer,
        at: u32,
        bit: u32,
        ends: &mut FxHashMap<(u32, u32), (usize, SequenceHash)>,
    ) -> (usize, SequenceHash) {
        let mut path = Vec::new();
        let mut here = (at, bit.trailing_zeros() + 1);
        let mut end = None;
        while here.0 < ROOT {
            if let Some(known) = ends.get(&here) {
                end = Some(*known);
                break;
            }
            path.push(here);
            let Some(meta) = writer.meta.get(here.0 as usize) else {
                break;
            };
            here = (meta.parent, meta.offset);
        }
        for here in path.into_iter().rev() {
            let node = self.nodes.get(here.0);
            let base = node.map_or(0, |node| node.base.load(Ordering::Relaxed));
            for cell in self.hashes.run(base, here.1 as usize) {
                let hash = BlockHash(cell.load(Ordering::Relaxed));
                let parent = end.map(|(_, sequence)| sequence);
                let position = end.map_or(0, |(position, _)| position + 1);
                end = Some((position, next_sequence_hash(parent, hash)));
            }
            if let Some(end) = end {
                ends.insert(here, end);
            }
        }
        end.unwrap_or((0, SequenceHash(0)))
    }
}
